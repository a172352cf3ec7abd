"""Checks of the gradients of contrastive divergence, against the likelihood and its own definition.

With chains that follow the model's distribution, the gradient is the gradient of the likelihood.
CD-k from the data does not have this gradient. It is compared with its own definition, in which
every transition of its k sweeps is listed. A second check reports how far CD-k is from the gradient
of the likelihood.
"""

from typing import Any

import torch
from checks import check
from gradients import estimates, slopes_agree
from machines import binary, energy_machine, exact_draws
from small_rbms import PAIRS, binary_images, log_masses
from torch import Tensor

from capsule_zoo.guides import ExactSwitches, MeanFieldSwitches
from capsule_zoo.inference import ContrastiveDivergence
from capsule_zoo.inference.calibration import Outcome
from capsule_zoo.inference.energy.contrastive_divergence import RunningMeans, centered_gradient
from capsule_zoo.models import CapsuleRBM

CHAINS = 256


def negative_log_likelihood(model: CapsuleRBM, images: Tensor) -> Tensor:
    """Return the mean of -log p(x), with Z summed by hand."""
    masses, every = log_masses(model, PAIRS[0])
    return masses.logsumexp(0) - masses[_rows(every, images)].mean()


def _rows(every: Tensor, images: Tensor) -> Tensor:
    """Return the index of each image in the list of all images, (B,)."""
    return (every.flatten(1)[None] == images.flatten(1)[:, None]).all(-1).long().argmax(1)


@check("gradient_cd_exact_negatives", of=[ContrastiveDivergence])
@check("gradient_cd_centered", of=[ContrastiveDivergence], centered=True)
@check("gradient_cd_sparsity", of=[ContrastiveDivergence], sparsity=0.5)
@check("gradient_cd_tempered", of=[ContrastiveDivergence], tempering=(1.0, 0.6, 0.2))
def persistent(number: int, **options: Any) -> Outcome:
    """Check that chains with the model's distribution give the gradient of the likelihood."""
    model, images = energy_machine(), binary_images()
    exact = negative_log_likelihood(model, images)
    if cost := options.get("sparsity"):
        exact = exact + cost * model.switch_probabilities(images).sum(1).mean()
    if options.get("centered"):
        means = RunningMeans()
        means.update(images, model.posterior(images))
        exact = centered_gradient(exact, model, means)
    guide = ExactSwitches(model)

    def estimate() -> Tensor:
        objective = ContrastiveDivergence(k=2, persistent=True, chains=CHAINS, **options)
        if levels := options.get("tempering"):
            start = torch.stack([exact_draws(model, CHAINS, beta)[1] for beta in levels])
            objective.load_state_dict({"images": start, "exchanges": torch.tensor(0)})
        else:
            state = model.posterior(exact_draws(model, CHAINS)[1]).sample()
            objective.load_state_dict({name: v.detach() for name, v in state._asdict().items()})
        return objective.differentiable_loss(model, guide, images)

    return slopes_agree(estimate, exact, [model], number)


@check("gradient_cd_1_itself", of=[ContrastiveDivergence], k=1)
@check("gradient_cd_3_itself", of=[ContrastiveDivergence], k=3)
def from_the_data(number: int, k: int) -> Outcome:
    """Check CD-k against its own definition, with negatives k sweeps from the data."""
    model, images = energy_machine(), binary_images()
    masses, every = log_masses(model, PAIRS[0])
    data = torch.bincount(_rows(every, images), minlength=len(every)).double() / len(images)
    negatives = data @ torch.matrix_power(_sweep(model), k)
    exact = ((negatives.detach() - data) * masses).sum()
    return _from_data(model, images, k, exact, number)


@check("gradient_cd_long_chains", of=[ContrastiveDivergence], k=30, scale=0.5, fraction=0.5)
@check("gradient_cd_1_as_likelihood", of=[ContrastiveDivergence], k=1, scale=1.2, approximate=True)
def as_likelihood(number: int, k: int, scale: float) -> Outcome:
    """Check CD-k against the likelihood: wrong for short chains, right for chains that mix."""
    model, images = energy_machine(scale=scale), binary_images()
    return _from_data(model, images, k, negative_log_likelihood(model, images), number)


def _from_data(model: CapsuleRBM, images: Tensor, k: int, exact: Tensor, number: int) -> Outcome:
    losses = estimates(ContrastiveDivergence(k), model, ExactSwitches(model), images)
    return slopes_agree(losses, exact, [model], number)


@torch.no_grad()
def _sweep(model: CapsuleRBM) -> Tensor:
    """Return p(x' | x) of a block Gibbs sweep, (X, X); all states, hidden units too, are listed."""
    capsules, units = model.weight.shape[1:]
    pixels = binary(*model.image_shape).flatten(1)
    states = torch.cartesian_prod(torch.arange(2**capsules), torch.arange(2 ** (capsules * units)))
    switch, hidden = binary(capsules)[states[:, 0]], binary(capsules, units)[states[:, 1]]
    active = (switch[..., None] * hidden).flatten(1)
    field = active @ model.weight.flatten(1).T + switch @ model.switch_weight.T
    log_bias = switch @ model.switch_bias + hidden.flatten(1) @ model.hidden.bias.flatten()
    log_mass = pixels @ (model.visible.bias.flatten() + field).T + log_bias  # (X, states)
    return log_mass.softmax(1) @ log_mass.softmax(0).T


@check("gradient_cd_mean_field", of=[ContrastiveDivergence, MeanFieldSwitches], approximate=True)
def mean_field(number: int) -> Outcome:
    """Check CD with the mean field's free energy of the data; it is expected to be off."""
    model, images = energy_machine(scale=1.2), binary_images()
    guide, objective = MeanFieldSwitches(model), ContrastiveDivergence(30)
    exact = negative_log_likelihood(model, images)
    return slopes_agree(estimates(objective, model, guide, images), exact, [model], number)
