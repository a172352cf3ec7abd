"""Every guide on one trained model, and the nats that guides lose, for each family of models.

`<model>/guides` compares all guides that fit a trained model on the same held-out images: those of
its entry, tuned with the model frozen, and the general ones, fitted to the images. `zoo/gaps`
anneals from the guides of trained models, so that it is known how loose their bounds are.

Models of binary pixels are measured on images binarized once, with seed 0. The models are the
published ones where there are any; other models are trained first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from capsule_zoo.data import Binarize, Dataset, load_dataset
from capsule_zoo.discovery import list_weights
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import by_quantity, snake_case
from capsule_zoo.experiments.part_whole.headline import measures
from capsule_zoo.experiments.study import Job, Study
from capsule_zoo.experiments.training import train
from capsule_zoo.inference import Inputs
from capsule_zoo.registry import Entry, create
from capsule_zoo.runs.annealing import anneal_run
from capsule_zoo.runs.folder import open_run
from capsule_zoo.runs.measurements import (
    as_scored,
    compare_run,
    draws_binary_pixels,
    guides_of,
)

SWAPPED = (
    "vae",
    "conditional-autoencoder",
    "generative-capsnet",
    "generative-capsnet-continuous",
    "recurrent-capsules",
    "draw",
    "capsule-helmholtz",
    "shape-codes",
    "stacked-capsule-autoencoder",
)
QUANTITIES = (
    *("lower", "simulated_lower", "simulated_upper", "gap", "acceptance_rate"),
    *("elbo", "iwae", "lost_elbo", "lost_iwae", "ess", "pareto_k"),
)


def opened(name: str, options: Options, steps: int) -> tuple[Entry, Dataset]:
    """Return a trained entry with the data on which it is measured.

    It is the run that the options name, else the entry's published weights, else a new entry,
    trained on MNIST for a number of updates.
    """
    published = [w.name for w in list_weights().values() if (w.entry, w.data) == (name, "mnist")]
    if options.run or published:
        root = None if options.data_root is None else Path(options.data_root)
        entry, data, _ = open_run(options.run or published[0], None, root)
        return entry, as_scored(entry, data)
    data = load_dataset("mnist", root=options.data_root)
    entry = create(name, image_shape=data.image_shape)
    options.say(f"Training {name} for {steps} updates")
    transform = Binarize() if draws_binary_pixels(entry.model) else None
    train(entry, data, options, name=name, steps=steps, inputs=Inputs(transform))
    return entry, as_scored(entry, data)


def _register(name: str) -> Callable[..., Result]:
    """Register the comparison of all guides to one entry's model."""

    def guides(
        options: Options,
        *,
        images: int = 500,
        particles: int = 100,
        fitting: int = 200,
        training: int = 3000,
    ) -> Result:
        entry, data = opened(name, options, options.shortened(training))
        if entry.name != name:
            raise ValueError(
                f"run holds {entry.name!r}, but this experiment compares guides to {name!r}; give "
                f"a run of {name!r}, or compare by capsule-zoo compare"
            )
        steps = options.shortened(fitting)
        options.say(f"Comparing {', '.join(guides_of(entry))} on {images} held-out images")
        table = compare_run(
            entry,
            data,
            guides_of(entry),
            tune_steps=steps,
            images=images,
            particles=particles,
            seed=options.seed,
            progress=options.progress,
        )
        found = measures(table)
        count = table.attrs["num_images"]
        for row, seconds in table["fit_seconds"].items():
            numbers = found.setdefault("fit_seconds", {})
            numbers[snake_case(row)] = float(seconds), None, count
        return Result(found, {"": table.draw()}, table, entry)

    guides.__doc__ = f"""Compare every guide to one trained {name} on held-out digits.

    Args:
        images: number of held-out images.
        particles: number of draws of the IWAE bound.
        fitting: updates of every guide but the entry's own.
        training: updates of the pair, if there are no published weights.
    """
    return experiment(f"{name}/guides", data="mnist", minutes=30)(guides)


guide_experiments = {name: _register(name) for name in SWAPPED}


@experiment("zoo/gaps", data="mnist", minutes=60)
def gaps(
    options: Options,
    *,
    entries: tuple[str, ...] = (
        "vae",
        "recurrent-capsules",
        "conditional-autoencoder",
        "generative-capsnet",
        "generative-capsnet-continuous",
        "part-whole",
        "capsule-helmholtz",
    ),
    images: int = 20,
    images_of: Mapping[str, int] = {"part-whole": 100},  # read only
    simulated: int = 20,
    chains: int = 8,
    temperatures: int = 300,
    leapfrogs: int = 5,
    particles: int = 100,
    training: int = 3000,
) -> Result:
    """Anneal from the guides of trained models, from both sides, on few held-out digits (an hour).

    `lost_elbo_<entry>` is the distance from the guide's ELBO up to the annealed lower bound, and
    `gap_<entry>` the largest error of that bound, on images that the model draws.

    Args:
        entries: names of entries; the first stands for the run, if one is given.
        images: number of held-out images.
        images_of: number of held-out images of single entries, in place of `images`.
        simulated: number of images drawn from each model.
        chains: annealed chains of each image.
        temperatures: laws between the guide and the posterior.
        leapfrogs: steps of each trajectory.
        particles: number of draws of the guide's own IWAE bound.
        training: updates of an entry without published weights.
    """
    names = entries[:1] if options.run else entries
    settings = dict(
        particles=particles,
        simulated=simulated,
        chains=chains,
        temperatures=temperatures,
        leapfrogs=leapfrogs,
    )
    task = partial(annealed_entry, steps=options.shortened(training), settings=settings)
    options.say(f"Annealing from the guides of {', '.join(names)}")
    numbers = {name: (name, images_of.get(name, images)) for name in names}
    outcomes = Study(numbers).run(task, replace(options, minutes=None))
    rows = {
        snake_case(outcome["entry"]): {name: tuple(n) for name, n in outcome["numbers"].items()}
        for outcome in outcomes.values()
    }
    return Result(by_quantity(rows))


def annealed_entry(
    job: Job[tuple[str, int]], *, steps: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the name of a trained entry, and what annealing from its guide says, by quantity."""
    name, images = job.variant
    entry, data = opened(name, job.options, steps)
    found = anneal_run(entry, data, images=images, seed=job.options.seed, **settings)
    numbers = {
        quantity: _number(found, quantity, images, settings["simulated"])
        for quantity in QUANTITIES
        if np.isfinite(found.get(quantity, np.nan))  # pareto_k is infinite without a tail
    }
    return {"entry": entry.name, "numbers": numbers}


def _number(found: dict, name: str, images: int, simulated: int) -> tuple[float, float | None, int]:
    """Return a number with its standard error, None where there is none, and its count."""
    error = found.get(f"{name}_se")
    of_simulated = name == "gap" or name.startswith("simulated")
    known = error is not None and np.isfinite(error)
    return found[name], error if known else None, simulated if of_simulated else images
