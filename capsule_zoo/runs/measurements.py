"""Measurements of a trained entry for the commands: bounds, error rates, log-likelihoods.

    evaluate_run        bounds on log p(image), for `evaluate --method bound`
    error_rate_run      error rate of a classifier, for `evaluate --method error-rate`
    log_partition_run   log-likelihoods of an energy model, for `evaluate --method log-partition`
    compare_run         bounds of several guides to one model, for `compare`

A function refuses an entry for which its number is meaningless, and names the right command.
"""

import time
from dataclasses import replace
from math import hypot
from typing import Any, NamedTuple

import torch
from pyro import poutine
from torch import Tensor, nn
from torch.distributions import Bernoulli

from capsule_zoo.data import Dataset, Split
from capsule_zoo.data.progress import announce
from capsule_zoo.guides.per_image.site_distributions import innermost
from capsule_zoo.inference import (
    Checks,
    Comparison,
    compare,
    evaluate,
    fit,
    log_partition,
    summarize,
)
from capsule_zoo.inference.energy.enumeration import is_countable
from capsule_zoo.inference.energy.log_partition import LogPartition
from capsule_zoo.inference.evaluation.classification import error_rate, predicts_labels
from capsule_zoo.inference.evaluation.summary import remark, standard_error
from capsule_zoo.inference.posterior.fitted import fit_guide, kinds_for
from capsule_zoo.models.base import Model
from capsule_zoo.models.capsule_rbm import CapsuleRBM
from capsule_zoo.models.checks import check_known
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.models.networks.classifier import Classifier
from capsule_zoo.models.units.exponential_family import BernoulliUnits
from capsule_zoo.registry import Entry
from capsule_zoo.runs.folder import check_classes
from capsule_zoo.runs.recipe import Recipe

WIDEN_IMAGES = 2000
SIDES = {"low": "above", "high": "below", "exact": "at"}  # where a log-likelihood lies, by log Z


def evaluate_run(entry: Entry, data: Dataset, *, images: int, particles: int, seed: int) -> dict:
    """Compute bounds on the first `images` test images under the discrete model.

    Raises:
        ValueError: a classifier or an energy model, which gives no bound.
    """
    refuse_without_bound(entry)
    test = scoring_data(entry, data).test[:images]
    idata = evaluate(entry.model, entry.guide, test, num_particles=particles, seed=seed, draws=0)
    summary = {"data": idata.attrs["data"], "guide": entry.default_guide, **summarize(idata)}
    return summary | ({"remark": message} if (message := remark(summary)) else {})


def error_rate_run(entry: Entry, data: Dataset, *, images: int | None = None) -> dict:
    """Compute the error rate of an entry on test images, with its binomial standard error.

    Raises:
        ValueError: neither the model nor the guide predicts labels.
    """
    if not predicts_labels(entry.model, entry.guide):
        raise ValueError(
            f"{entry.name} does not predict labels, so it has no error rate; see: "
            "capsule-zoo evaluate RUN"
        )
    check_classes(data)
    rate = error_rate(entry.model, entry.guide, _first(data.test, images))
    metrics = {"error_rate": rate.value, "error_rate_se": rate.se}
    return {"data": data.test.name, **metrics, "num_images": rate.n}


class LogLikelihood(NamedTuple):
    """The mean log p(image) of images under an energy model, in nats per image.

    Attributes:
        value: the number or its estimate.
        standard_error: of the mean over the images and of log Z together.
        log_z: the log partition function that it was computed with.
    """

    value: float
    standard_error: float
    log_z: LogPartition


@torch.no_grad()
def log_likelihoods(
    model: CapsuleRBM, train: Tensor, tested: Tensor, *, chains: int, **annealing: Any
) -> dict[str, LogLikelihood]:
    """Return the mean log p of test images by method: "ais", "raise" and, if possible, "exact".

    AIS underestimates log Z in expectation, so its log-likelihood is too high. The value of reverse
    AIS (RAISE) is too low; see `inference.log_partition`.

    Args:
        train: training images; their mean initializes the forward chains.
        tested: test images; the first ones initialize the reverse chains.
        chains: number of annealing chains.
        annealing: `temperatures` and `seed` of `log_partition`.
    """
    free_energy = torch.cat([model.free_energy(part) for part in tested.split(500)]).double()
    starts: dict[str, Tensor | None] = {"ais": train, "raise": tested[:chains]}
    if is_countable(model):
        starts["exact"] = None
    estimates: dict[str, LogLikelihood] = {}
    for method, images in starts.items():
        announce(f"log Z by {method}")
        log_z = log_partition(model, method, images=images, chains=chains, **annealing)
        error = hypot(standard_error(free_energy.numpy()), log_z.standard_error)
        estimates[method] = LogLikelihood(-free_energy.mean().item() - log_z.value, error, log_z)
    return estimates


def log_partition_run(
    entry: Entry,
    data: Dataset,
    *,
    images: int | None = None,
    chains: int = 100,
    temperatures: int = 14_500,
    seed: int = 0,
) -> dict:
    """Estimate the mean log p(image) of test images under an energy model, in nats per image.

    For a model of binary pixels the images are binarized once, with seed 0.

    Returns:
        By method ("ais", "raise", and "exact" where log Z can be summed): log_likelihood_<method>
        and log_z_<method> with their standard errors, see `log_likelihoods`.

    Raises:
        ValueError: the entry is not an RBM, or a number is below 1.
    """
    model = entry.model
    if not isinstance(model, CapsuleRBM):
        raise ValueError(
            f"{entry.name} is not an energy model, so it has no log partition function to "
            "estimate; see: capsule-zoo evaluate RUN"
        )
    test = _first(scoring_data(entry, data).test, images)
    annealing = dict(chains=chains, temperatures=temperatures, seed=seed)
    metrics: dict[str, Any] = {"data": test.name, "num_images": len(test)}
    for method, nats in log_likelihoods(model, data.train.images, test.images, **annealing).items():
        metrics[f"log_likelihood_{method}"] = nats.value
        metrics[f"log_likelihood_{method}_se"] = nats.standard_error
        metrics[f"log_likelihood_{method}_lies"] = SIDES[nats.log_z.direction]
        metrics[f"log_z_{method}"] = nats.log_z.value
        metrics[f"log_z_{method}_se"] = nats.log_z.standard_error
    return metrics | {"chains": chains, "temperatures": temperatures, "units": "nats per image"}


def compare_run(
    entry: Entry,
    data: Dataset,
    guides: list[str],
    *,
    tune_steps: int,
    images: int,
    particles: int,
    seed: int,
    progress: bool = True,
) -> Comparison:
    """Compare the bounds of guides to one trained model, a row for each guide.

    The entry's own guide is used unchanged. Every other guide is created from the entry and, if it
    has parameters, tuned on training images with the model frozen. The guides of
    `general_guides_of` are fitted to the test images themselves. A guide of points gets two rows:
    its MAP objective, which is not a bound, and `<name>, widened`, which is a bound. The column
    fit_seconds is the time that tuning, fitting and widening took.

    Raises:
        ValueError: no guide, one that does not fit, or an entry that gives no bound.
    """
    refuse_without_bound(entry)
    offered = guides_of(entry)
    if not guides:
        raise ValueError(f"no guide is given; {entry.name} has {offered}")
    for name in guides:
        check_known("guide", name, offered)
    recipe = Recipe(entry.name, seed=seed, limits={"steps": tune_steps})
    settings = recipe.for_fit(entry.training) | {"checks": Checks(progress=progress)}
    data, test = scoring_data(entry, data), scoring_data(entry, data).test[:images]
    pairs: dict[str, tuple[nn.Module, nn.Module]] = {}
    seconds: dict[str, float] = {}
    for number, name in enumerate(guides, 1):
        announce(f"guide {number} of {len(guides)}: {name}")
        began = time.perf_counter()
        guide = _tune_guide(entry, name, data, test.images, settings)
        pairs[name] = (
            entry.model if name in entry.guides else entry.with_enumerated_presences.model,
            guide,
        )
        seconds[name] = time.perf_counter() - began
        if name not in entry.guides:
            continue
        if (wide := widen_guide(entry, guide, data, tune_steps, seed, progress)) is not None:
            pairs[f"{name}, widened"] = (entry.model, wide)
            seconds[f"{name}, widened"] = time.perf_counter() - began
    table = compare(pairs, test, num_particles=particles, seed=seed)
    table["fit_seconds"] = [seconds[name] for name in table.index]
    return table


def guides_of(entry: Entry) -> list[str]:
    """Return the names of all guides that fit an entry: its own, and the general ones."""
    return [*entry.guides, *general_guides_of(entry)]


def general_guides_of(entry: Entry) -> list[str]:
    """Return the kinds of `inference.fit_guide` that fit an entry with enumerated presences."""
    pair = entry.with_enumerated_presences
    return [kind for kind in kinds_for(pair.model, pair.guide) if kind not in entry.guides]


def _tune_guide(
    entry: Entry, name: str, data: Dataset, images: Tensor, settings: dict[str, Any]
) -> nn.Module:
    """Return a guide by name: the entry's own, or one tuned on training or on these images."""
    if name == entry.default_guide:
        return entry.guide
    if name not in entry.guides:
        pair = entry.with_enumerated_presences
        options = {key: settings[key] for key in ("steps", "seed")}
        return fit_guide(name, pair.model, pair.guide, images, **options)
    guide = entry.make_guide(name)
    if [*guide.parameters()]:
        fit(entry.model, guide, data.train, objective=entry.objective, freeze="model", **settings)
    return guide


def widen_guide(
    entry: Entry, guide: nn.Module, data: Dataset, steps: int, seed: int, progress: bool = False
) -> nn.Module | None:
    """Widen a guide of points on training images; None if the guide has a density already."""
    glance = evaluate(entry.model, guide, data.test[:2], num_particles=1, draws=0)
    if not glance.attrs["point_sites"]:
        return None
    images = data.train[:WIDEN_IMAGES]
    options = dict(steps=steps, seed=seed, progress=progress)
    return fit_guide("widened", entry.model, guide, images, **options)


def scoring_data(entry: Entry, data: Dataset) -> Dataset:
    """Return the data on which an entry is measured.

    A model of binary pixels assigns no density to gray pixels. Its test and validation images are
    binarized once with seed 0, as in its records. Training images stay as they are.
    """
    images = data.test.images
    if not draws_binary_pixels(entry.model) or not ((images > 0) & (images < 1)).any():
        return data
    return replace(data.binarize(), train=data.train)


@torch.no_grad()
def draws_binary_pixels(model: Model) -> bool:
    """Return whether the pixels of a model's images are Bernoulli variables."""
    if isinstance(model, CapsuleRBM):
        return isinstance(model.visible, BernoulliUnits)
    if isinstance(model, Classifier):
        return False
    with torch.random.fork_rng(), poutine.block(), eval_mode(model):
        trace = poutine.trace(model).get_trace(batch_size=1)
    return isinstance(innermost(trace.nodes[model.space.site]["fn"]), Bernoulli)


def _first(split: Split, number: int | None) -> Split:
    """Return the first `number` images of a split, or the whole split without a number."""
    return split if number is None else split[:number]


def measuring_method(entry: Entry) -> str:
    """Return the method of `capsule-zoo evaluate` that suits an entry."""
    if isinstance(entry.model, Classifier):
        return "error-rate"
    return "bound" if entry.model.normalized else "log-partition"


def refuse_without_bound(entry: Entry) -> None:
    """Raise ValueError, with the right command, if an entry gives no bound on log p(image)."""
    reasons = {
        "error-rate": "a classifier, which has an error rate and no bound on log p(image)",
        "log-partition": "an energy model, which gives log p(image) only up to log Z",
    }
    if (method := measuring_method(entry)) in reasons:
        raise ValueError(f"{entry.name} is {reasons[method]}; see: capsule-zoo evaluate RUN")
