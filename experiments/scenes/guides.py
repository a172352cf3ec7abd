"""One trained model of scenes, inverted in seven ways, side by side.

The model is trained with peeling and then kept as it is. Three other guides are trained to it for
equal time, and three are fitted to the test scenes, from the answers of the peeling guide.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, experiment, train
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    held_out_bounds,
    mean_and_error,
    single,
    snake_case,
)
from capsule_zoo.experiments.scenes.counts import accuracy, drawn_counts
from capsule_zoo.inference import Checks, Pace, SemiAmortized, SummedPresences
from capsule_zoo.inference.check import latent_sites
from capsule_zoo.inference.log_weight import log_density
from capsule_zoo.inference.posterior.annealing.path import scored
from capsule_zoo.models.common.modes import in_eval_mode, seeded
from capsule_zoo.models.scenes.counts import subsets_of
from capsule_zoo.records import Number, Numbers
from capsule_zoo.registry import Entry, load

DATA = "multi-mnist:train=10000"
FIRST = "peeling"
SWAPPED = ("two-sweeps", "recurrent", "slot-attention")
FITTED = ("free_form", "semi_amortized", "corrected")
DRAWS = 5  # that are combined for a count


@experiment("scenes/guides", data="multi-mnist", minutes=48, role="comparison")
def guides(
    options: Options,
    *,
    length: float = 12.0,
    flattened: int = 200,
    tested: int = 1000,
    images: int = 500,
    particles: int = 100,
    fitted: int = 100,
) -> Result:
    """Swap seven guides on one model of scenes, and compare them (48 core-minutes).

    The model is trained with `peeling` and then frozen. `two_sweeps`, `recurrent` and
    `slot_attention` are trained to it for as long, from the start. `free_form`, `semi_amortized`
    and `corrected` are fitted to the scenes, from the answers of `peeling`, with presences summed
    out by enumeration. A slot that is off then has a law too.

    `count_accuracy` combines five draws by their weights; `count_accuracy_one_draw` is that of the
    presences that the guide itself draws. `milliseconds` of a processor draw all sites of an image.

    Args:
        length: minutes of the processor for each trained guide.
        flattened: first updates, in which presences are flattened; see `SummedPresences`.
        tested: test scenes whose objects are counted.
        images: test scenes whose log p is bounded, and counted by the fitted guides.
        particles: draws of the bound.
        fitted: updates of the guides that are fitted to the scenes.
    """
    how = dict(length=length, flattened=flattened)
    how |= dict(tested=tested, images=images, particles=particles)
    study = Study({FIRST: None})
    (first,) = study.run(one_guide, options, **how)[FIRST]
    folder = study.folders(options)[FIRST] / "trained"
    others = Study(dict.fromkeys(SWAPPED, folder)).run(one_guide, options, **how)
    rows = {FIRST: first, **{snake_case(name): found for name, (found,) in others.items()}}
    peeling = load(folder)
    few = load_dataset(DATA, options.data_root).test[:images]
    for name in FITTED:
        began = time.process_time()
        guide = peeling.fit_guide(name, few.images, steps=fitted, seed=options.seed)
        if isinstance(guide, SemiAmortized):
            guide.fitted(few.images)  # which it keeps
        passed = 1000 * (time.process_time() - began) / len(few)
        pair = replace(peeling.summed, guide=guide)
        found = held_out_bounds(pair, few, particles, options.seed)
        found["count_accuracy"] = of_summed(pair, few)
        rows[name] = {**found, "milliseconds": single(passed, len(few))}
    return Result(by_quantity(rows))


def one_guide(
    job: Job[Path | None],
    *,
    length: float,
    flattened: int,
    tested: int,
    images: int,
    particles: int,
) -> Numbers:
    """Train and measure one guide, with the model or to the trained model in a folder."""
    options = job.options
    data = load_dataset(DATA, options.data_root)
    entry = begun("scenes", data, options, counts="learned").use_guide(job.name)
    if job.variant:
        entry.model.load_state_dict(load(job.variant).model.state_dict())
    entry.objective = SummedPresences(updates=flattened)
    steady: dict[str, Any] = dict(pace=Pace("constant"), checks=Checks(clock="processor"))
    freeze = "model" if job.variant else None
    run = train(entry, data.train, options, length, name="trained", freeze=freeze, **steady)
    test = data.test[:tested]
    return {
        **held_out_bounds(entry, data.test[:images], particles, options.seed),
        "count_accuracy": accuracy(entry, test, draws=DRAWS),
        **of_one_draw(entry, test),
        "updates": single(run.steps),
        "seconds": single(run.seconds),
    }


@torch.no_grad()
def of_summed(pair: Entry, scenes: Split) -> Number:
    """Return the share of right counts of a guide to a model that sums presences out."""
    sizes = subsets_of(pair.model.slots, scenes.images).sum(-1)
    with seeded(0), in_eval_mode(pair.guide):
        weights = torch.stack([of_subsets(pair, scenes.images) for _ in range(DRAWS)])
    each = weights.logsumexp(0)  # (2^S, N)
    numbers = range(pair.model.slots + 1)
    found = torch.stack([each[sizes == number].logsumexp(0) for number in numbers]).argmax(0)
    return mean_and_error((found == scenes.objects.counts).float())


def of_subsets(pair: Entry, images: Tensor) -> Tensor:
    """Draw once from a guide, and return the log weight of the draw with each subset, (2^S, N)."""
    drawn = poutine.trace(pair.guide).get_trace(images)
    values = {name: site["value"] for name, site in latent_sites(drawn).items()}
    joint = scored(pair.model, values, images)
    joint.compute_log_prob()
    sites = [site for site in joint.nodes.values() if "log_prob" in site]
    terms = [site["log_prob"] for site in sites if site["log_prob"].dim()]
    return sum(terms).flatten(1) - log_density(drawn, images)


def of_one_draw(entry: Entry, scenes: Split) -> dict[str, Number]:
    """Return the share of right counts in single draws of the guide, and its time for an image."""
    began = time.process_time()
    right = drawn_counts(entry, scenes) == scenes.objects.counts
    passed = time.process_time() - began
    return {
        "count_accuracy_one_draw": mean_and_error(right.float()),
        "milliseconds": single(1000 * passed / len(scenes), len(scenes)),
    }
