"""The experiments of the part-whole paper (Smith et al. 2020), and the zoo's first light."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pyro.infer.autoguide import AutoDelta, AutoGuide, AutoNormal, init_to_sample
from torch import Tensor, nn

from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.experiments import Metrics, Options, Result, experiment
from capsule_zoo.experiments.findings import (
    bounds_of_rows,
    held_out_bounds,
    mean_and_error,
    pictures,
    snake_case,
    squared_error,
)
from capsule_zoo.experiments.training import shortened, train, trained
from capsule_zoo.figures.curves import climbs
from capsule_zoo.figures.part_whole import parses
from capsule_zoo.guides import FreeForm
from capsule_zoo.inference import compare, fit, reconstruct, widen
from capsule_zoo.inference.evaluation.probe import Accuracy, latents, linear_probe
from capsule_zoo.inference.posterior.refine import Refinement, SemiAmortized, refine
from capsule_zoo.models import Model
from capsule_zoo.registry import Entry, create

PRESENCES, WITH_POSES = ["object_presence"], ["object_presence", "object_pose"]
PROBED = 10_000  # training images that a probe is fitted on, where not on all


def probes(entry: Entry, data: Dataset) -> dict[str, Accuracy]:
    """Linear probes on the objects' presences, alone and with poses, fitted on training latents.

    On the latents of 10,000 training images, as is usual, and, where there are more, on those of
    all (`..._all`).
    """
    found, labels = {}, data.train.labels
    sizes = {"": PROBED, "_all": len(labels)} if len(labels) > PROBED else {"": len(labels)}
    for name, sites in (("probe_presence", PRESENCES), ("probe_presence_pose", WITH_POSES)):
        features, asked = (
            latents(entry.guide, split.images, sites) for split in (data.train, data.test)
        )
        for ending, n in sizes.items():
            found[name + ending] = linear_probe(features[:n], labels[:n], asked, data.test.labels)
    return found


def tighten(entry: Entry, data: Dataset, options: Options, pose: str = "normal", **limits) -> Entry:
    """The same model with the trained guide's points turned into densities, the model frozen.

    The entry's warm-up is as needed here as at first: fresh deviations are small, and one of Adam's
    full first updates moves every pose by many of them.
    """
    guide = entry.guide.with_poses(pose)
    train(entry, data, options, guide=guide, **{"lr": 1e-3, "freeze": "model", **limits})
    return replace(entry, guide=guide, default_guide=pose)


def free_form(entry: Entry, images: Split, options: Options, steps: int) -> FreeForm:
    """Normal poses of its own for every one of these images, started at the entry's guide."""
    guide = FreeForm(entry.model, images.images, entry.guide, "normal")
    whole: dict[str, Any] = dict(batch_size=len(images), freeze="model")
    train(entry, images, options, guide=guide, steps=steps, lr=0.01, **whole)
    return guide


JITTER = transforms.Affine(degrees=10, shear=0.1, scale=(0.9, 1.1), shift=1)
DIGITS_STEPS, TIGHTENING_STEPS = 900, 150


def learn_digits(data: Dataset, options: Options, **limit: Any) -> Entry:
    """The demo's pair, trained on jittered digits."""
    entry = create("part-whole", image_shape=data.image_shape, objects=16, parts=12)
    size = f"{entry.model.num_parameters:,} model parameters"
    options.say(f"Training {size} on {len(data.train):,} digits")
    train(entry, data, options, transform=JITTER, **limit)
    return entry


@experiment("part-whole/digits", data="digits")
def digits(options: Options) -> Result:
    """First light: learn scikit-learn's digits, swap the guide, read held-out nats (5 minutes)."""
    options.refuse_run()
    data = load_dataset("digits")
    length = (options.minutes or 3) / 3  # everything after training shrinks with it
    limit = {"minutes": options.minutes} if options.minutes else {"steps": DIGITS_STEPS}
    entry = learn_digits(data, options, **limit)

    options.say("Tightening: the guide's points become normals, the model stays as it is")
    steps = shortened(TIGHTENING_STEPS, length)
    normal = tighten(entry, data, options, steps=steps, transform=JITTER)
    few = data.test[:48]
    options.say(f"Comparing guides on {len(few)} held-out digits")
    wide = widen(entry.model, entry.guide, data.train, steps=shortened(60, length))
    free = free_form(normal, few, options, shortened(150, length))
    pairs = {
        "normal": (entry.model, normal.guide),
        "delta": (entry.model, entry.guide),
        "delta, widened": (entry.model, wide),
        "free-form normal": (entry.model, free),
    }
    table = compare(pairs, few, num_particles=50, seed=options.seed)
    metrics = {**held_out_bounds(normal, data.test, 50, options.seed), **probes(entry, data)}
    shown = {**pictures(entry, data.test.images), "guides": table.draw()}
    return Result(metrics, shown, table, normal)


@experiment("part-whole/classify", data="mnist")
def classify(options: Options) -> Result:
    """MNIST without labels: how well a linear probe reads the class off objects (30 minutes)."""
    data = load_dataset("mnist", root=options.data_root)
    entry = trained("part-whole", data, options, minutes=30)
    return Result(probes(entry, data), pictures(entry, data.test.images), None, entry)


@experiment("part-whole/parts", data="mnist")
def parts(options: Options) -> Result:
    """What the parts are: templates, parses of upright and of turned digits, prior samples."""
    data = load_dataset("mnist", root=options.data_root)
    entry = trained("part-whole", data, options, minutes=30)
    images = data.test.images[:1000]
    turned = images.rot90(1, (2, 3))
    shown = pictures(entry, images)
    shown["turned"] = parses(entry.model, entry.guide, turned)
    metrics: Metrics = {}
    for name, seen in (("upright", images), ("turned", turned)):
        painted = reconstruct(entry.model, entry.guide, seen)
        metrics[f"squared_error_{name}"] = squared_error(painted, seen)
    metrics["model_parameters"] = (float(entry.model.num_parameters), None, 1)
    return Result(metrics, shown, None, entry)


PARTICLES = 100  # for each image, in the comparison of guides


@experiment("part-whole/guides", data="mnist")
def guides(options: Options) -> Result:
    """Every guide on one trained model, on 1,000 held-out digits: ELBO, IWAE-100, ESS, seconds.

    The rows "relaxed" are bounds on the model with relaxed presences, and comparable with each
    other only: Pyro's AutoNormal knows no discrete site. It starts at a draw from the prior and is
    fitted to these very images, with nothing of ours beside it.
    """
    data = load_dataset("mnist", root=options.data_root)
    entry = trained("part-whole", data, options, minutes=30)
    model, held_out = entry.model, data.test[:1000]
    limit = partial(shortened, length=(options.minutes or 30) / 30)
    normal = tighten(entry, data, options, steps=limit(600))
    routing = replace(entry, guide=entry.make_guide("routing"))
    free = free_form(normal, held_out, options, limit(100))
    discrete: dict[str, nn.Module] = {
        "normal": normal.guide,
        "low rank": tighten(entry, data, options, "low_rank", steps=limit(600)).guide,
        "delta": entry.guide,
        "delta, widened": widen(model, entry.guide, data.train[:2000], steps=limit(200)),
        "routing": tighten(routing, data, options, steps=limit(600)).guide,
        "semi-amortised": SemiAmortized(normal.guide, limit(40), law="normal"),
        "free-form normal": free,
    }
    relaxed: dict[str, nn.Module] = {
        "free-form normal, relaxed": free,
        "AutoNormal, relaxed": automatic(AutoNormal, model, held_out, options, limit(400)),
        "AutoDelta, relaxed": automatic(AutoDelta, model, held_out, options, limit(400)),
    }
    shared: dict[str, Any] = dict(num_particles=PARTICLES, seed=options.seed)
    tables = [
        compare({n: (model, guide) for n, guide in rows.items()}, held_out, discrete=law, **shared)
        for rows, law in ((discrete, True), (relaxed, False))
    ]
    table = pd.concat(tables).astype({"is_bound": bool})
    metrics = {**bounds_of_rows(tables[0]), **bounds_of_rows(tables[1])}
    for name, row in table.iterrows():
        for column in ("map_objective", "ess", "pareto_k", "seconds_per_image"):
            if np.isfinite(row[column]):
                title = column.removesuffix("_objective")
                metrics[f"{title}_{snake_case(name)}"] = row[column], None, len(held_out)
    drawn = {"": tables[0].draw(), "relaxed": tables[1].draw()}
    return Result(metrics, drawn, table, entry)


def automatic(
    kind: type[AutoNormal | AutoDelta], model: Model, images: Split, options: Options, steps: int
) -> AutoGuide:
    """One of Pyro's automatic guides, fitted to these images."""
    guide = kind(model, init_loc_fn=init_to_sample)
    fit(
        model,
        guide,
        images,
        steps=steps,
        lr=0.02,
        schedule="linear",
        batch_size=len(images),
        freeze="model",
        seed=options.seed,
        progress=options.progress,
    )
    return guide


PLAIN_RATES, PLAIN_STEPS, BUDGETS = (1e-3, 3e-3, 1e-2), 1000, (80, 90, 100, 110, 120, 150, 200)


@experiment("part-whole/refine", data="mnist")
def refinement(options: Options) -> Result:
    """Test-time inference on 256 upright and 256 turned digits: scheduled against plain Adam."""
    data = load_dataset("mnist", root=options.data_root)
    entry = trained("part-whole", data, options, minutes=30)
    images = data.test.images[-256:]  # the schedule was chosen on others
    metrics: Metrics = {}
    paths: dict[str, Tensor] = {}
    for name, shown in (("upright", images), ("rotated", images.rot90(1, (2, 3)))):
        race = partial(timed_refinement, entry, shown, options)
        plain = max(
            (race(method="adam", steps=PLAIN_STEPS, lr=rate) for rate in PLAIN_RATES),
            key=lambda found: found.objective,
        )
        ours = next(
            found
            for budget in BUDGETS
            for found in [race(steps=budget)]
            if found.objective >= plain.objective or budget == BUDGETS[-1]
        )
        reached = ours.objective >= plain.objective
        metrics[f"speedup_{name}"] = (plain.seconds / ours.seconds if reached else 0.0, None, 1)
        metrics[f"{name}_start"] = mean_and_error(plain.refinement.start)
        metrics[f"{name}_plain"] = mean_and_error(plain.refinement.end)
        metrics[f"{name}_scheduled"] = mean_and_error(ours.refinement.end)
        metrics[f"{name}_scheduled_steps"] = (float(ours.steps), None, 1)
        paths[f"{name}, plain Adam"] = plain.refinement.path
        paths[f"{name}, scheduled"] = ours.refinement.path
    return Result(metrics, {"": climbs(paths)}, None, entry)


class Finish(NamedTuple):
    """One refinement: what it reached under fresh noise (nats per image), and at what cost."""

    refinement: Refinement
    objective: float
    seconds: float
    steps: int


def timed_refinement(
    entry: Entry, images: Tensor, options: Options, steps: int, **settings: Any
) -> Finish:
    """Refine, then score the answer with noise that it was not fitted to."""
    model, seed = entry.model, options.seed
    began = time.perf_counter()
    found = refine(model, entry.guide, images, steps=steps, seed=seed, **settings)
    seconds = time.perf_counter() - began
    fresh = refine(model, found.guide, images, steps=0, seed=seed + 1).start.mean().item()
    options.say(f"{settings}, {steps} steps: {fresh:.1f} nats in {seconds:.0f} seconds")
    return Finish(found, fresh, seconds, steps)
