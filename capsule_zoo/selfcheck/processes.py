"""One training run in one process and in two: the same losses, and the time that two save.

    capsule-zoo selfcheck --faults

Both runs take the same steps of matrix capsules, which draw no random numbers, on the same images
of noise, one thread for each process. Their losses may differ by rounding alone. The efficiency is
the time of one process over twice the time of two. It means something only on a machine with two
idle cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from capsule_zoo.data import Split
from capsule_zoo.inference import fit
from capsule_zoo.inference.training.checkpoint import load_checkpoint
from capsule_zoo.inference.training.history import COLUMNS
from capsule_zoo.records import Metric
from capsule_zoo.registry import create
from capsule_zoo.selfcheck.counts import Counts

ENTRY = "matrix-capsules"
IMAGES, BATCH = 64, 32  # smaller batches gain less: a part of a step does not depend on them
WARM_UP = 3  # first steps, whose time is not counted
CLOSE = 2e-6  # relative: losses in float32 that differ by less differ by rounding


def train(path: Path, steps: int) -> None:
    """Train for some steps, alone or in the group that `torchrun` started, and write the run."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    entry = create(ENTRY)
    images = torch.rand(IMAGES, *entry.model.image_shape)
    fit(
        entry.model,
        entry.guide,
        Split(images, torch.arange(IMAGES) % 10, "noise"),
        objective=entry.objective,
        labels=True,
        steps=steps,
        batch_size=BATCH,
        checkpoint=path,
        progress=False,
    )


def history(processes: int, steps: int) -> dict[str, np.ndarray]:
    """Train in new processes, and return the columns of the history by name.

    Raises:
        RuntimeError: the training failed.
    """
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        command = [sys.executable, "-m", *(launcher if processes > 1 else []), __name__]
        done = subprocess.run(
            [*command, str(path), str(steps)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"training in {processes} processes failed:\n{done.stderr}")
        rows = load_checkpoint(path)["progress"]["history"].numpy()
    return dict(zip(COLUMNS, rows.T, strict=True))


def compared(steps: int, rounds: int) -> tuple[Counts, Metric]:
    """Train in one process and in two, in turns, and compare losses and times.

    Args:
        steps: steps of every run.
        rounds: number of runs of each kind.

    Returns:
        The steps, with those whose losses differ by more than rounding, and the efficiency, a
        median over the rounds.
    """
    counts, ratios = Counts(), []
    for _ in range(rounds):
        alone, shared = history(1, steps), history(2, steps)
        ratios.append(_time(alone) / (2 * _time(shared)))
        for step, (one, two) in enumerate(zip(alone["loss"], shared["loss"], strict=True)):
            counts.tried += 1
            if not abs(two - one) <= CLOSE * abs(one):
                counts.bad.append(f"step {step}: {two} in two processes, {one} in one")
    error = float(np.std(ratios, ddof=1) / rounds**0.5) if rounds > 1 else None
    return counts, Metric(value=float(np.median(ratios)), se=error, n=rounds)


def _time(run: dict[str, np.ndarray]) -> float:
    """Return the median time of a step after the first ones, in seconds."""
    return float(np.median(np.diff(run["seconds"])[WARM_UP:]))


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
