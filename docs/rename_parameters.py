"""Rename parameters in files of version 0.1.0: `python docs/rename_parameters.py FILE...`.

Files of other models, and files that are renamed already, stay as they are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from capsule_zoo.inference.training.checkpoint import load_checkpoint, save_checkpoint

NAMES = {"eye.": "reader.", "hand.": "writer."}  # of recurrent capsules


def renamed(tree: Any) -> Any:
    """Return the contents of a checkpoint with the new names as keys."""
    if not isinstance(tree, dict):
        return tree
    return {_new(key): renamed(value) for key, value in tree.items()}


def _new(key: Any) -> Any:
    found = (old for old in NAMES if isinstance(key, str) and key.startswith(old))
    old = next(found, None)
    return key if old is None else NAMES[old] + key.removeprefix(old)


def main(files: list[str]) -> None:
    """Rename the parameters in each file, which is written whole or not at all."""
    for file in map(Path, files):
        save_checkpoint(file, renamed(load_checkpoint(file)))


if __name__ == "__main__":
    main(sys.argv[1:])
