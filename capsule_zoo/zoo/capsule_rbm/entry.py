"""Capsule RBM, and its baseline, an RBM (Li and Zhu 2019)."""

from functools import partial
from typing import Any

import torch

from capsule_zoo.figures.energy import fields, sums
from capsule_zoo.figures.generic import reconstructions, samples
from capsule_zoo.guides import ExactSwitches, MeanFieldSwitches
from capsule_zoo.inference import ContrastiveDivergence, Pace
from capsule_zoo.models import RBM, CapsuleRBM
from capsule_zoo.registry import register

DESCENT = partial(torch.optim.SGD, weight_decay=1e-4)  # small weights let chains mix
SHARED: dict[str, Any] = dict(
    objective=partial(ContrastiveDivergence, persistent=True, centered=True),
    training=dict(optimizer=DESCENT, lr=0.03, pace=Pace("linear"), batch_size=100),
)
PICTURES = {"samples": samples, "reconstructions": reconstructions}
SMALL = dict(image_shape=(1, 4, 4), sweeps=3, objective=dict(persistent=False))

register(
    "capsule-rbm",
    model=CapsuleRBM,
    guides={"exact": ExactSwitches, "mean_field": MeanFieldSwitches},
    figures={**PICTURES, "sums": sums, "fields": fields},
    summary="An RBM whose hidden units form groups that are switched on or off together.",
    small={**SMALL, "capsules": 3, "units": 2},
    **SHARED,
)
register(
    "rbm",
    model=RBM,
    guides={"exact": ExactSwitches},
    figures=PICTURES,
    summary="A restricted Boltzmann machine: one capsule whose switch is always on.",
    small={**SMALL, "hidden": 5},
    **SHARED,
)
