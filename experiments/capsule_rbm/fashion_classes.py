"""How many classes of clothes do capsule RBMs draw? See figure 5 of Li and Zhu (2019).

Samples are judged by a classifier of Fashion-MNIST. There are three ways to draw from a machine:

    chain        Gibbs chains that start from independent pixels, as a user draws;
    from images  Gibbs chains that start from training images;
    exact        no chain: with Gaussian pixels and hidden units a machine is a mixture, with a
                 Gaussian for each state of the switches, and the states are drawn by their weights.

If they differ, chains stay near the clothes where they start, or that they meet first.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data import Standardize, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.energy import load_standard_fashion
from capsule_zoo.experiments.common.findings import group_by_quantity, looks, means_of, single
from capsule_zoo.figures.energy import spectra
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.inference import Checks
from capsule_zoo.inference.energy.enumeration import exact_samples
from capsule_zoo.inference.sample_quality import FeatureClassifier, Reading, train_classifier
from capsule_zoo.models import CapsuleRBM
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.models.units.exponential_family import GaussianUnits
from capsule_zoo.records import Numbers
from capsule_zoo.registry import load

RATE = 1e-3  # chosen for Gaussian units
DRAWN = 12  # samples of each machine in the figure


@dataclass(frozen=True)
class Settings:
    """Settings of the experiment on classes of samples.

    Args:
        seeds: number of seeds, among which the minutes are divided.
        capsules: number of capsules.
        units: hidden units of a capsule; a plain RBM has as many units as all capsules.
        samples: number of samples, and of test images that they are compared with.
        sweeps: Gibbs sweeps of the chains.
        epochs: passes of the classifier over the training images.
    """

    seeds: int = 3
    capsules: int = 20
    units: int = 16
    samples: int = 2000
    sweeps: int = 1000
    epochs: int = 3


@experiment("capsule-rbm/fashion-classes", data="fashion-mnist", minutes=36)
def fashion_classes(options: Options, settings: Settings) -> Result:
    """Count the classes of clothes among samples of four machines (an hour of one core).

    `classes` is the effective number of classes, the exponential of their entropy, and `rarest` is
    the fraction of samples in the rarest class. `..._from_images` are of chains that start from
    training images, and `..._exact` of samples without a chain. `states` is the number of different
    states of the switches among the samples. Hidden units are Gaussian, or binary. Samples are
    mean images, given the capsules. `..._images` are of other test images.
    """
    timed = replace(options, minutes=options.budget)
    pixels = load_dataset("fashion-mnist", root=options.data_root)
    options.say("Training the classifier")
    judge = train_classifier(pixels.train, pixels.num_classes, settings.epochs)
    study = Study(machines(settings), settings.seeds)
    numbers = means_of(study.run(learn, timed, judge=judge, settings=settings))
    real, others = (judge.read(x) for x in pixels.test.images.split(settings.samples)[:2])
    numbers["images"] = judge_samples(others, real, pixels.num_classes)
    data, standard = load_standard_fashion(options)
    rows = {"test images": pixels.test.images[:DRAWN]}
    smaller = replace(settings, samples=DRAWN)
    switches: dict[str, np.ndarray] = {}
    for name, folder in study.folders(timed).items():
        model = load(folder).model
        drawn = draw(model, data.train.images, standard, smaller, options.seed)
        rows |= {f"{name}{ending}": images for ending, (images, _) in drawn.items()}
        if model.switched:
            with torch.no_grad():
                switches[name] = model.switch_probabilities(data.test.images[:1000]).numpy()
    figures = {
        "": image_rows(rows, "Test images, and samples of four machines"),
        "spectra": spectra(switches, data.test.labels[:1000].numpy()),
    }
    return Result({**group_by_quantity(numbers)}, figures)


def machines(settings: Settings) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the entry and its arguments for each machine, by name."""
    capsules = dict(capsules=settings.capsules, units=settings.units)
    units = dict(hidden=settings.capsules * settings.units)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {}
    for family, ending in (("gaussian", ""), ("bernoulli", "_binary")):
        families = dict(visible_family="gaussian", hidden_family=family)
        kinds[f"capsules{ending}"] = "capsule-rbm", {**capsules, **families}
        kinds[f"rbm{ending}"] = "rbm", {**units, **families}
    return kinds


def learn(
    job: Job[tuple[str, dict[str, Any]]], *, judge: FeatureClassifier, settings: Settings
) -> Numbers:
    """Train the job's machine on standard scores of clothes, and judge its samples."""
    data, standard = load_standard_fashion(job.options)
    name, sizes = job.variant
    entry = create_untrained(name, data, job.options, objective=dict(centered=False), **sizes)
    limits: dict[str, Any] = dict(minutes=job.options.budget, checks=Checks(clock="processor"))
    run = train(entry, data, job.options, optimizer=torch.optim.Adam, lr=RATE, **limits)
    real = judge.read(standard.inverse(data.test.images[: settings.samples]))
    numbers: Numbers = {"updates": single(run.steps)}
    drawn = draw(entry.model, data.train.images, standard, settings, job.options.seed)
    for ending, (images, switches) in drawn.items():
        judged = judge_samples(judge.read(images), real, data.num_classes)
        judged["states"] = single(len(switches.unique(dim=0)), len(switches))
        numbers |= {f"{quantity}{ending}": number for quantity, number in judged.items()}
    return numbers


def draw(
    model: CapsuleRBM, images: Tensor, standard: Standardize, settings: Settings, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Draw images (N, C, H, W) and switches (N, K), by the ending of a metric's name.

    Args:
        images: standard scores from which chains start.
    """
    with use_seed(seed), torch.no_grad():
        drawn = {
            ending: model.posterior(model.gibbs(start, settings.sweeps - 1)).sample()
            for ending, start in {
                "": model.base_images(settings.samples),
                "_from_images": images[: settings.samples],
            }.items()
        }
        if isinstance(model.hidden, GaussianUnits):
            drawn["_exact"] = exact_samples(model, settings.samples)
        return {
            ending: (standard.inverse(model.mean_image(capsules)).clamp(0, 1), capsules.switch)
            for ending, capsules in drawn.items()
        }


def judge_samples(samples: Reading, real: Reading, num_classes: int) -> Numbers:
    """Return the numbers of `looks`, and the fraction of samples in the rarest class."""
    counts = np.bincount(samples.classes, minlength=num_classes)
    return {
        **looks(samples, real),
        "rarest": single(counts.min() / len(samples.classes), len(samples.classes)),
    }
