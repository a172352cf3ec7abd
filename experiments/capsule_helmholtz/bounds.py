"""The Helmholtz machine's experiments (Li and Zhu 2019); see `energy` for the data.

`samples` compares Gibbs chains with ancestral draws, which are exact because the machine is
directed. A chain alternates recognition of all layers and generation from the top one. Its draws
are the machine's only if recognition equals the posterior.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from capsule_zoo.data import Binarize, Dataset
from capsule_zoo.experiments import Options, Result, experiment, trained
from capsule_zoo.experiments.common.energy import (
    figures_of,
    measured,
    pixel_error,
    reconstruction_error,
    spectra,
    standard_fashion,
    use_of_switches,
)
from capsule_zoo.experiments.common.findings import Bounded
from capsule_zoo.inference import Checks, Inputs, pretrain
from capsule_zoo.records import Metrics, Numbers
from capsule_zoo.registry import Entry
from capsule_zoo.runs.measurements import draws_binary_pixels

CLOCK = "processor"  # of all trainings, whose minutes other work does not shorten
GAUSSIAN = dict(visible_family="gaussian", hidden_family="gaussian")


@dataclass(frozen=True)
class Pretrained(Bounded):
    """The settings of trainings with bounds: `Bounded`, and how long layers are pre-trained.

    Args:
        share: share of the time in which layers are pre-trained as capsule RBMs.
    """

    images: int = 500
    particles: int = 1000
    share: float = 0.1

    def through_all_layers(
        self, entry: Entry, data: Dataset, options: Options, scale: float = 1.0
    ) -> Numbers:
        """Return the error through all layers, and the bounds."""
        error = pixel_error(entry.guide.reconstruct, data.test.images, scale)
        return {"reconstruction_error_top": error, **self.bounds(entry, data, options.seed)}


def after_pretraining(options: Options, minutes: float, share: float) -> dict[str, Any]:
    """Return arguments of `train` with which layers are pre-trained as RBMs, one after the other.

    Args:
        minutes: length of the whole training.
        share: share of the minutes for the pre-training, divided equally among the layers, or 0.
    """

    def start(entry: Entry, images: Tensor) -> None:
        options.say("Pre-training every layer as a capsule RBM")
        each = share * minutes / len(entry.model.layers)
        inputs = Inputs(Binarize() if draws_binary_pixels(entry.model) else None)
        checks = Checks(progress=options.progress, clock=CLOCK)
        how: dict[str, Any] = dict(seed=options.seed, checks=checks)
        pretrain(entry.model, entry.guide, images, minutes=each, inputs=inputs, **how)

    length = dict(minutes=(1 - share) * minutes, checks=Checks(clock=CLOCK))
    return dict(start=start if share else None, **length)


@experiment("capsule-helmholtz/mnist", minutes=60, of_runs=True)
def mnist(options: Options, chosen: Pretrained) -> Result:
    """Pre-train two layers of 40 capsules, train them by wake-sleep and bound log p (an hour)."""
    how = after_pretraining(options, options.budget, chosen.share)
    return measured("capsule-helmholtz", options, chosen.through_all_layers, **how)


@experiment("capsule-helmholtz/fashion", data="fashion-mnist", minutes=3)
def fashion(options: Options, chosen: Pretrained) -> Result:
    """Train two layers of 20 capsules with Gaussian pixels and units (3 minutes).

    Pixels are standardized. The error is on the scale of the pixels, and nats are on the scale of
    the scores. The training is short because the gap between ELBO and IWAE grows with the precision
    of the pixels.
    """
    data, standard = standard_fashion(options)
    sizes = {"capsules": (20, 20), **GAUSSIAN}
    start = after_pretraining(options, options.budget, chosen.share)
    entry = trained("capsule-helmholtz", data, options, sizes, lr=1e-3, **start)
    found = spectra(entry, data.test.images)
    metrics: Metrics = {
        "reconstruction_error": reconstruction_error(entry, data.test.images, standard.scale),
        **chosen.through_all_layers(entry, data, options, standard.scale),
        "switches": use_of_switches(found),
    }
    return Result(metrics, figures_of(entry, data.test, found), None, entry)
