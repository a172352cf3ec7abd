"""The photographs of several experiments: a folder of them where there is one."""

from __future__ import annotations

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.data.sources import data_folder
from capsule_zoo.experiments.options import Options


def photographs(name: str, options: Options) -> Dataset:
    """Return the folder of images of that name under the data root, or else the named data set."""
    root = data_folder(options.data_root)
    if root and (root / name / "train").is_dir():
        return load_dataset(f"folder:{root / name}")
    return load_dataset(name, root=options.data_root)
