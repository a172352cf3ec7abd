"""MNIST as binarized once by Larochelle, the images that most papers report nats on.

Every gray pixel was drawn from Bernoulli(pixel) once. There are 50,000 images for training, 10,000
for validation and 10,000 for testing, without labels.

References:
    Salakhutdinov & Murray 2008, "On the Quantitative Analysis of Deep Belief Networks": the
    binarization. Larochelle & Murray 2011, "The Neural Autoregressive Distribution Estimator": the
    files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data.files import MissingData, fetch, user_cache
from capsule_zoo.data.sources import Labelled, Size, Source, resized

HOME = "http://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/"
PARTS = {"train": 50_000, "valid": 10_000, "test": 10_000}
PIXELS = 28, 28


def binarized_mnist(root: Path | None, size: Size | None = None) -> Source:
    """Read the three files `binarized_mnist_*.amat`, of rows of 784 zeros and ones.

    No image has a label. Without a root the files are downloaded to the user's cache (110 MB).

    Args:
        root: the folder that holds the files, directly or in a folder `binarized_mnist`.

    Raises:
        MissingData: a file is absent or damaged; the message names its address.
    """
    folder = user_cache() if root is None else root
    inner = folder / "binarized_mnist"
    place = inner if root is None or inner.is_dir() else folder
    splits: dict[str, Labelled] = {}
    for part, number in PARTS.items():
        file = place / f"binarized_mnist_{part}.amat"
        try:
            if root is None and not file.exists():
                fetch(HOME + file.name, file)
            images = read_bits(file.read_bytes(), number)
        except (OSError, ValueError) as error:
            raise MissingData(
                f"no readable {file.name} in {place} ({error}); it is published at {HOME}: put it "
                "there, set root= or CAPSULE_ZOO_DATA to a folder that holds it, or use 'mnist', "
                "which is binarized anew where a model needs it"
            ) from error
        splits[part] = resized(images, size), None
    return Source(splits["train"], splits["test"], (), validation=0, held_out=splits["valid"])


def read_bits(raw: bytes, number: int) -> Tensor:
    """Read zeros and ones that stand apart as float32 (number, 1, 28, 28).

    Raises:
        ValueError: there is another character, or another number of them.
    """
    digits = np.frombuffer(raw, dtype=np.uint8)
    digits = digits[~np.isin(digits, np.frombuffer(b" \r\n\t", dtype=np.uint8))]
    bits = digits - ord("0")
    expected = number * PIXELS[0] * PIXELS[1]
    if len(bits) != expected or (bits > 1).any():
        raise ValueError(f"it must hold {expected:,} zeros and ones, and nothing else")
    return torch.from_numpy(bits.astype(np.float32)).view(number, 1, *PIXELS)
