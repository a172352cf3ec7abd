"""The log partition function log Z of a capsule RBM, which gives log p(x) = -F(x) - log Z.

>>> log_z = log_partition(rbm, "ais", images=train)            # low in expectation
>>> top = log_partition(rbm, "raise", images=test[:100])       # high in expectation
>>> (-rbm.free_energy(test) - log_z.value).mean()              # nats per image

    "exact"  sums over images, or capsules, or switches, whichever are fewer.
    "ais"    anneals chains from independent pixels to the machine: E[w] = Z / Z_0.
    "raise"  anneals chains from given images back to independent pixels.

References:
    Neal 2001, "Annealed Importance Sampling". Salakhutdinov & Murray 2008, "On the Quantitative
    Analysis of Deep Belief Networks": AIS on the marginal of x, from the data's base rates, with
    14,500 temperatures denser towards 1. Burda, Grosse & Salakhutdinov 2015, "Accurate and
    Conservative Estimates of MRF Log-likelihood Using Reverse Annealing": the reverse direction.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data.progress import track
from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.inference.energy.enumeration import check_normalizable, exact_log_partition
from capsule_zoo.inference.energy.tempering import TemperedRBM
from capsule_zoo.inference.functions import require_model
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.models.capsule_rbm import CapsuleRBM
from capsule_zoo.models.checks import check_one_of, check_whole
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.models.common.spaces import tile_batch
from capsule_zoo.models.units.exponential_family import base_rates

METHODS = ("exact", "ais", "raise")


class LogPartition(NamedTuple):
    """The log partition function of exp(-E), in nats.

    Attributes:
        value: the number or its estimate.
        standard_error: 0 where exact.
        direction: "exact", "low" or "high", the direction of the error in expectation.
    """

    value: float
    standard_error: float
    direction: str


@require_model
@accept_arrays("images", like="model")
def log_partition(
    model: CapsuleRBM,
    method: str = "exact",
    *,
    images: Tensor | None = None,
    chains: int = 100,
    temperatures: int = 14_500,
    seed: int = 0,
) -> LogPartition:
    """Compute log Z of a `CapsuleRBM` or an `RBM`, in nats.

    Args:
        method: "exact", "ais" or "raise".
        images: (N, C, H, W). For "ais", training images: chains start from their mean, or from the
            visible biases if no images are given. For "raise", images that the model has not seen:
            chains start at the first `chains` of them, several at each image if there are fewer.
        chains: number of annealing chains, all in one batch.
        temperatures: number of annealing steps.
        seed: seed of the chains; torch's random state is left as it was.

    Returns:
        The value, its standard error over chains ("raise": over images), and its direction.
        "raise" is the mean over images of an estimate. Inserted into log p(x) = -F(x) - log Z, it
        makes the mean log-likelihood of these same images a lower bound in expectation. This holds
        for the annealed machine, and for the machine itself if the images are draws from it.

    Raises:
        ValueError: an unknown method, a number below 1, "raise" without images, "exact" on machines
            with more than 2^25 states on each side, a machine without a partition function.
    """
    check_one_of("method", method, METHODS)
    check_whole(1, chains=chains, temperatures=temperatures)
    check_normalizable(model)
    if images is not None:
        images = images.to(model.weight)
        model.space.check(images)
    with isolated_parameters(model), use_seed(seed), torch.no_grad():
        if method == "exact":
            return LogPartition(exact_log_partition(model).item(), 0.0, "exact")
        betas = annealing_schedule(temperatures).tolist()
        offset = None if images is None else base_rates(model.visible, images) - model.visible.bias
        machine = TemperedRBM(model, offset)
        if method == "ais":
            return _ais(machine, chains, betas)
        if images is None:
            raise ValueError('method="raise" needs images to start from; give held-out images')
        return _raise(machine, images, chains, betas)


def annealing_schedule(temperatures: int) -> Tensor:
    """Return inverse temperatures from 0 to 1, (temperatures + 1,), denser towards 1.

    The proportions are from Salakhutdinov and Murray: 500 to .5, 4,000 to .9 and 10,000 to 1.
    """
    steps = np.linspace(0, 14_500, temperatures + 1)
    return torch.from_numpy(np.interp(steps, [0, 500, 4_500, 14_500], [0, 0.5, 0.9, 1]))


def _ais(machine: TemperedRBM, chains: int, betas: list[float]) -> LogPartition:
    log_weight = _anneal(machine, machine.base_images(chains), betas)
    spread = (log_weight - log_weight.logsumexp(0)).exp()  # fractions of the total weight
    error = spread.std().item() * math.sqrt(chains) if chains > 1 else math.inf
    value = machine.log_base_partition() + log_weight.logsumexp(0) - math.log(chains)
    return LogPartition(value.item(), error, "low")


def _raise(machine: TemperedRBM, images: Tensor, chains: int, betas: list[float]) -> LogPartition:
    starts = images[:chains]
    repeats = max(1, chains // len(starts))
    log_weight = _anneal(machine, tile_batch(starts, repeats), betas[::-1])
    per_image = log_weight.view(repeats, -1).logsumexp(0) - math.log(repeats)  # log of Z_0 / Z
    value = machine.log_base_partition() - per_image.mean()
    error = per_image.std().item() / math.sqrt(len(starts)) if len(starts) > 1 else math.inf
    return LogPartition(value.item(), error, "high")


def _anneal(machine: TemperedRBM, images: Tensor, betas: list[float]) -> Tensor:
    """Anneal chains in the order of `betas`, and return their log weights, (chains,) in float64."""
    fields = machine.model.fields(images)
    distribution = machine.posterior(fields, betas[0])
    log_weight = torch.zeros(len(images), dtype=torch.float64, device=images.device)
    for before, after in track([*pairwise(betas)], "annealing", "temperatures"):
        energy = machine.free_energy(images, distribution, before)
        distribution = machine.posterior(fields, after)
        log_weight += energy - machine.free_energy(images, distribution, after)
        images = machine.draw_images(distribution, after)
        fields = machine.model.fields(images)
        distribution = machine.posterior(fields, after)
    return log_weight
