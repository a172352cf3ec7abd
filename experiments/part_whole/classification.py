"""The experiments of the part-whole paper (Smith et al. 2020), and a short run on digits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoGuide, AutoNormal, init_to_sample
from torch import Tensor, nn

from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import bounds_of_rows, numbers_of_columns, pictures
from capsule_zoo.experiments.training import checkpoints, train, trained
from capsule_zoo.guides import FreeForm
from capsule_zoo.inference import (
    Accuracy,
    Comparison,
    Inputs,
    SemiAmortized,
    compare,
    infer,
    latents,
    linear_probe,
    widen,
)
from capsule_zoo.inference.posterior.fitted import fit_to_images
from capsule_zoo.models import Model
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, create

PRESENCES, WITH_POSES = ["object_presence"], ["object_presence", "object_pose"]
PARTS = ["part_presence", "part_pose"]
PROBED = 10_000  # training images that a probe is fitted on
Reader = Callable[[nn.Module, Tensor], np.ndarray]  # features of images, read by a guide


def drawn_presences(guide: nn.Module, images: Tensor, seed: int = 0) -> np.ndarray:
    """Return one draw of the binary presences of the objects, (N, objects)."""
    return infer(guide, images, PRESENCES, seed)[PRESENCES[0]].cpu().numpy()


OBJECTS: Mapping[str, Reader] = {
    "probe_presence": partial(latents, sites=PRESENCES),
    "probe_presence_pose": partial(latents, sites=WITH_POSES),
}
CONTROLS: Mapping[str, Reader] = {
    "probe_drawn": drawn_presences,
    "probe_parts": partial(latents, sites=PARTS),
}


def probes(
    entry: Entry, data: Dataset, probed: int = PROBED, readers: Mapping[str, Reader] = OBJECTS
) -> dict[str, Accuracy]:
    """Fit linear probes on what is read off the images, by default on the objects' presences.

    They are fitted on the features of `probed` training images and, if there are more, also on the
    features of all training images (`..._all`).

    Args:
        readers: features by the name of the probe.
    """
    found, labels = {}, data.train.labels
    sizes = {"": probed, "_all": len(labels)} if len(labels) > probed else {"": len(labels)}
    for name, read in readers.items():
        features, tested = (read(entry.guide, split.images) for split in (data.train, data.test))
        for ending, n in sizes.items():
            found[name + ending] = linear_probe(features[:n], labels[:n], tested, data.test.labels)
    return found


def tighten(entry: Entry, data: Dataset, options: Options, pose: str = "normal", **limits) -> Entry:
    """Return the entry with a guide whose poses have densities, trained with the model frozen.

    The guide starts at the points of the entry's guide. It needs the entry's warm-up: new
    deviations are small, and one of Adam's full first updates moves every pose by many of them.
    """
    guide = entry.guide.with_poses(pose)
    how: dict[str, Any] = {"name": f"tightened-{pose}", "lr": 1e-3, "freeze": "model", **limits}
    tight = replace(entry, guide=guide, default_guide=pose)
    train(tight, data, options, **how)
    return tight


def free_form(entry: Entry, images: Split, options: Options, steps: int) -> FreeForm:
    """Return a guide with normal poses of its own for each image, started at the entry's guide."""
    guide = FreeForm(entry.model, images.images, entry.guide, "normal")
    whole: dict[str, Any] = dict(batch_size=len(images), freeze="model")
    how: dict[str, Any] = dict(name="free-form", steps=steps, lr=0.01, **whole)
    train(replace(entry, guide=guide), images, options, **how)
    return guide


JITTER = transforms.Affine(degrees=10, shear=0.1, scale=(0.9, 1.1), shift=1)
SIZES: Mapping[str, Any] = dict(objects=16, parts=12)


def learn_digits(
    data: Dataset, options: Options, name: str = "part-whole", sizes: Any = SIZES, **limit: Any
) -> Entry:
    """Return an entry trained on jittered digits; by default part-whole capsules."""
    entry = create(name, image_shape=data.image_shape, **sizes)
    train(entry, data, options, name="digits", inputs=Inputs(JITTER), **limit)
    return entry


def principal_components(images: Tensor, number: int, seed: int = 0) -> Reader:
    """Return a reader of principal components of pixels, as many as these images have at most."""
    from sklearn.decomposition import PCA

    def rows(images: Tensor) -> np.ndarray:
        return images.flatten(1).numpy()

    known = PCA(min(number, *rows(images).shape), random_state=seed).fit(rows(images))
    return lambda _, images: known.transform(rows(images))


@experiment("part-whole/classify", data="mnist", minutes=30, of_runs=True)
def classify(options: Options, *, probed: int = PROBED) -> Result:
    """Learn MNIST without labels and read the class off the objects (30 minutes).

    The probes read probabilities of presences, alone and with poses. `probe_drawn` reads one draw
    of the binary presences, and `probe_parts` the parts without any object: their presences and
    poses. `probe_components` reads as many principal components of the pixels as there are objects.

    Args:
        probed: number of training images that a linear probe is fitted on.
    """
    data = load_dataset("mnist", root=options.data_root)
    entry = trained("part-whole", data, options)
    components = principal_components(data.train.images, len(entry.model.presence_logits))
    readers = {**OBJECTS, **CONTROLS, "probe_components": components}
    numbers: dict[str, Numbers] = {}
    for name, accuracy in probes(entry, data, probed, readers).items():
        quantity = "probe_all" if name.endswith("_all") else "probe"
        variant = name.removeprefix("probe_").removesuffix("_all")
        numbers.setdefault(quantity, {})[variant] = accuracy
    names = {"probe": "probe_{variant}", "probe_all": "probe_{variant}_all"}
    shown = pictures(entry, data.test.images)
    return Result({"features": Table(numbers, names)}, shown, None, entry)


@experiment("part-whole/guides", data="mnist", minutes=30, of_runs=True)
def guides(
    options: Options,
    *,
    images: int = 1000,
    particles: int = 100,
    tightening: int = 600,
    widening: int = 200,
    free_form_steps: int = 100,
    refining: int = 40,
    automatic_steps: int = 400,
) -> Result:
    """Compare every guide on one trained model and held-out digits (30 minutes).

    The rows "relaxed" are bounds on the model with relaxed presences, and comparable with each
    other only, because Pyro's AutoNormal supports no discrete site. AutoNormal starts at a draw
    from the prior and is fitted to these very images, without any network of the zoo.

    Args:
        images: number of held-out digits.
        particles: number of draws of the IWAE bound.
        tightening: updates of each guide with a density; these and the next shrink with minutes.
        widening: updates of the widened guide of points.
        free_form_steps: updates of the guide with parameters for every image.
        refining: steps of the semi-amortized guide.
        automatic_steps: updates of Pyro's automatic guides.
    """
    data = load_dataset("mnist", root=options.data_root)
    entry = trained("part-whole", data, options)
    model, held_out = entry.model, data.test[:images]
    limit = options.shortened
    normal = tighten(entry, data, options, steps=limit(tightening))
    routing = replace(entry, guide=entry.make_guide("routing"))
    free = free_form(normal, held_out, options, limit(free_form_steps))
    low_rank = tighten(entry, data, options, "low_rank", steps=limit(tightening))
    wide = widen(model, entry.guide, data.train[:2000], steps=limit(widening))
    routed = tighten(routing, data, options, name="tightened-routing", steps=limit(tightening))
    discrete: dict[str, nn.Module] = {
        "normal": normal.guide,
        "low rank": low_rank.guide,
        "delta": entry.guide,
        "delta, widened": wide,
        "routing": routed.guide,
        "semi-amortized": SemiAmortized(normal.guide, limit(refining), law="normal"),
        "free-form normal": free,
    }
    relaxed: dict[str, nn.Module] = {
        "free-form normal": free,
        "AutoNormal": automatic(AutoNormal, model, held_out, options, limit(automatic_steps)),
        "AutoDelta": automatic(AutoDelta, model, held_out, options, limit(automatic_steps)),
    }
    shared: dict[str, Any] = dict(num_particles=particles, seed=options.seed)
    tables = [
        compare({n: (model, guide) for n, guide in rows.items()}, held_out, discrete=law, **shared)
        for rows, law in ((discrete, True), (relaxed, False))
    ]
    bounds = Table(measures(tables[1]), names="{quantity}_{variant}_relaxed")
    metrics: Metrics = {**measures(tables[0]), "relaxed": bounds}
    drawn = {"": tables[0].draw(), "relaxed": tables[1].draw()}
    return Result(metrics, drawn, tables[0], entry)


def measures(table: Comparison) -> dict[str, Numbers]:
    """Return the bounds of a comparison, MAP objectives of the other rows, and times of all."""
    columns = {"map": "map_objective", "seconds_per_image": "seconds_per_image"}
    return bounds_of_rows(table) | numbers_of_columns(table, columns)


def automatic(
    kind: type[AutoNormal | AutoDelta],
    model: Model,
    images: Split,
    options: Options,
    steps: int,
    hide: Sequence[str] = (),
    **how: Any,
) -> AutoGuide:
    """Return one of Pyro's automatic guides, fitted to these images.

    Args:
        hide: sites that the model sums out.
        how: further arguments of `fit_to_images`.
    """
    seen = poutine.block(model, hide=list(hide)) if hide else model
    guide = kind(seen, init_loc_fn=init_to_sample)
    saved = checkpoints(options, kind.__name__)
    fit_to_images(guide, model, images, steps=steps, seed=options.seed, checks=saved, **how)
    return guide
