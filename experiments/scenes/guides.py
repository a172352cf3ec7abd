"""One model of scenes, inverted in seven ways: four guides that are trained for equal time.

Each of them has a model of its own, trained with it: one that finds no objects teaches none. The
other three are fitted to the test scenes, by the model and from the answers of the peeling guide.
"""

import time
from dataclasses import replace
from typing import Any

import torch

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, experiment, train
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    held_out_bounds,
    mean_and_error,
    single,
    snake_case,
)
from capsule_zoo.experiments.scenes.counts import accuracy
from capsule_zoo.inference import Checks, Pace, SummedPresences
from capsule_zoo.models.common.modes import in_eval_mode, seeded
from capsule_zoo.records import Number, Numbers
from capsule_zoo.registry import Entry, load

DATA = "multi-mnist:train=10000"
GUIDES = ("peeling", "two-sweeps", "recurrent", "slot-attention")
FITTED = ("free_form", "semi_amortized", "corrected")


@experiment("scenes/guides", data="multi-mnist", minutes=12, role="comparison")
def guides(
    options: Options,
    *,
    flattened: int = 200,
    tested: int = 1000,
    images: int = 500,
    particles: int = 100,
    fitted: int = 300,
) -> Result:
    """Train scenes with each guide for equal processor time (12 minutes), and compare them.

    `free_form`, `semi_amortized` and `corrected` are fitted to the scenes, from the answers of the
    peeling guide, with presences summed out by enumeration. A slot that is off then has a law too.

    `count_accuracy` combines draws by their weights; `count_accuracy_one_draw` is that of the
    presences that the guide itself draws. `milliseconds` of a processor draw all sites of an image.

    Args:
        flattened: first updates, in which presences are flattened; see `SummedPresences`.
        tested: test scenes whose objects are counted.
        images: test scenes whose log p is bounded.
        particles: draws of the bound.
        fitted: updates of the guides that are fitted to the scenes.
    """
    study, timed = Study(dict.fromkeys(GUIDES)), replace(options, minutes=options.budget)
    how = dict(flattened=flattened, tested=tested, images=images, particles=particles)
    outcomes = study.run(one_guide, timed, **how)
    rows = {snake_case(name): found for name, (found,) in outcomes.items()}
    peeling = load(study.folders(options)["peeling"] / "trained")
    few = load_dataset(DATA, options.data_root).test[:images]
    for name in FITTED:
        began = time.process_time()
        guide = peeling.fit_guide(name, few.images, steps=fitted, seed=options.seed)
        found = held_out_bounds(replace(peeling.summed, guide=guide), few, particles, options.seed)
        passed = 1000 * (time.process_time() - began) / len(few)
        rows[name] = {**found, "milliseconds": single(passed, len(few))}
    return Result(by_quantity(rows))


def one_guide(job: Job, *, flattened: int, tested: int, images: int, particles: int) -> Numbers:
    """Train and measure scenes with one guide."""
    options = job.options
    data = load_dataset(DATA, options.data_root)
    entry = begun("scenes", data, options, counts="learned").use_guide(job.name)
    entry.objective = SummedPresences(updates=flattened)
    steady: dict[str, Any] = dict(pace=Pace("constant"), checks=Checks(clock="processor"))
    run = train(entry, data.train, options, options.budget, name="trained", **steady)
    test = data.test[:tested]
    return {
        **held_out_bounds(entry, data.test[:images], particles, options.seed),
        "count_accuracy": accuracy(entry, test, draws=5),
        **of_one_draw(entry, test),
        "updates": single(run.steps),
        "seconds": single(run.seconds),
    }


@torch.no_grad()
def of_one_draw(entry: Entry, scenes: Split) -> dict[str, Number]:
    """Return the share of right counts in single draws of the guide, and its time for an image."""
    with seeded(0), in_eval_mode(entry.guide):
        began = time.process_time()
        drawn = torch.cat([entry.guide(images) for images in scenes.images.split(100)])
    passed = time.process_time() - began
    right = (drawn.sum(-1) == scenes.objects.counts).float()
    return {
        "count_accuracy_one_draw": mean_and_error(right),
        "milliseconds": single(1000 * passed / len(scenes), len(scenes)),
    }
