"""Helmholtz machines: bounds and reconstruction (Li and Zhu 2019); see `energy` for the data."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from capsule_zoo.data import Binarize, Dataset
from capsule_zoo.experiments import Options, Result, experiment, load_or_train
from capsule_zoo.experiments.common.energy import (
    GAUSSIAN,
    figures_of,
    load_standard_fashion,
    measure_mnist,
    pixel_error,
    reconstruction_error,
    spectra,
    use_of_switches,
)
from capsule_zoo.experiments.common.findings import held_out_bounds
from capsule_zoo.inference import Checks, Inputs
from capsule_zoo.inference.energy.pretrain import pretrain
from capsule_zoo.records import Metrics, Numbers
from capsule_zoo.registry import Entry
from capsule_zoo.runs.measurements import draws_binary_pixels

CLOCK = "processor"  # trainings count processor time, which other work does not shorten
PRETRAINING = 0.1  # fraction of the time in which layers are pre-trained as capsule RBMs


@dataclass(frozen=True)
class Settings:
    """Settings of trainings that are measured by bounds.

    Args:
        images: number of held-out images for the bounds.
        particles: number of draws of the IWAE bound.
    """

    images: int = 500
    particles: int = 1000

    def measure_all_layers(
        self, entry: Entry, data: Dataset, options: Options, scale: float = 1.0
    ) -> Numbers:
        """Return the reconstruction error through all layers, and the bounds."""
        error = pixel_error(entry.guide.reconstruct, data.test.images, scale)
        bounds = held_out_bounds(entry, data.test[: self.images], self.particles, options.seed)
        return {"reconstruction_error_top": error, **bounds}


def with_pretraining(options: Options) -> dict[str, Any]:
    """Return the arguments of `train` that first pre-train the layers as RBMs, one by one.

    The layers have equal parts of `PRETRAINING` of the budget; the rest trains the whole.
    """

    def start(entry: Entry, images: Tensor) -> None:
        options.say("Pre-training every layer as a capsule RBM")
        minutes = PRETRAINING * options.budget / len(entry.model.layers)
        inputs = Inputs(Binarize() if draws_binary_pixels(entry.model) else None)
        checks = Checks(progress=options.progress, clock=CLOCK)
        settings: dict[str, Any] = dict(seed=options.seed, checks=checks)
        pretrain(entry.model, entry.guide, images, minutes=minutes, inputs=inputs, **settings)

    minutes = (1 - PRETRAINING) * options.budget
    return dict(start=start, minutes=minutes, checks=Checks(clock=CLOCK))


@experiment("capsule-helmholtz/mnist", minutes=60, of_runs=True)
def mnist(options: Options, settings: Settings) -> Result:
    """Pre-train two layers of 40 capsules, train them by wake-sleep and bound log p (an hour)."""
    measure, arguments = settings.measure_all_layers, with_pretraining(options)
    return measure_mnist("capsule-helmholtz", options, measure, **arguments)


@experiment("capsule-helmholtz/fashion", data="fashion-mnist", minutes=3)
def fashion(options: Options, settings: Settings) -> Result:
    """Train two layers of 20 capsules with Gaussian pixels and units (3 minutes).

    Pixels are standardized. The error is on the scale of the pixels, and nats are on the scale of
    the scores. The training is short because the gap between ELBO and IWAE grows with the precision
    of the pixels.
    """
    data, standard = load_standard_fashion(options)
    sizes = {"capsules": (20, 20), **GAUSSIAN}
    arguments = with_pretraining(options)
    entry = load_or_train("capsule-helmholtz", data, options, sizes, lr=1e-3, **arguments)
    switches = spectra(entry, data.test.images)
    metrics: Metrics = {
        "reconstruction_error": reconstruction_error(entry, data.test.images, standard.scale),
        **settings.measure_all_layers(entry, data, options, standard.scale),
        "switches": use_of_switches(switches),
    }
    return Result(metrics, figures_of(entry, data.test, switches), None, entry)
