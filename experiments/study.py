"""Studies: training runs that differ in variant and seed, trained in parallel.

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
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any, Generic, TypeVar

import torch

from capsule_zoo.data.progress import SECONDS_BETWEEN_LINES, Bar, track
from capsule_zoo.experiments.options import Options
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.runs.folder import note, read_metrics

T = TypeVar("T")
S = TypeVar("S")
V = TypeVar("V")

OUTCOME, SECONDS = "outcome", "seconds"
SECONDS_BETWEEN_LOOKS = 1.0  # interval at which a run's process checks that its parent lives


@dataclass(frozen=True)
class Job(Generic[V]):
    """One run of a study: its variant, and options with the run's seed, minutes and folder."""

    name: str
    variant: V
    options: Options


@dataclass(frozen=True)
class Study(Generic[V]):
    """A study: training runs that differ in variant and seed.

    Attributes:
        variants: the variants by name; a task gets its variant.
        seeds: number of seeds for each variant, counted from the seed of the options.
    """

    variants: Mapping[str, V]
    seeds: int = 1

    def jobs(self, options: Options) -> list[Job[V]]:
        """Return the jobs of all runs, seed by seed; the minutes are divided equally among them.

        A study that is interrupted then has all variants from some seeds.
        """
        minutes = options.minutes and options.minutes / self.seeds / len(self.variants)
        jobs = []
        for seed in range(options.seed, options.seed + self.seeds):
            for name, variant in self.variants.items():
                inside = options.within(f"{name}-{seed}")
                changed = replace(inside, seed=seed, minutes=minutes, progress=False)
                jobs.append(Job(name, variant, changed))
        return jobs

    def run(
        self, task: Callable[..., Any], options: Options, /, **settings: Any
    ) -> dict[str, list[Any]]:
        """Call a task for every run, and return the outcomes by variant, seed after seed.

        Args:
            task: a function of a module, which takes a job. Its result can be written as JSON, and
                its random numbers depend on the job's seed only.
            settings: further arguments of the task.
        """
        jobs = self.jobs(options)
        minutes = "" if options.minutes is None else f", {options.minutes:g} minutes in all"
        description = f"{', '.join(self.variants)} from {self.seeds} seeds"
        options.say(f"Running {description}, {len(jobs)} runs{minutes}")
        task = partial(save_outcome, partial(task, **settings))
        outcomes: dict[str, list[Any]] = {name: [] for name in self.variants}
        results = side_by_side(task, jobs, options.processes, progress=options.progress)
        for job, outcome in zip(jobs, results, strict=True):
            outcomes[job.name].append(outcome)
        return outcomes

    def folders(self, options: Options) -> dict[str, Path]:
        """Return the run folders of the first seed, by variant."""
        if options.runs is None:
            raise ValueError("options.runs is needed, a folder in which runs are saved")
        return {name: options.runs / f"{name}-{options.seed}" for name in self.variants}


def save_outcome(task: Callable[[Job], Any], job: Job) -> Any:
    """Return the outcome of a job, saved in its run folder; run the task if there is none."""
    folder = job.options.runs
    metrics = read_metrics(folder) if folder else {}
    if OUTCOME not in metrics:
        began = time.time()
        metrics = {OUTCOME: json.loads(json.dumps(task(job)))}  # as read from JSON
        if folder:
            note(folder, SECONDS, time.time() - began)
            note(folder, OUTCOME, metrics[OUTCOME])
    return metrics[OUTCOME]


def side_by_side(
    task: Callable[[T], S], jobs: Iterable[T], processes: int | None = None, progress: bool = False
) -> list[S]:
    """Run a task for jobs in parallel, each on one thread of a separate process.

    Two models of the zoo's sizes train faster in parallel than one after the other on two threads.
    """
    jobs = [*jobs]
    if processes == 1:
        results = []
        for job in track(jobs, "running", "runs", enabled=progress):
            with use_seed(0):  # torch's random numbers are left as another process would
                results.append(task(job))
        return results
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
    """Limit this process to one thread, and end it when its parent has ended.

    If a study is killed, its runs must end too: a repeated command may soon resume them, and two
    processes would then write to one file.
    """

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    torch.set_num_threads(1)
    Thread(target=end_with_parent, daemon=True).start()
