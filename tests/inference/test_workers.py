"""Two processes take the same steps as one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_in_processes
from terminal import PATIENCE

from capsule_zoo.inference.training.checkpoint import load_checkpoint

SCRIPT = Path(__file__).with_name("train_in_processes.py")
ROOT = SCRIPT.parents[2]


def train_two(folder, *steps):
    """Train by two processes to each number of steps in turn, and return what they wrote."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, str(SCRIPT)]
    places = os.pathsep.join([str(ROOT), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [*command, str(folder), *map(str, steps)],
        env=os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    return load_checkpoint(folder / "run.safetensors")


@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")
def test_two_processes_take_the_steps_of_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    train_in_processes.train(str(one), 9)
    alone = load_checkpoint(one / "run.safetensors")
    together = train_two(two, 5, 9)  # resumed after five
    assert together["config"]["processes"] == 2
    for role in ("model", "guide"):
        for name, value in alone[role].items():
            torch.testing.assert_close(together[role][name], value, rtol=0, atol=1e-10)
    loss, gradient_norm = 2, 4  # columns of the history
    for column in (loss, gradient_norm):
        expected = alone["progress"]["history"][:, column]
        values = together["progress"]["history"][:, column]
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-10)
