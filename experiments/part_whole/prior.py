"""Samples of the prior of part-whole capsules, and how much of a parse its objects predict."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.distributions import Categorical
from torch import Tensor

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Options, Result, experiment, train, trained
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    held_out_bounds,
    mean_and_error,
    ratio,
    single,
)
from capsule_zoo.experiments.part_whole.headline import WITH_POSES, tighten
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.inference.evaluation.ancestral import (
    Sites,
    image_log_likelihood,
    infer,
    log_prior,
    mean_images,
)
from capsule_zoo.inference.evaluation.sample_quality import Reading, frechet, train_classifier
from capsule_zoo.inference.posterior.top_prior import TopPrior, fit_top_prior
from capsule_zoo.models import Capsules, PartWholeCapsules
from capsule_zoo.models.common.modes import seeded
from capsule_zoo.records import Metrics, Number, Numbers, Table
from capsule_zoo.registry import Entry, create

MINUTES = 40
VAE_SHARE = 0.25  # of the time, for the autoencoder: it learns faster
PARTS = ["part_presence", "part_pose"]
LABELS = {
    "train": "digits",
    "parts_kept": "their parts",
    "parents_kept": "their parents",
    "objects_kept": "their objects",
    "part_whole": "capsules",
    "part_whole_fitted": "fitted top",
    "vae": "VAE",
    "vae_fitted": "VAE, fitted",
}


@experiment("part-whole/prior", data="mnist", minutes=MINUTES, of_runs=True)
def prior(
    options: Options,
    *,
    images: int = 5000,
    tightening: int = 600,
    components: int = 100,
    redraws: int = 10,
    epochs: int = 3,
) -> Result:
    """Compare prior samples with a VAE's, and measure what objects predict (40 minutes).

    The autoencoder's code is as long as the objects' latents: a presence and the six numbers of a
    pose for each. Both are sampled from their own prior and from a mixture fitted to what their
    guides infer on the training images; the parts are then drawn from the objects. Three rows show
    where samples lose. "Parts kept" is the reconstruction of digits. "Parents kept" redraws every
    part from the object that it is inferred to belong to. "Objects kept" draws that choice too, so
    that no prior over objects could do better.

    Args:
        images: number of images in every Frechet distance; by default half of MNIST's test images,
            so that halves compare.
        tightening: updates of the guide with normal poses; they shrink with minutes.
        components: components of a fitted top prior.
        redraws: number of redrawn parses over which likelihoods are averaged.
        epochs: epochs of the classifier whose features are compared.
    """
    data = load_dataset("mnist", root=options.data_root)
    share = replace(options, minutes=(1 - VAE_SHARE) * options.budget)
    ours = trained("part-whole", data, share)
    ours = tighten(ours, data, options, steps=options.shortened(tightening))
    pyro.set_rng_seed(options.seed)
    vae = autoencoder(ours, data, options, minutes=VAE_SHARE * options.budget)
    bounds: dict[str, Numbers] = {}
    tops = {"part_whole": (ours, WITH_POSES), "vae": (vae, list(vae.guide.covers))}

    lost = predicted(ours, data.test.images[:1000], options.seed, redraws)
    number = min(images, len(data.test) // 2)
    rows = draws_of_parse(ours, data, number, options.seed)
    for name, (entry, sites) in tops.items():
        options.say(f"Fitting a top prior to what the guide of {name} infers")
        drawn = infer(entry.guide, data.train.images, sites, options.seed)
        kinds = min(components, len(data.train) // 10)
        top = fit_top_prior(entry.model, drawn, kinds, seed=options.seed)
        rows[name] = mean_images(entry.model, number, seed=options.seed)
        rows[f"{name}_fitted"] = mean_images(
            entry.model, number, top.sample(number, options.seed), options.seed
        )
        bounds[name] = nats(entry, data, top, sites, options.seed)

    options.say("Training a classifier on the digits, for its features")
    accuracy, seen = judged(rows, data, number, epochs, options.seed)
    metrics: Metrics = {
        **lost,
        "classifier_accuracy": accuracy,
        **by_quantity(bounds),
        "draws": Table(by_quantity(seen)),
    }
    shown = {label: rows[name][:12] for name, label in LABELS.items()}
    figure = image_rows(shown, "Digits, and draws that keep their parts, objects or nothing")
    return Result(metrics, {"": figure}, None, ours)


def draws_of_parse(ours: Entry, data: Dataset, number: int, seed: int) -> dict[str, Tensor]:
    """Return digits and draws (number, C, H, W) that keep parts, parents or objects of a parse."""
    parsed = infer(ours.guide, data.train.images[:number], seed=seed)
    objects = {name: parsed[name] for name in WITH_POSES}
    return {
        "train": data.train.images[:number],
        "test": data.test.images[number : 2 * number],
        "parts_kept": mean_images(ours.model, number, parsed),
        "parents_kept": mean_images(
            ours.model, number, redrawn_from_parents(ours.model, parsed, seed)
        ),
        "objects_kept": mean_images(ours.model, number, objects, seed),
    }


def autoencoder(ours: Entry, data: Dataset, options: Options, **limit: Any) -> Entry:
    """Train a VAE with as many latent numbers as the objects have, and the same law of pixels."""
    sizes = dict(latent=7 * ours.model.levels[0].size, sigma_image=ours.model.sigma_image)
    vae = create("vae", image_shape=data.image_shape, **sizes)
    train(vae, data, options, name="vae", **limit)
    return vae


def predicted(entry: Entry, images: Tensor, seed: int, redraws: int) -> Numbers:
    """Return what images lose, in nats, when parts are drawn from objects instead of inferred.

    The share refers to what the parts explain: their log likelihood above the background's. Some of
    it is lost because objects do not say which of them a part belongs to. The share that is lost
    with known parents ("parents kept") is the cost of the parts' own places.
    """
    parsed = infer(entry.guide, images, seed=seed)
    objects = {name: parsed[name] for name in WITH_POSES}
    empty = {"part_presence": torch.zeros_like(parsed["part_presence"])}
    inferred = image_log_likelihood(entry.model, images, parsed)
    background = image_log_likelihood(entry.model, images, empty)
    found: Numbers = {
        "log_likelihood_inferred": mean_and_error(inferred),
        "log_likelihood_background": mean_and_error(background),
    }
    for name in ("", "_parents_kept"):
        total = torch.zeros_like(inferred)
        for i in range(seed, seed + redraws):
            given = redrawn_from_parents(entry.model, parsed, i) if name else objects
            total += image_log_likelihood(entry.model, images, given, i)
        redrawn = total / redraws
        found[f"log_likelihood_redrawn{name}"] = mean_and_error(redrawn)
        found[f"share_lost{name}"] = ratio(inferred - redrawn, inferred - background)
    return found


@torch.no_grad()
def redrawn_from_parents(model: PartWholeCapsules, parsed: Sites, seed: int) -> dict[str, Tensor]:
    """Return a parse with every part drawn again from the parent that it is inferred to have."""
    model = model.sharing_parameters(presence="discrete", selection="enumerate")
    kept = {name: parsed[name] for name in WITH_POSES}
    objects, parts = Capsules(*kept.values()), Capsules(*(parsed[name] for name in PARTS))
    with seeded(seed):
        kept["part_parent"] = Categorical(model.responsibilities(objects, parts)).sample()
        nodes = (
            poutine.trace(poutine.condition(model, kept)).get_trace(batch_size=len(parts[0])).nodes
        )
    return {**kept, **{name: nodes[name]["value"] for name in PARTS}}


def nats(entry: Entry, data: Dataset, top: TopPrior, sites: list[str], seed: int) -> Numbers:
    """Return bounds on 1,000 held-out images, and what the fitted top adds to the ELBO."""
    held_out = data.test[:1000]
    drawn = infer(entry.guide, held_out.images, sites, seed)
    gain = top.log_prob(drawn) - log_prior(entry.model, drawn)
    return {
        **held_out_bounds(entry, held_out, 50, seed),
        "top_gain": mean_and_error(gain),
        "model_parameters": single(entry.model.num_parameters),
    }


def judged(
    rows: Mapping[str, Tensor], data: Dataset, number: int, epochs: int, seed: int
) -> tuple[Number, dict[str, Numbers]]:
    """Train a classifier on the digits; return its test accuracy, and the looks of images by row.

    Args:
        rows: images (N, C, H, W) of each kind, compared with the first `number` test images.
    """
    classifier = train_classifier(data.train, data.num_classes, epochs=epochs, seed=seed)
    right = classifier.read(data.test.images).classes == data.test.labels.numpy()
    real = classifier.read(data.test.images[:number])
    seen = {name: looks(classifier.read(drawn), real) for name, drawn in rows.items()}
    return mean_and_error(right.astype(float)), seen


def looks(seen: Reading, real: Reading) -> Numbers:
    """Return the Frechet distance to real images, the confidence and the number of used classes."""
    return {
        "frechet": frechet(seen.features, real.features),
        "confidence": mean_and_error(seen.confidence),
        "classes": count_used_classes(seen.classes),
    }


def count_used_classes(classes: np.ndarray) -> Number:
    """Return the exponential of the entropy of classes (N,): their number if equally frequent."""
    fractions = np.bincount(classes) / len(classes)
    used = fractions[fractions > 0]
    return single(np.exp(-(used * np.log(used)).sum()), len(classes))
