"""The requests and the decoders of the experiments on generative CapsNets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.data import Dataset, Requests, Rotations, Shifts, load_dataset
from capsule_zoo.experiments.options import Options

Line = tuple[tuple[float, ...], ...]

RARE = (4, 9)  # the classes that are requested in a range of their own


@dataclass(frozen=True)
class Protocol:
    """The requests of an experiment.

    Attributes:
        requests: the family of transformations.
        usual: smallest and largest parameter in training.
        rare: the same for the classes `RARE`.
        lines: requests for test images; the first parameter runs along a line.
        border: blank pixels around the digit.
    """

    requests: Requests
    usual: tuple[float, float]
    rare: tuple[float, float]
    lines: Mapping[str, Line]
    border: int = 0

    @property
    def preset(self) -> str | None:
        """The preset of an entry that renders these requests; entries render rotations anyway."""
        return "shifts" if isinstance(self.requests, Shifts) else None

    def inside(self, line: Line) -> np.ndarray:
        """Mark the requests (points,) that were trained with the rare classes."""
        low, high = self.rare
        points = np.array(line)
        return (((points >= low) & (points < high)) | (points == low)).all(1)


ANGLES: Line = tuple((float(a),) for a in range(-180, 180, 12))
SHIFTS: dict[str, Line] = {
    "diagonal": tuple((float(s), float(s)) for s in range(-20, 20, 2)),
    "antidiagonal": tuple((float(s), float(-s)) for s in range(-20, 20, 2)),
}
TURNED = Protocol(Rotations(), (-180, 180), (-45, 45), {"circle": ANGLES})
SHIFTED = Protocol(Shifts(20), (-20, 20), (-5, 5), SHIFTS, border=20)
PROTOCOLS: dict[str, Protocol] = {
    "shift": SHIFTED,
    "shift-beyond": replace(SHIFTED, usual=(-10, 10), rare=(-10, 10)),
    "rotate": TURNED,
    "one-shot": replace(TURNED, rare=(18, 18), lines={"circle": tuple(sorted((*ANGLES, (18.0,))))}),
    "rotate-beyond": replace(TURNED, usual=(-90, 90), rare=(-90, 90)),
}


@dataclass(frozen=True)
class Decoder:
    """A trained pair: an entry under one of its guides."""

    entry: str
    guide: str = "deterministic"
    sizes: Mapping[str, Any] = field(default_factory=dict)


CONVOLUTIONAL = {"hidden": 256}
LINEAR = {"motion": "linear"}
DECODERS = {
    "autoencoder": Decoder("conditional-autoencoder", sizes=CONVOLUTIONAL),
    "autoencoder_linear": Decoder(
        "conditional-autoencoder", sizes={**CONVOLUTIONAL, "decoder": "linear"}
    ),
    "vae": Decoder("conditional-autoencoder", "variational", CONVOLUTIONAL),
    "broadcast": Decoder("broadcast-autoencoder"),
    "digit_capsules": Decoder("generative-capsnet"),
    "continuous": Decoder("generative-capsnet-continuous"),
    "digit_capsules_linear": Decoder("generative-capsnet", sizes=LINEAR),
    "continuous_linear": Decoder("generative-capsnet-continuous", sizes=LINEAR),
}
VARIANTS = {
    "autoencoder_long": Decoder("conditional-autoencoder", sizes={**CONVOLUTIONAL, "latent": 128}),
    "digit_capsules_learned": Decoder("generative-capsnet", sizes={"address": "learned"}),
}
KNOWN = {**DECODERS, **VARIANTS}


def on_canvas(protocol: Protocol, options: Options) -> Dataset:
    """Return MNIST with the border of the protocol."""
    data = load_dataset("mnist", root=options.data_root)
    return data.transformed(lambda images: F.pad(images, (protocol.border,) * 4))


def of_class(data: Dataset, digit: int) -> Tensor:
    """Return the test images of one class."""
    return data.test.images[data.test.labels == digit]


def some_requests(data: Dataset, protocol: Protocol) -> Tensor:
    """Return about ten requests along the first line, (points, parameters)."""
    line = next(iter(protocol.lines.values()))
    return data.test.images.new_tensor(line[:: max(1, len(line) // 10)])
