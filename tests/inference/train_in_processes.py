"""Trains the toy pair and writes its parameters; test_workers.py runs it alone and by torchrun."""

import os
import sys
from pathlib import Path

import torch
from toys import Labelaw, PointGuide, conjugate_images

from capsule_zoo.data import Split
from capsule_zoo.inference import Checks, Inputs, fit


def train(folder: str, steps: int) -> None:
    """Train the pair, or go on with it, and write `run.safetensors` into the folder."""
    torch.manual_seed(0)
    data = Split(conjugate_images(23), torch.arange(23) % 2)
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    model = Labelaw().double()
    guide = PointGuide(model).double()
    with torch.no_grad():  # what the first process starts from is what counts
        guide.slope += 0.1 * int(os.environ.get("RANK", "0"))
    path = os.path.join(folder, "run.safetensors")
    fit(
        model,
        guide,
        data,
        steps=steps,
        batch_size=7,
        lr=0.005,
        optimizer=torch.optim.SGD,
        inputs=Inputs(labels=True),
        checks=Checks(
            checkpoint=path, resume=path if os.path.exists(path) else None, progress=False
        ),
    )


if __name__ == "__main__":
    for last in sys.argv[2:]:  # importing takes most of the time, so that one start does for all
        train(sys.argv[1], int(last))
    if sys.platform == "linux":  # what outlives the group may abort the process at its exit
        threads = {Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()}
        assert not any("gloo" in name for name in threads), f"still running: {threads}"
