"""One training run in one process and in two: the same losses.

Both runs take the same steps of matrix capsules, which draw no random numbers, on the same images
of noise, one thread for each process. Their losses may differ by rounding alone.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from capsule_zoo.data import Split
from capsule_zoo.inference import Checks, Inputs, fit
from capsule_zoo.inference.training.checkpoint import load_checkpoint
from capsule_zoo.inference.training.progress import COLUMNS
from capsule_zoo.registry import create

ENTRY = "matrix-capsules"
IMAGES, BATCH = 64, 32
ROOT = Path(__file__).parents[2]
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
        inputs=Inputs(labels=True),
        steps=steps,
        batch_size=BATCH,
        checks=Checks(checkpoint=path, progress=False),
    )


def losses(processes: int, steps: int) -> np.ndarray:
    """Train in new processes, and return the loss of each step."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        command = [sys.executable, *(launcher if processes > 1 else []), __file__]
        done = subprocess.run(
            [*command, str(path), str(steps)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        rows = load_checkpoint(path)["progress"]["history"].numpy()
    return rows[:, COLUMNS.index("loss")]


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
