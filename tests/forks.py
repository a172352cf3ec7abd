"""Programs in processes of their own that start where the zoo has been imported but not used.

The import takes seconds: one process does it, looks up no name of the zoo, and forks for each
program.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess]

START = """
import json, os, sys, warnings
import capsule_zoo.cli, capsule_zoo.experiments, capsule_zoo.inference, capsule_zoo.registry
assert not (capsule_zoo.registry._registered or capsule_zoo.experiments._experiments)
for line in sys.stdin:
    folder, code, words = json.loads(line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which a fork leaves behind
        child = os.fork()
    if not child:
        os.chdir(folder)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv[1:] = words
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def forks(home: Path) -> Iterator[Run]:
    """Yield a function that runs a program in a folder, where it leaves `out` and `err`.

    The zoo is that of the checkout `home`. Skip the test on a system that has no fork.
    """
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    environment = {**os.environ, "PYTHONPATH": str(home)}
    with subprocess.Popen(
        [sys.executable, "-c", START], cwd=home, env=environment, **pipes
    ) as process:

        def run(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess:
            process.stdin.write(json.dumps([str(cwd), code, words]) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
            printed = ((cwd / name).read_text() for name in ("out", "err"))
            return subprocess.CompletedProcess(code, status, *printed)

        yield run
