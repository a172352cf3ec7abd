"""The Helmholtz machine on gray digits, and how many capsules each class wakes."""

from __future__ import annotations

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.energy import (
    binary_mnist,
    pixel_error,
    reconstruction_error,
    spectra,
)
from capsule_zoo.experiments.common.findings import mean_and_error
from capsule_zoo.records import Metrics, Numbers
from capsule_zoo.registry import load


@experiment("capsule-helmholtz/gray", data="mnist")
def gray(options: Options, *, weights: str = "capsule-helmholtz-mnist") -> Result:
    """Reconstruct gray test digits, as the source does, and count awake capsules (a minute).

    `reconstruction_error_gray` goes up to the first layer of capsules and back, as the authors'
    program does, `reconstruction_error_gray_top` up to the top. `awake_1` and `awake_2` are the
    mean numbers of switches of a layer that are on, for each class, on binarized test digits; the
    first layer is the nearest to the image.

    Args:
        weights: name of the trained weights.
    """
    options.refuse_run()
    entry = load(weights)
    images = load_dataset("mnist", root=options.data_root).test.images
    binary = binary_mnist(options).test
    awake: dict[str, Numbers] = {}
    for layer, switches in enumerate(reversed(list(spectra(entry, binary.images).values())), 1):
        count = switches.sum(1)
        awake[f"awake_{layer}"] = {
            f"digit_{digit}": mean_and_error(count[binary.labels.numpy() == digit])
            for digit in range(10)
        }
    metrics: Metrics = {
        "reconstruction_error_gray": reconstruction_error(entry, images),
        "reconstruction_error_gray_top": pixel_error(entry.guide.reconstruct, images),
        **awake,
    }
    return Result(metrics)
