"""Rename parameters in files of version 0.1.0: `python docs/rename_parameters.py FILE...`.

Files of other models, and files that are renamed already, stay as they are.
"""

import sys
from pathlib import Path
from typing import Any

from capsule_zoo.inference.training.checkpoint import load_checkpoint, save_checkpoint

# How names begin, old and new. A group applies to contents with a name that begins as its key does.
NAMES = {
    "eye.": {"eye.": "reader.", "hand.": "writer."},  # recurrent capsules
    "transformers.": {  # part-whole capsules, before 0.1.0
        "encoder.": "read_parts.encoder.",
        "pool.": "read_parts.pool.",
        "transformers.": "infer_objects.transformers.",
        "balance.": "infer_objects.balance.",
    },
    "infer_parents.": {"infer_parents.": "infer_objects."},  # part-whole capsules
    "direct.": {  # shape codes
        name: f"infer_objects.{name}" for name in ("body.", "center.", "spread.", "direct.")
    },
}


def renamed(tree: Any) -> Any:
    """Return the contents of a checkpoint with the new names as keys."""
    if not isinstance(tree, dict):
        return tree
    groups = [NAMES[key] for key in NAMES if any(str(name).startswith(key) for name in tree)]
    names = {old: new for group in groups for old, new in group.items()}
    return {_new(key, names): renamed(value) for key, value in tree.items()}


def _new(key: Any, names: dict[str, str]) -> Any:
    old = next((old for old in names if isinstance(key, str) and key.startswith(old)), None)
    return key if old is None else names[old] + key.removeprefix(old)


def _names(tree: Any) -> Any:
    return {key: _names(value) for key, value in tree.items()} if isinstance(tree, dict) else None


def main(files: list[str]) -> None:
    """Rename the parameters in each file that has old ones; it is written whole or not at all."""
    for file in map(Path, files):
        old = load_checkpoint(file)
        if _names(new := renamed(old)) != _names(old):
            save_checkpoint(file, new)


if __name__ == "__main__":
    main(sys.argv[1:])
