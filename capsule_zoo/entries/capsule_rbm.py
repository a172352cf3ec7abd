"""Capsule RBM, and the RBM that it is compared with (Li and Zhu 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capsule_zoo.guides import ExactSwitches, MeanFieldSwitches
from capsule_zoo.inference import ContrastiveDivergence
from capsule_zoo.models import RBM, CapsuleRBM
from capsule_zoo.registry import Entry, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING = dict(optimizer=torch.optim.SGD, lr=0.03, schedule="linear", batch_size=100)
SMALL = dict(image_shape=(1, 4, 4), chains=0, sweeps=3)


def _samples(entry: Entry, images: Tensor) -> Figure:
    from capsule_zoo import energy_figures  # only here, so that listing needs no matplotlib

    return energy_figures.samples(entry.model)


def _reconstructions(entry: Entry, images: Tensor) -> Figure:
    from capsule_zoo import energy_figures

    return energy_figures.reconstructions(entry.model.reconstruct(images[:12]), images)


def _fields(entry: Entry, images: Tensor) -> Figure:
    from capsule_zoo import energy_figures

    return energy_figures.projective_fields(entry.model)


PICTURES = {"samples": _samples, "reconstructions": _reconstructions}


def _objective(k: int, chains: int) -> ContrastiveDivergence:
    return ContrastiveDivergence(k, persistent=chains > 0, chains=max(chains, 1))


@register("capsule-rbm", small={**SMALL, "capsules": 3, "units": 2})
def capsule_rbm(
    image_shape: tuple[int, int, int] = (1, 28, 28), k: int = 1, chains: int = 100, **sizes
) -> Entry:
    """An RBM whose hidden units come in switched groups; see `capsule_zoo.models.capsule_rbm`.

    Args:
        image_shape: (channels, height, width).
        k: Gibbs sweeps for each update.
        chains: persistent chains; 0 starts every chain at the data.
        sizes: arguments of `CapsuleRBM`.
    """
    model = CapsuleRBM(image_shape, **sizes)
    return Entry(
        model=model,
        guide=ExactSwitches(model),
        guides={
            "exact": lambda entry: ExactSwitches(entry.model),
            "mean_field": lambda entry: MeanFieldSwitches(entry.model),
        },
        objective=_objective(k, chains),
        training=dict(TRAINING),
        figures={**PICTURES, "fields": _fields},
        default_guide="exact",
    )


@register("rbm", small={**SMALL, "hidden": 5})
def rbm(
    image_shape: tuple[int, int, int] = (1, 28, 28), k: int = 1, chains: int = 100, **sizes
) -> Entry:
    """A restricted Boltzmann machine: one capsule whose switch is always on.

    Args:
        image_shape: (channels, height, width).
        k: Gibbs sweeps for each update.
        chains: persistent chains; 0 starts every chain at the data.
        sizes: arguments of `RBM`.
    """
    model = RBM(image_shape, **sizes)
    return Entry(
        model=model,
        guide=ExactSwitches(model),
        guides={"exact": lambda entry: ExactSwitches(entry.model)},
        objective=_objective(k, chains),
        training=dict(TRAINING),
        figures=PICTURES,
        default_guide="exact",
    )
