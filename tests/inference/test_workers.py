"""Two processes take the same steps as one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from capsule_zoo.inference.training.checkpoint import load_checkpoint

SCRIPT = Path(__file__).with_name("train_in_processes.py")
ROOT = SCRIPT.parents[2]


def train(folder, steps, processes):
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), str(SCRIPT)]
    places = os.pathsep.join([str(ROOT), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [*command, str(folder), str(steps)],
        env=os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return load_checkpoint(folder / "run.safetensors")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")
def test_two_processes_take_the_steps_of_one(tmp_path):
    alone = train(tmp_path / "one", 9, processes=1)
    train(tmp_path / "two", 5, processes=2)
    together = train(tmp_path / "two", 9, processes=2)  # resumed
    assert together["config"]["processes"] == 2
    for role in ("model", "guide"):
        for name, value in alone[role].items():
            torch.testing.assert_close(together[role][name], value, rtol=0, atol=1e-10)
    loss, gradient_norm = 2, 4  # columns of the history
    for column in (loss, gradient_norm):
        expected = alone["progress"]["history"][:, column]
        seen = together["progress"]["history"][:, column]
        torch.testing.assert_close(seen, expected, rtol=0, atol=1e-10)
