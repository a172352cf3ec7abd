"""The ELBO with score-function gradients and baselines, for latents without reparametrization.

K particles are drawn for each image. The mean log weight of the other particles is subtracted from
each particle's log weight. This baseline adds no bias because it does not depend on the particle:

    -mean_k log p(x, z_k) + [log w_k - mean_{j != k} log w_j] log q(z_k | x)    z, log w constant

Model and guide both descend this loss, whether or not they share parameters. All latents of an
image are treated as one choice. (Pyro's `Trace_ELBO` credits a draw only with terms that may depend
on it. It assumes that the elements of a plate are independent of each other given everything
outside the plate. In a Helmholtz machine they are not, because a layer is drawn given all capsules
of another layer. There its gradient is biased: `make selfcheck` shows it.)

References:
    Williams 1992, "Simple Statistical Gradient-Following Algorithms" (REINFORCE). Kool, van Hoof &
    Welling 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (leave-one-out baselines).
"""

from torch import Tensor, nn

from capsule_zoo.inference.objectives.base import Objective, repeat_batch
from capsule_zoo.inference.objectives.wake_sleep import wake
from capsule_zoo.models.checks import check_whole


class ScoreFunctionELBO(Objective):
    """The ELBO with the score-function gradient at the top of this file, unbiased for all latents.

    Args:
        num_particles: K, the number of draws for each image.

    Raises:
        ValueError: fewer than two particles.
    """

    is_bound = True

    def __init__(self, num_particles: int = 5) -> None:
        super().__init__()
        check_whole(2, num_particles=num_particles)
        self.num_particles = num_particles

    def differentiable_loss(
        self, model: nn.Module, guide: nn.Module, images: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Return the negated ELBO, a mean over K draws for each image, in nats per image."""
        count = self.num_particles
        _, log_p, log_q = wake(model, guide, *repeat_batch(images, labels, count))
        log_weight = (log_p - log_q).detach().view(count, -1)
        others = (log_weight.sum(0) - log_weight) / (count - 1)
        credit = (log_weight - others).flatten()
        surrogate = -(log_p + credit * log_q).mean()
        return surrogate + (-log_weight.mean() - surrogate).detach()
