"""Training and measurements for the experiments on capsule RBMs and Helmholtz machines.

Every likelihood is of test images binarized once, with seed 0 (`Dataset.binarize`). Training
images are binarized again whenever they are seen, so that no machine can memorize one
binarization. (The paper trains on gray pixels and gives no likelihood.)
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Binarize, Dataset, Split, Standardize, load_dataset
from capsule_zoo.experiments import Options, Result, load_or_train
from capsule_zoo.experiments.common.findings import mean_and_error, pictures
from capsule_zoo.figures import energy as energy_figures
from capsule_zoo.inference import Inputs
from capsule_zoo.inference.probes import Accuracy, Information, latents, probe_scores
from capsule_zoo.records import Metrics, Number, Numbers, Table
from capsule_zoo.registry import Entry

GAUSSIAN = dict(visible_family="gaussian", hidden_family="gaussian")  # for standardized pixels
PROBED = 10_000  # number of images that a probe is fitted on
DRAWN = 100  # number of images in figures
SILENT = 0.01  # a switch that is on in a smaller fraction of the images is silent


def binary_mnist(options: Options) -> Dataset:
    """Load MNIST with gray training images, and validation and test images binarized once."""
    gray = load_dataset("mnist", root=options.data_root)
    return replace(gray.binarize(), train=gray.train)


def load_standard_fashion(options: Options) -> tuple[Dataset, Standardize]:
    """Load Fashion-MNIST as standard scores; return the transform too."""
    pixels = load_dataset("fashion-mnist", root=options.data_root)
    standard = Standardize.of(pixels.train.images)
    return pixels.transform_images(standard), standard


def measure_mnist(
    name: str,
    options: Options,
    numbers: Callable[[Entry, Dataset, Options], Numbers],
    **settings: Any,
) -> Result:
    """Train an entry on MNIST, or load the run that the options name; measure and draw it.

    Args:
        numbers: a function that returns further numbers of this entry.
        settings: arguments of `train` that replace the entry's.
    """
    data = binary_mnist(options)
    entry = load_or_train(name, data, options, inputs=Inputs(Binarize()), **settings)
    options.say("Measuring")
    switches = spectra(entry, data.test.images)
    metrics: Metrics = {
        "reconstruction_error": reconstruction_error(entry, data.test.images),
        **numbers(entry, data, options),
        "probe_switches": probe(entry, data)[0],
        "switches": use_of_switches(switches),
    }
    return Result(metrics, figures_of(entry, data.test, switches), None, entry)


def figures_of(entry: Entry, split: Split, switches: Mapping[str, np.ndarray]) -> dict[str, Figure]:
    """Draw the posterior of the images' switches, and all figures of the entry."""
    drawn = energy_figures.spectra(switches, split.labels.numpy())
    return {"spectra": drawn, **pictures(entry, split.images[:DRAWN])}


@torch.no_grad()
def reconstruction_error(entry: Entry, images: Tensor, scale: float = 1.0) -> Number:
    """Return the mean absolute error per pixel of reconstructions, times a scale.

    Images are reconstructed from the means of the first layer of capsules. The number comes with
    its standard error over images.
    """
    model, guide = entry.model, entry.guide
    return pixel_error(lambda x: model.mean_image(guide.expectations(x)), images, scale)


def pixel_error(
    reconstruct: Callable[[Tensor], Tensor], images: Tensor, scale: float = 1.0
) -> Number:
    """Return the mean absolute error per pixel, times a scale, and its standard error."""
    errors = [(reconstruct(x) - x).abs().flatten(1).mean(1) for x in images.split(500)]
    return mean_and_error(scale * torch.cat(errors))


def spectra(entry: Entry, images: Tensor) -> dict[str, np.ndarray]:
    """Return the posterior means of every switch, (N, K) by site.

    A model without switches gives all its sites. The site nearest to the image is the last.
    """
    names = [site.name for site in entry.model.latent_sites]
    names = [name for name in names if name.endswith("_switch")] or names
    return {name: latents(entry.guide, images, [name]) for name in names}


def use_of_switches(switches: Mapping[str, np.ndarray]) -> Table:
    """Return, for each layer, how often switches are on and how many are silent.

    Args:
        switches: posterior means of every switch, (N, K) by site. A switch is silent if it is on
            in less than a hundredth of the images.
    """
    on = {site: (float(s.mean()), None, len(s)) for site, s in switches.items()}
    silent = {
        site: (float((s.mean(0) < SILENT).sum()), None, s.shape[1]) for site, s in switches.items()
    }
    return Table({"on": on, "silent": silent}, names="{variant}_{quantity}")


def probe(entry: Entry, data: Dataset) -> tuple[Accuracy, Information]:
    """Fit a linear probe on the first layer's spectra of training images, binarized once."""
    training_set = data.train[:PROBED].binarize()
    images = training_set.images, data.test.images
    train, test = (list(spectra(entry, x).values())[-1] for x in images)
    return probe_scores(train, training_set.labels, test, data.test.labels)
