"""Capsule RBM, and the RBM that it is compared with (Li and Zhu 2019)."""

from functools import partial

import torch

from capsule_zoo.figures.energy import fields, sums
from capsule_zoo.figures.generic import reconstructions, samples
from capsule_zoo.guides import ExactSwitches, Guide, MeanFieldSwitches
from capsule_zoo.inference import ContrastiveDivergence, Pace
from capsule_zoo.models import RBM, CapsuleRBM, check_at_least
from capsule_zoo.registry import Entry, register
from capsule_zoo.sizes import Takes

DESCENT = partial(torch.optim.SGD, weight_decay=1e-4)  # small weights let chains mix
SMALL = dict(image_shape=(1, 4, 4), chains=0, sweeps=3)
GUIDES: dict[str, type[Guide]] = {"exact": ExactSwitches, "mean_field": MeanFieldSwitches}
PICTURES = {"samples": samples, "reconstructions": reconstructions, "sums": sums, "fields": fields}

NEED_SWITCHES = {"mean_field", "sums", "fields"}


@register(
    "capsule-rbm", small={**SMALL, "capsules": 3, "units": 2}, takes={"sizes": Takes(CapsuleRBM)}
)
def capsule_rbm(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    k: int = 1,
    chains: int = 100,
    sparsity: float = 0.0,
    centered: bool = True,
    **sizes,
) -> Entry[CapsuleRBM, Guide]:
    """An RBM whose hidden units form groups that are switched on or off together.

    Args:
        image_shape: (channels, height, width).
        k: Gibbs sweeps for each update.
        chains: persistent chains; 0 starts every chain at the data.
        sparsity: training loss of each switch that is on, in nats.
        centered: see `ContrastiveDivergence`; for Bernoulli units. The means of Gaussian units may
            be so large that the steps of the centered gradient become too large.
        sizes: arguments of `CapsuleRBM`.
    """
    return _entry(CapsuleRBM(image_shape, **sizes), k, chains, centered, sparsity)


@register(
    "rbm", small={**SMALL, "hidden": 5}, takes={"sizes": Takes(RBM, without=("capsules", "units"))}
)
def rbm(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    k: int = 1,
    chains: int = 100,
    centered: bool = True,
    **sizes,
) -> Entry[CapsuleRBM, Guide]:
    """A restricted Boltzmann machine: one capsule whose switch is always on.

    Args:
        image_shape, k, chains, centered: as for `capsule_rbm`.
        sizes: arguments of `RBM`.
    """
    return _entry(RBM(image_shape, **sizes), k, chains, centered)


def _entry(
    model: CapsuleRBM, k: int, chains: int, centered: bool, sparsity: float = 0.0
) -> Entry[CapsuleRBM, Guide]:
    check_at_least(0, chains=chains)
    left_out = set() if model.switched else NEED_SWITCHES
    return Entry(
        model=model,
        guides={name: make for name, make in GUIDES.items() if name not in left_out},
        objective=ContrastiveDivergence(
            k, persistent=chains > 0, chains=max(chains, 1), centered=centered, sparsity=sparsity
        ),
        training=dict(optimizer=DESCENT, lr=0.03, pace=Pace("linear"), batch_size=100),
        figures={name: draw for name, draw in PICTURES.items() if name not in left_out},
    )
