"""Discrete presences of part-whole capsules, trained as they are instead of relaxed."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from pyro.infer import ELBO, Trace_ELBO

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import bounds_of_rows
from capsule_zoo.experiments.part_whole.headline import (
    DIGITS_STEPS,
    JITTER,
    TIGHTENING_STEPS,
    learn_digits,
    tighten,
)
from capsule_zoo.experiments.study import divide
from capsule_zoo.experiments.training import train
from capsule_zoo.inference import (
    ImportanceWeightedELBO,
    Inputs,
    Pace,
    ReweightedWakeSleep,
    ThermodynamicObjective,
    compare,
)
from capsule_zoo.records import Numbers

RELAXED = "relaxed"


def objectives(draws: int, intervals: int) -> Mapping[str, ELBO]:
    """Return the objectives by name; all but the first are for discrete presences."""
    return {
        RELAXED: Trace_ELBO(),
        "importance_weighted": ImportanceWeightedELBO(draws),
        "reweighted": ReweightedWakeSleep(draws, sleep=0.0),
        "thermodynamic": ThermodynamicObjective(draws, intervals),
    }


@experiment("part-whole/discrete-objectives", data="digits", minutes=20)
def discrete_objectives(
    options: Options,
    *,
    steps: int = DIGITS_STEPS,
    tightening: int = TIGHTENING_STEPS,
    draws: int = 5,
    intervals: int = 5,
    lr: float = 3e-4,
    images: int = 200,
    particles: int = 100,
) -> Result:
    """Compare objectives for discrete presences with the relaxed bound (25 core-minutes).

    All objectives start at the pair of `part-whole/digits`, which was trained with relaxed
    presences and has normal poses. From there model and guide are trained further for the same time
    (a quarter of the minutes each), under

    - `relaxed`: the ELBO of relaxed presences, with one draw, whose gradient is reparametrized;
    - `importance_weighted`: the bound of several draws of discrete presences. Their gradient is the
      score function with the baseline of Mnih & Rezende (2016), and poses are reparametrized;
    - `reweighted`: reweighted wake-sleep without its sleep phase (Bornschein & Bengio 2015);
    - `thermodynamic`: the thermodynamic objective (Masrani, Le & Wood 2019).

    The last two hold all draws constant, poses too. Bounds are those of the discrete model, for all
    rows alike; `start` is the pair that they start at. `updates` were made in this time.

    Args:
        steps: relaxed updates of the pair before the start; these and the next shrink with minutes.
        tightening: updates of the guide with normal poses before the start.
        draws: number of draws for each image, except for `relaxed`.
        intervals: number of intervals of the thermodynamic objective.
        lr: learning rate, which falls to zero.
        images: number of held-out digits.
        particles: number of draws of the IWAE bound.
    """
    data = load_dataset("digits")
    entry = learn_digits(data, options, steps=options.shortened(steps))
    shorter = options.shortened(tightening)
    start = tighten(entry, data, options, steps=shorter, inputs=Inputs(JITTER))
    pairs: dict[str, tuple] = {"start": (start.model, start.guide)}
    updates: Numbers = {}
    rows = objectives(draws, intervals)
    for name, minutes in divide(options.budget, rows).items():
        options.say(f"Training on under {name}")
        model, guide = deepcopy(pairs["start"])
        pairs[name] = (model, guide)
        own = pairs[name] if name == RELAXED else (model.discretized(), guide.discretized())
        how: dict[str, Any] = dict(
            objective=rows[name], lr=lr, pace=Pace("linear"), inputs=Inputs(JITTER)
        )
        own_start = replace(start, model=own[0], guide=own[1])
        run = train(own_start, data, options, minutes, name=name, **how)
        updates[name] = (float(run.steps), None, 1)
    table = compare(pairs, data.test[:images], num_particles=particles, seed=options.seed)
    return Result({**bounds_of_rows(table), "updates": updates}, {"": table.draw()}, table)
