"""Studies: training runs that differ in variant and seed, trained side by side.

>>> study = Study({"small": dict(units=8), "large": dict(units=64)}, seeds=3)
>>> outcomes = study.run(train_one, options)          # train_one(job) returns numbers
>>> outcomes["small"][0]                              # from the first seed

Every run has a run folder, whose `config.json` holds its recipe, and whose `metrics.json` holds the
outcome when it has ended. A study that was interrupted repeats only the runs that had not ended;
these go on from their last checkpoints (see `training.train`).
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any, Generic, TypeVar

import torch

from capsule_zoo.data.progress import SECONDS_BETWEEN_LINES, Bar, track
from capsule_zoo.experiments.options import Options
from capsule_zoo.models.checks import check_known
from capsule_zoo.models.common.modes import seeded
from capsule_zoo.runs.folder import note, read_metrics

T = TypeVar("T")
S = TypeVar("S")
V = TypeVar("V")

OUTCOME, SECONDS = "outcome", "seconds"
SECONDS_BETWEEN_LOOKS = 1.0  # of a run's process at its parent


@dataclass(frozen=True)
class Job(Generic[V]):
    """One run of a study, as a process needs it.

    Attributes:
        name: name of the variant.
        variant: the variant itself.
        options: options with the run's own seed, minutes and folder, and without progress bars.
    """

    name: str
    variant: V
    options: Options


@dataclass(frozen=True)
class Study(Generic[V]):
    """Training runs that differ in variant and seed.

    Attributes:
        variants: what is trained, by name.
        seeds: number of seeds for each variant, counted from the seed of the options.
        costs: cost of a step of a variant, relative to the others; 1 if it is not given. The runs
            share the minutes in proportion to their costs, so that all take as many steps.
    """

    variants: Mapping[str, V]
    seeds: int = 1
    costs: Mapping[str, float] = field(default_factory=dict)

    def jobs(self, options: Options) -> list[Job[V]]:
        """Return the runs, seed by seed, and of each seed those with the highest cost first.

        A study that is interrupted then has all variants from some seeds.
        """
        seeds = range(options.seed, options.seed + self.seeds)
        runs = [(name, seed) for seed in seeds for name in self.variants]
        runs.sort(key=lambda run: (run[1], -self.costs.get(run[0], 1)))
        minutes: dict[str, float] = {}
        if options.minutes is not None:
            minutes = divide(options.minutes / self.seeds, self.variants, self.costs)
        jobs = []
        for name, seed in runs:
            own = replace(options.within(f"{name}-{seed}"), seed=seed, minutes=minutes.get(name))
            jobs.append(Job(name, self.variants[name], replace(own, progress=False)))
        return jobs

    def run(
        self, task: Callable[..., Any], options: Options, /, **settings: Any
    ) -> dict[str, list[Any]]:
        """Call a task for every run, and return its outcomes by variant, seed after seed.

        The runs go on side by side, each on one thread of a process of its own.

        Args:
            task: a function of a module, which takes a job. It returns what JSON can hold, and its
                random numbers depend on the seed of its job only.
            settings: further arguments of the task.
        """
        jobs = self.jobs(options)
        options.say(f"Running {', '.join(self.variants)} from {self.seeds} seeds, {_length(jobs)}")
        task = partial(saved, partial(task, **settings))
        found: dict[str, list[Any]] = {name: [] for name in self.variants}
        outcomes = side_by_side(task, jobs, options.processes, progress=options.progress)
        for job, outcome in zip(jobs, outcomes, strict=True):
            found[job.name].append(outcome)
        return found

    def folders(self, options: Options, seed: int | None = None) -> dict[str, Path]:
        """Return the folders of the runs from a seed, by variant.

        Args:
            seed: the first seed by default.

        Raises:
            ValueError: nothing is saved, because `options.runs` is None.
        """
        if options.runs is None:
            raise ValueError("options.runs is needed, a folder in which runs are saved")
        seed = options.seed if seed is None else seed
        return {name: options.runs / f"{name}-{seed}" for name in self.variants}


def saved(task: Callable[[Job], Any], job: Job) -> Any:
    """Return the outcome of a job, which is saved in the metrics of its run folder."""
    folder = job.options.runs
    found = read_metrics(folder) if folder else {}
    if OUTCOME not in found:
        began = time.time()
        found = {OUTCOME: json.loads(json.dumps(task(job)))}  # the same when it is read again
        if folder:
            note(folder, SECONDS, time.time() - began)
            note(folder, OUTCOME, found[OUTCOME])
    return found[OUTCOME]


def divide(
    minutes: float, names: Iterable[str], costs: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the share of every variant in the minutes.

    Args:
        names: names of the variants.
        costs: relative costs, to which shares are proportional; a cost that is not given is 1.
    """
    relative = {name: (costs or {}).get(name, 1.0) for name in names}
    total = sum(relative.values())
    return {name: minutes * cost / total for name, cost in relative.items()}


def in_turn(options: Options, variants: Mapping[str, V]) -> Iterator[tuple[str, V, float]]:
    """Yield every variant with its name and its minutes, which are equal parts of the budget."""
    for name, minutes in divide(options.budget, variants).items():
        yield name, variants[name], minutes


def choose(kind: str, names: Sequence[str], known: Mapping[str, V]) -> dict[str, V]:
    """Return the named variants.

    Args:
        kind: kind of a variant, for the message.

    Raises:
        ValueError: a name is unknown; the message names the nearest ones.
    """
    for name in names:
        check_known(kind, name, known)
    return {name: known[name] for name in names}


def _length(jobs: Sequence[Job]) -> str:
    """Return how long the runs are trained, as far as it is known."""
    minutes = [job.options.minutes for job in jobs if job.options.minutes is not None]
    return f"{len(jobs)} runs" + (
        f", {sum(minutes):g} minutes of training in all" if minutes else ""
    )


def side_by_side(
    task: Callable[[T], S], jobs: Iterable[T], processes: int | None = None, progress: bool = False
) -> list[S]:
    """Return the task's results for every job, each on one thread of its own process.

    Two models of the zoo's sizes train faster side by side than one after the other on two threads.

    Args:
        processes: see `Options`.
        progress: show how many jobs have ended.
    """
    jobs = [*jobs]
    if processes == 1:
        found = []
        for job in track(jobs, "running", "runs", enabled=progress):
            with seeded(0):  # torch's random numbers are left as another process would
                found.append(task(job))
        return found
    context = get_context("spawn")  # a fork would inherit torch's threads, which do not survive it
    number = processes or torch.get_num_threads()
    bar = Bar("running", "runs", len(jobs), enabled=progress)
    with bar, ProcessPoolExecutor(number, context, _begin_process, (os.getpid(),)) as pool:
        futures = [pool.submit(task, job) for job in jobs]
        try:
            while running := wait(futures, SECONDS_BETWEEN_LINES, FIRST_EXCEPTION).not_done:
                bar.advance(len(jobs) - len(running))
                for future in {*futures} - running:
                    future.result()  # raises what ended it
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_process(parent: int) -> None:
    """Give this process one thread, and end it when its parent has ended.

    If a study is killed, its runs must end too: the same command may soon go on with them, and two
    processes would write the same files.
    """
    torch.set_num_threads(1)
    Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)
