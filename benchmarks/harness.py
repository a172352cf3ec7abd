"""Measurement of the speed and memory of contestants: the zoo's code and its peers.

The contestants alternate, round after round, so that a machine that slows down affects all of
them. Medians and the ratios of each round are reported. Memory is the growth of the resident set
beyond imports and inputs, with each contestant in a separate process.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from capsule_zoo.records import FOLDER, Metrics, Number, Numbers, flatten, write_record

Contestant = Callable[[], object]
Contestants = dict[str, Contestant]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: the contestants, the check that they agree, and which of them is ours.

    Attributes:
        name: name of the record, `benchmarks/<name>`.
        make: returns the contestants by name, without running them, because memory touched by one
            contestant would not be counted for another. A contestant that returns a float has timed
            itself, in seconds.
        check: raises AssertionError unless the contestants have equal results; called first.
        ours: the contestant that is ours.
        peers: the contestants that ours is compared with; all others are only timed.
        data: a description of the inputs.
    """

    name: str
    make: Callable[[], Contestants]
    check: Callable[[], None]
    ours: str
    peers: tuple[str, ...]
    data: str

    @property
    def summary(self) -> str:
        """A one-line summary: the first line of the docstring of the benchmark's module."""
        return (sys.modules[self.make.__module__].__doc__ or "").partition("\n")[0]


def images_of_noise(number: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return images (number, 1, 28, 28) of noise, and random labels of ten classes."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(number, 1, 28, 28, generator=generator, dtype=dtype)
    return pixels, torch.arange(number) % 10


def update(
    modules: Iterable[nn.Module], loss: Callable[[], Tensor], lr: float = 1e-3, **options: bool
) -> Contestant:
    """Return a function that updates modules: a loss, its gradient, and a step of Adam."""
    adam = torch.optim.Adam([p for module in modules for p in module.parameters()], lr, **options)

    def step() -> None:
        adam.zero_grad()
        loss().backward()
        adam.step()

    return step


def processor_time(call: Contestant) -> Contestant:
    """Return a contestant that runs a function and returns its processor time in seconds."""

    def time_call() -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    return time_call


def check_same_gradients(
    losses: Iterable[Callable[[], Tensor]], modules: Iterable[nn.Module], rtol: float, atol: float
) -> None:
    """Raise AssertionError unless losses and gradients agree for equal random numbers."""
    gradients, parameters = [], [p for module in modules for p in module.parameters()]
    for loss in losses:
        torch.manual_seed(1)
        value = loss()
        gradients.append((value, *torch.autograd.grad(value, parameters)))
    first, *others = gradients
    for other in others:
        for one, another in zip(first, other, strict=True):
            torch.testing.assert_close(one, another, rtol=rtol, atol=atol)


def interleave(contestants: Contestants, repeats: int, warmup: int = 2) -> dict[str, np.ndarray]:
    """Time each contestant in each round, in seconds, by name; the order rotates every round."""
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(warmup + repeats):
        offset = round_ % len(names)
        for name in names[offset:] + names[:offset]:
            taken = stopwatch(contestants[name])
            if round_ >= warmup:
                seconds[name].append(taken)
    return {name: np.array(values) for name, values in seconds.items()}


def stopwatch(call: Contestant) -> float:
    """Return the seconds that a contestant takes, or the seconds that it returns."""
    began = time.perf_counter()
    duration = call()
    taken = time.perf_counter() - began
    return duration if isinstance(duration, float) else taken


def peak_memory(make: Callable[[], Contestants], name: str) -> float:
    """Return the MiB by which a contestant's resident set grows at its peak, in a new process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as fresh:
        return fresh.submit(_peak_growth, make, name, torch.get_num_threads()).result()


def _peak_growth(make: Callable[[], Contestants], name: str, threads: int) -> float:
    torch.set_num_threads(threads)
    contestant = make()[name]
    resettable = Path("/proc/self/clear_refs")
    if resettable.exists():
        resettable.write_text("5")  # reset the peak
    before = _peak()
    for _ in range(2):
        contestant()
    return _peak() - before


def _peak() -> float:
    """Return the peak resident set of this process in MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) / 1024
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measure(benchmark: Benchmark, repeats: int) -> dict[str, Numbers]:
    """Measure all contestants, and compare the peers with ours.

    Returns:
        By contestant, "seconds" and "mebibytes"; by peer, "ratio" (the peer's time over ours) and
        "memory_ratio". Times are medians over rounds.

    Raises:
        AssertionError: the contestants have different results.
    """
    benchmark.check()
    seconds = interleave(benchmark.make(), repeats)
    memory = {n: peak_memory(benchmark.make, n) for n in (benchmark.ours, *benchmark.peers)}
    ours = benchmark.ours
    return {
        "seconds": {name: median(values) for name, values in seconds.items()},
        "mebibytes": {name: (growth, None, 1) for name, growth in memory.items()},
        "ratio": {peer: median(seconds[peer] / seconds[ours]) for peer in benchmark.peers},
        "memory_ratio": {peer: (memory[peer] / memory[ours], None, 1) for peer in benchmark.peers},
    }


def median(values: np.ndarray) -> Number:
    """Return the median of values, and its standard error from the median absolute deviation."""
    center = float(np.median(values))
    scale = 1.4826 * float(np.median(np.abs(values - center)))
    return center, 1.2533 * scale / len(values) ** 0.5, len(values)


def main(benchmark: Benchmark) -> None:
    """Run a benchmark with the options of the command line."""
    run(
        benchmark.name,
        benchmark.summary,
        partial(measure, benchmark),
        benchmark.data,
        torch.get_num_threads(),
    )


def run(
    name: str, summary: str, measured: Callable[[int], Metrics], data: str, threads: int = 1
) -> None:
    """Read the command line, measure, print a table and write the record.

    Args:
        name: name of the record, `benchmarks/<name>`.
        summary: what is measured, in a line.
        measured: a function of the number of rounds that returns the numbers.
        data: a description of the inputs.
        threads: number of torch's threads, unless the command line gives another.
    """
    parser = argparse.ArgumentParser(description=f"benchmark {name}")
    parser.add_argument("--repeats", type=int, default=20, help="rounds (default: 20)")
    parser.add_argument("--threads", type=int, default=threads, help=f"(default: {threads})")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where records lie")
    options = parser.parse_args()
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads must be 1 or more")
    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    metrics, tables = flatten(measured(options.repeats))
    print(f"{name}, median of {options.repeats} rounds, {options.threads} threads")
    for metric_name, metric in metrics.items():
        error = "" if metric["se"] is None else f" (s.e. {metric['se']:.2g})"
        print(f"  {metric_name:40}{metric['value']:10.4g}{error}")
    path = write_record(
        f"benchmarks/{name}",
        metrics,
        command=f"python benchmarks/{name}.py --repeats {options.repeats} "
        f"--threads {options.threads}",
        seed=0,
        data=data,
        seconds=time.perf_counter() - began,
        folder=options.out,
        tables=tables,
        summary=summary,
    )
    print(f"written to {path}")
