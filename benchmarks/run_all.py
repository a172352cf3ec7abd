"""Run every benchmark, and fill in the tables of all pages from the records.

    python benchmarks/run_all.py                         # from the root of a checkout
    python benchmarks/run_all.py render rbm --repeats 10 --threads 2
    python benchmarks/run_all.py --tables                # measures nothing

Benchmarks run one after the other, each in a separate process. A benchmark that fails does not stop
the others, and sets the exit status.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from capsule_zoo.pages import markdown as readme
from capsule_zoo.records import FOLDER
from capsule_zoo.registry import unknown_name_message

HERE = Path(__file__).parent
NOT_BENCHMARKS = {"air", "generative_capsules", "harness", "run_all"}
ON_ONE_THREAD = {"equal_network", "serving"}  # whatever the others have


def names() -> list[str]:
    """List the names of all benchmarks."""
    return sorted({path.stem for path in HERE.glob("*.py")} - NOT_BENCHMARKS)


def run(name: str, repeats: int | None, threads: int | None, out: Path) -> bool:
    """Run a benchmark and return True if it succeeded; None is the benchmark's default."""
    print(f"== {name}", flush=True)
    settings = {"--repeats": repeats, "--threads": None if name in ON_ONE_THREAD else threads}
    options = [word for key, n in settings.items() if n is not None for word in (key, str(n))]
    command = [sys.executable, str(HERE / f"{name}.py"), *options, "--out", str(out)]
    return subprocess.run(command).returncode == 0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="all benchmarks, and the tables of their ratios")
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(names())} (default: all)")
    parser.add_argument("--tables", action="store_true", help="write the tables, measure nothing")
    parser.add_argument("--repeats", type=int, help="rounds of each (default: its own)")
    parser.add_argument("--threads", type=int, help="of each (default: torch's)")
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="where records lie; elsewhere: no tables"
    )
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in names():
            parser.error(unknown_name_message("benchmark", name, names()))
    selected = [] if options.tables else options.names or names()
    failed = [n for n in selected if not run(n, options.repeats, options.threads, options.out)]
    if options.out == FOLDER:
        readme.main()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
