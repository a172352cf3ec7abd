"""Freed memory is kept if glibc supports it, and the user's own settings take precedence."""

import os
import platform
import subprocess
import sys
from statistics import median

import pytest

from capsule_zoo.inference.training.memory import keep_memory

CODE = """
import resource, torch
from capsule_zoo.inference.training.memory import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MiB, freed at once: more than glibc ever keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back = faults()
done = keep_memory()
faults()
print(done, given_back, *[faults() for _ in range(9)])
"""


def outcome() -> list[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE], env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_kept():
    done, given_back, *faults = outcome()
    assert done == "True"
    # A small block that lands behind a large one may leave a hole a few bytes too small for the
    # next, which then takes fresh memory once; from then on there is room.
    assert median(map(int, faults)) <= 0.1 * int(given_back)


def test_settings_of_the_user_are_respected(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_memory()
