"""The thermodynamic variational objective, for any pair of a directed model and a guide.

Between the guide and the posterior lies a path of distributions, along which log p(x) is an
integral. Its left Riemann sum is a lower bound:

    pi_b(z) ~ p(x, z)^b q(z | x)^(1-b)                          # b from 0 to 1
    log p(x) = int_0^1 E_{pi_b}[log w] db,    log w = log p(x, z) - log q(z | x)
            >= sum_i (b_{i+1} - b_i) E_{pi_{b_i}}[log w],    0 = b_0 < b_1 < ... < b_P = 1

One interval gives the ELBO. Every expectation is taken over the same K draws z_k ~ q(z | x), with
the fractions s_k of w_k^b. Its gradient needs no reparametrization:

    gradient of E_{pi_b}[log w] = E_{pi_b}[gradient of log w]
                                  + Cov_{pi_b}(gradient of (b log p + (1-b) log q), log w)

This is the gradient of sum_k s_k log w_k if the draws are constants, with weights in proportion to
p^b q^(1-b) / q, where the denominator is a constant. For b = 0 the first term of the guide is zero
in expectation and is left out.

With K draws the sum over intervals is still a bound. It is at most log (1/K) sum_k w_k, which it
tends to as the intervals shrink: log (1/K) sum_k w_k^b is convex in b, and sum_k s_k log w_k is its
slope.

References:
    Masrani, Le & Wood 2019, "The Thermodynamic Variational Objective" (arXiv 1907.00031): the
    objective, the covariance gradient, and points that are equally far apart on a log scale.
"""

from itertools import pairwise

from torch import Tensor, nn

from capsule_zoo.inference.objectives.base import Objective, repeat_batch
from capsule_zoo.inference.objectives.wake_sleep import wake
from capsule_zoo.models.checks import check_whole


class ThermodynamicObjective(Objective):
    """The negated thermodynamic variational objective, in nats per image.

    Args:
        num_particles: K, the number of draws for each image.
        intervals: P, the number of intervals; with 1 the value is the negated ELBO.
        first: b_1, the smallest positive point; the others lie between it and 1, equally far apart
            on a log scale.

    Raises:
        ValueError: fewer than two particles, no interval, or `first` outside (0, 1).
    """

    is_bound = True

    def __init__(self, num_particles: int = 5, intervals: int = 5, first: float = 0.1) -> None:
        super().__init__()
        check_whole(2, num_particles=num_particles)  # one draw has no covariance
        check_whole(1, intervals=intervals)
        if not 0 < first < 1:
            raise ValueError(f"first must lie between 0 and 1, not {first!r}")
        self.num_particles = num_particles
        self.points = points(intervals, first)

    def differentiable_loss(
        self, model: nn.Module, guide: nn.Module, images: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Return the negated bound, in nats per image, with the covariance gradient."""
        count = self.num_particles
        _, log_p, log_q = wake(model, guide, *repeat_batch(images, labels, count))
        bound = thermodynamic_sum(log_p.view(count, -1), log_q.view(count, -1), self.points)
        return -bound.mean()


def points(intervals: int, first: float) -> list[float]:
    """Return the ends of the intervals, 0, `first`, ..., 1 (0 and 1 for one interval)."""
    if intervals == 1:
        return [0.0, 1.0]
    power = [1 - i / (intervals - 1) for i in range(intervals)]  # 1 .. 0
    return [0.0, *(first**exponent for exponent in power)]


def thermodynamic_sum(log_p: Tensor, log_q: Tensor, points: list[float]) -> Tensor:
    """Return the left Riemann sum of every image, (B,), with the covariance gradient.

    Args:
        log_p, log_q: log p(x, z_k) and log q(z_k | x) of constant draws, (K, B), in nats.
        points: ends of the intervals, from 0 to 1.
    """
    total = log_p.new_zeros(log_p.shape[1])
    for begin, end in pairwise(points):
        fraction = (begin * log_p + (1 - begin) * log_q - log_q.detach()).softmax(0)
        log_weight = log_p - (log_q if begin else log_q.detach())
        total = total + (end - begin) * (fraction * log_weight).sum(0)
    return total
