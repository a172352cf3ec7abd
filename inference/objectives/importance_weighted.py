"""The importance-weighted bound (IWAE), which becomes tighter as the number of particles grows.

K particles z_k ~ q(z | x) are drawn for each image, with weights w_k = p(x, z_k) / q(z_k | x):

    L_K = E log (1/K) sum_k w_k,        ELBO = L_1 <= L_2 <= ... <= log p(x)

Renyi's bound of order alpha takes a power mean of the weights instead of their mean:

    L_K(alpha) = E 1/(1-alpha) log (1/K) sum_k w_k^(1-alpha),    L_K(0) = L_K,    L_K(1) = ELBO

It falls as alpha rises, so that every order from 0 on is a lower bound. The mean is taken image by
image. (Pyro's `RenyiELBO` agrees where every site lies in the plate of images; otherwise it takes
one mean over the whole batch.)

Draws that can be reparametrized are differentiated through. For all other draws, such as presences,

    (log (1/K) sum_j w_j - b_k) log q(z_k | x),    b_k = this log, w_k replaced by the
                                                         geometric mean of the other weights

is added for each particle, with the first factor held constant. The baseline b_k does not depend on
z_k, so the gradient stays unbiased.

References:
    Burda, Grosse & Salakhutdinov 2016, "Importance Weighted Autoencoders" (ICLR), equation 8.
    Li & Turner 2016, "Renyi Divergence Variational Inference" (NeurIPS), equation 5 and theorem 1.
    Mnih & Rezende 2016, "Variational Inference for Monte Carlo Objectives" (ICML): the baseline
    b_k, which is zero for one particle.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from capsule_zoo.inference.check import latent_sites
from capsule_zoo.inference.log_weight import log_density, log_weights, only
from capsule_zoo.inference.objectives.base import Objective, repeat_batch
from capsule_zoo.models.checks import check_at_least, check_whole


class ImportanceWeightedELBO(Objective):
    """The negated importance-weighted bound of K particles for each image, in nats per image.

    Sites that the model enumerates are summed out exactly within each weight. With a guide that
    has a Delta over a continuous site the value is not a bound, because such a guide has no density
    there.

    Args:
        num_particles: K, the number of draws for each image; 1 gives the ELBO.
        vectorize_particles: True draws all particles in one call, in which the batch contains
            every image K times. False calls the pair K times, which guides with parameters for
            each image need (`FreeForm`, Pyro's AutoGuides).
        alpha: the order of Renyi's bound, 0 or more: 0 is the importance-weighted bound, 1 the
            ELBO, and what lies between weighs the best draws less.

    Raises:
        ValueError: fewer than one particle, or a negative order, which is not a lower bound.
    """

    is_bound = True

    def __init__(
        self, num_particles: int = 5, vectorize_particles: bool = True, alpha: float = 0.0
    ) -> None:
        super().__init__()
        check_whole(1, num_particles=num_particles)
        check_at_least(0, alpha=alpha)
        self.alpha = alpha
        self.num_particles = num_particles
        self.vectorize_particles = vectorize_particles

    def differentiable_loss(
        self, model: Callable, guide: Callable, images: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Return the negated bound, in nats per image, with an unbiased gradient."""
        count = self.num_particles
        if self.vectorize_particles:
            log_weight, score = _draw(model, guide, *repeat_batch(images, labels, count))
        else:
            draws = [_draw(model, guide, images, labels) for _ in range(count)]
            log_weight, score = (torch.cat(part) for part in zip(*draws, strict=True))
        log_weight, score = log_weight.view(count, -1), score.view(count, -1)  # (K, B)
        bound = log_power_mean(log_weight, self.alpha).mean()
        if not score.requires_grad:  # everything was reparametrized
            return -bound
        credit = (score_credit(log_weight, self.alpha) * score).sum(0).mean()
        return -(bound + credit - credit.detach())


def log_mean_exp(log_weight: Tensor) -> Tensor:
    """Return the log of the mean weight over the first dim, without overflow."""
    return log_weight.logsumexp(0) - math.log(len(log_weight))


def log_power_mean(log_weight: Tensor, alpha: float = 0.0) -> Tensor:
    """Return the log of the power mean of order 1 - alpha over the first dim; see the top."""
    if alpha == 1:
        return log_weight.mean(0)
    return log_mean_exp((1 - alpha) * log_weight) / (1 - alpha)


def score_credit(log_weight: Tensor, alpha: float = 0.0) -> Tensor:
    """Return the constant factor of each particle's log q in the gradient, (K, B).

    The factor is the difference of the two logs plus 1/K. The term 1/K compensates, on
    average, for the gradient of the weight itself. With one particle the factor is the log weight
    alone, as in Pyro's `Trace_ELBO`.

    Args:
        log_weight: (K, B).
        alpha: the order of the bound.
    """
    log_weight = log_weight.detach()
    count = len(log_weight)
    bound = log_power_mean(log_weight, alpha)
    if count == 1:
        return bound[None] + 1.0
    others = (log_weight.sum(0) - log_weight) / (count - 1)  # log of the others' geometric mean
    diagonal = torch.eye(count, dtype=torch.bool, device=log_weight.device)[..., None]
    replaced = torch.where(diagonal, others[:, None], log_weight)  # (left out, K, B)
    return bound - log_power_mean(replaced.transpose(0, 1), alpha) + 1.0 / count


def _draw(
    model: Callable, guide: Callable, images: Tensor, labels: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return log weights, and log q of the samples without reparametrization, (B,) each."""
    log_weight, _, drawn = log_weights(model, guide, images, labels)
    sites = [n for n, site in latent_sites(drawn).items() if not site["fn"].has_rsample]
    score = log_density(only(drawn, sites), images) if sites else torch.zeros_like(log_weight)
    return log_weight, score
