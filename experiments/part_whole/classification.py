"""Part-whole capsules (Smith et al. 2020): unsupervised classes, and all guides to one model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from pyro.infer.autoguide import AutoDelta, AutoGuide, AutoNormal, init_to_sample
from torch import Tensor, nn

from capsule_zoo.data import Dataset, Split, load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import measures_of_rows, pictures
from capsule_zoo.experiments.training import checkpoints, load_or_train, train
from capsule_zoo.guides import FreeForm
from capsule_zoo.inference import SemiAmortized, compare, fit_guide, infer
from capsule_zoo.inference.posterior.fitted import fit_to_images
from capsule_zoo.inference.probes import latents, linear_probe
from capsule_zoo.models import Model
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry

PRESENCES, WITH_POSES = ["object_presence"], ["object_presence", "object_pose"]
PARTS = ["part_presence", "part_pose"]
PROBED = 10_000  # number of training images that a probe is fitted on
# Numbers of updates in a full run
UPDATES = dict(tighten=600, widen=200, free_form=100, refine=40, automatic=400)
Reader = Callable[[nn.Module, Tensor], np.ndarray]  # features of images, inferred by a guide


def sample_presences(guide: nn.Module, images: Tensor, seed: int = 0) -> np.ndarray:
    """Sample the binary presences of the objects once, (N, objects)."""
    return infer(guide, images, PRESENCES, seed)[PRESENCES[0]].cpu().numpy()


READERS: Mapping[str, Reader] = {
    "presence": partial(latents, sites=PRESENCES),
    "presence_pose": partial(latents, sites=WITH_POSES),
    "drawn": sample_presences,
    "parts": partial(latents, sites=PARTS),
}


def fit_probes(
    entry: Entry, data: Dataset, readers: Mapping[str, Reader], probed: int = PROBED
) -> dict[str, Numbers]:
    """Return the accuracies of linear probes on features of the images.

    Probes are fitted on the features of `probed` training images (`probe`) and, if there are more,
    also on the features of all training images (`probe_all`).

    Args:
        readers: functions that return features, by name.
    """
    accuracies, labels = dict[str, Numbers](), data.train.labels
    sizes = {"probe": probed} | ({"probe_all": len(labels)} if len(labels) > probed else {})
    for name, read in readers.items():
        features, tested = (read(entry.guide, split.images) for split in (data.train, data.test))
        for quantity, n in sizes.items():
            accuracy = linear_probe(features[:n], labels[:n], tested, data.test.labels)
            accuracies.setdefault(quantity, {})[name] = accuracy
    return accuracies


def tighten(entry: Entry, data: Dataset, options: Options, pose: str = "normal", **limits) -> Entry:
    """Return the entry with a guide whose poses have densities, trained with the model frozen.

    The entry's guide of points initializes the guide. The guide needs the entry's warm-up: new
    standard deviations are small, and one of Adam's full first updates moves every pose by many of
    them.
    """
    tight = replace(entry, guide=entry.guide.with_poses(pose), default_guide=pose)
    arguments: dict[str, Any] = {"name": f"tightened-{pose}", "lr": 1e-3, **limits}
    train(tight, data, options, freeze="model", **arguments)
    return tight


def principal_components(images: Tensor, number: int, seed: int = 0) -> Reader:
    """Return a function that returns images' principal components, fitted on given images."""
    from sklearn.decomposition import PCA

    def rows(images: Tensor) -> np.ndarray:
        return images.flatten(1).numpy()

    analysis = PCA(min(number, *rows(images).shape), random_state=seed).fit(rows(images))
    return lambda _, images: analysis.transform(rows(images))


@experiment("part-whole/classify", data="mnist", minutes=30, of_runs=True)
def classify(options: Options) -> Result:
    """Learn MNIST without labels, and predict classes from objects by probes (30 minutes).

    The probes use probabilities of presences, alone and with poses. `probe_drawn` uses one sample
    of the binary presences, and `probe_parts` the presences and poses of parts, without objects.
    `probe_components` uses as many principal components of the pixels as there are objects.
    """
    data = load_dataset("mnist", root=options.data_root)
    entry = load_or_train("part-whole", data, options)
    components = principal_components(data.train.images, len(entry.model.presence_logits))
    accuracies = fit_probes(entry, data, {**READERS, "components": components})
    names = {"probe": "probe_{variant}", "probe_all": "probe_{variant}_all"}
    figures = pictures(entry, data.test.images)
    return Result({"features": Table(accuracies, names)}, figures, None, entry)


@experiment("part-whole/guides", data="mnist", minutes=30, of_runs=True)
def guides(options: Options, *, images: int = 1000, particles: int = 100) -> Result:
    """Compare every guide on one trained model and held-out digits (30 minutes).

    The rows "relaxed" are bounds on the model with relaxed presences, and comparable with each
    other only, because Pyro's AutoNormal supports no discrete site. A sample of the prior
    initializes AutoNormal, which is fitted to these very images, without any network of the zoo.

    Args:
        images: number of held-out digits.
        particles: number of draws of the IWAE bound.
    """
    data = load_dataset("mnist", root=options.data_root)
    entry = load_or_train("part-whole", data, options)
    model, held_out = entry.model, data.test[:images]
    updates = {name: options.shorten_steps(number) for name, number in UPDATES.items()}
    steps = updates["tighten"]
    normal = tighten(entry, data, options, steps=steps)
    routing = replace(entry, guide=entry.make_guide("routing"))
    free = fit_free_form(normal, held_out, options, updates["free_form"])
    low_rank = tighten(entry, data, options, "low_rank", steps=steps)
    wide = fit_guide("widened", model, entry.guide, data.train[:2000], steps=updates["widen"])
    routed = tighten(routing, data, options, name="tightened-routing", steps=steps)
    discrete: dict[str, nn.Module] = {
        "normal": normal.guide,
        "low rank": low_rank.guide,
        "delta": entry.guide,
        "delta, widened": wide,
        "routing": routed.guide,
        "semi-amortized": SemiAmortized(normal.guide, updates["refine"]),
        "free-form normal": free,
    }
    relaxed: dict[str, nn.Module] = {"free-form normal": free}
    for kind in (AutoNormal, AutoDelta):
        auto = fit_automatic(kind, model, held_out, options, updates["automatic"])
        relaxed[kind.__name__] = auto
    table, relaxed_table = (
        compare(
            {name: (model, guide) for name, guide in rows.items()},
            held_out,
            discrete=rows is discrete,
            num_particles=particles,
            seed=options.seed,
        )
        for rows in (discrete, relaxed)
    )
    bounds = Table(measures_of_rows(relaxed_table), names="{quantity}_{variant}_relaxed")
    metrics: Metrics = {**measures_of_rows(table), "relaxed": bounds}
    return Result(metrics, {"": table.draw(), "relaxed": relaxed_table.draw()}, table, entry)


def fit_free_form(entry: Entry, images: Split, options: Options, steps: int) -> FreeForm:
    """Fit a guide with normal poses for each image, initialized at the entry's guide."""
    guide = FreeForm(entry.model, images.images, entry.guide, "normal")
    arguments: dict[str, Any] = dict(steps=steps, lr=0.01, batch_size=len(images), freeze="model")
    train(replace(entry, guide=guide), images, options, name="free-form", **arguments)
    return guide


def fit_automatic(
    kind: type[AutoNormal | AutoDelta], model: Model, images: Split, options: Options, steps: int
) -> AutoGuide:
    """Fit one of Pyro's automatic guides to images."""
    guide = kind(model, init_loc_fn=init_to_sample)
    checks = checkpoints(options, kind.__name__)
    fit_to_images(guide, model, images, steps=steps, seed=options.seed, checks=checks)
    return guide
