"""Compare test-time inference with plain Adam: time to the same objective.

    python benchmarks/refine.py --run part-whole-mnist

The experiment `part-whole/refine` does the work, on 128 upright and 128 turned test digits. Both
methods race to one nat below the best objective that any run reached, each at its best rate and
length. The headline is `speedup_upright` and `speedup_rotated`.
"""

import argparse
from pathlib import Path

from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.records import FOLDER, flatten


def main() -> None:
    parser = argparse.ArgumentParser(description="benchmark of test-time inference")
    parser.add_argument("--run", default="part-whole-mnist", help="run folder or trained weights")
    parser.add_argument("--data-root", help="folder with torchvision's data sets")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where records lie")
    chosen = parser.parse_args()
    options = Options(run=chosen.run, data_root=chosen.data_root)
    result, path = reproduce("part-whole/refine", options, folder=chosen.out)
    for name, metric in flatten(result.metrics)[0].items():
        error = "" if metric["se"] is None else f" (s.e. {metric['se']:.2f})"
        print(f"  {name:28}{metric['value']:10.2f}{error}")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
