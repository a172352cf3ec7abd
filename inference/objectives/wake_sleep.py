"""Wake-sleep and reweighted wake-sleep, for any pair of a directed model and a guide.

    wake    latents from the guide on images; the model learns to make both
    sleep   images and latents from the model; the guide learns to recognize them

Reweighted wake-sleep draws K particles for each image. In the wake phase of both model and guide it
weighs them by w_k, the fraction of p(x, z_k) / q(z_k | x) among the particles of the image:

    model   descends  -sum_k w_k log p(x, z_k)
    guide   descends  -(1 - sleep) sum_k w_k log q(z_k | x)  -  sleep log q(z | x),  (z, x) sampled

The value of either objective is a negated bound, so rows of one table can be compared: the negated
ELBO for wake-sleep, the negated IWAE of K particles for the reweighted kind. The gradient is not
the gradient of the bound; it is the one given above.

References:
    Hinton, Dayan, Frey & Neal 1995, "The Wake-Sleep Algorithm for Unsupervised Neural Networks".
    Bornschein & Bengio 2015, "Reweighted Wake-Sleep" (ICLR). Li & Zhu 2019, "Capsule Generative
    Models": the sleep phase that starts at the wake phase's top layer.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from capsule_zoo.inference.check import is_discrete
from capsule_zoo.inference.log_weight import call_arguments, log_density, only
from capsule_zoo.inference.objectives.base import Objective, repeat_batch, with_gradient
from capsule_zoo.inference.objectives.importance_weighted import log_mean_exp
from capsule_zoo.models.checks import check_whole
from capsule_zoo.models.common.spaces import observed_node


class WakeSleep(Objective):
    """The wake-sleep algorithm with one draw for each image.

    Args:
        recycle_top: start the sleep phase at the top layer that the wake phase has recognized, as
            the paper does; the model must name these sites (`top_sites`). Otherwise it starts at
            the prior: the classical algorithm, which is far better after pre-training.

    Raises:
        ValueError: on use, `recycle_top` and a model without `top_sites`.
    """

    is_bound = True

    def __init__(self, recycle_top: bool = True) -> None:
        super().__init__()
        self.recycle_top = recycle_top

    def differentiable_loss(
        self, model: nn.Module, guide: nn.Module, images: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Return the negated ELBO of one draw, in nats per image, with the wake-sleep gradient."""
        recognized, log_p, log_q = wake(model, guide, images, labels)
        value = (log_q - log_p).mean()
        start = only(recognized, top_sites(model)) if self.recycle_top else Trace()
        dreamt = sleep(model, guide, start, images, labels)
        return descending(value, {model: -log_p.mean(), guide: -dreamt})


class ReweightedWakeSleep(Objective):
    """The reweighted wake-sleep algorithm with weights normalized for each image.

    (Pyro's own objective of this name weighs whole batches.)

    Args:
        num_particles: K, the number of draws for each image.
        sleep: fraction of the sleep phase in the guide's gradient, from 0 to 1.

    Raises:
        ValueError: a number out of range.
    """

    is_bound = True

    def __init__(self, num_particles: int = 5, sleep: float = 0.5) -> None:
        super().__init__()
        check_whole(1, num_particles=num_particles)
        if not 0 <= sleep <= 1:
            raise ValueError(f"sleep must be from 0 to 1, not {sleep!r}")
        self.num_particles = num_particles
        self.sleep = sleep

    def differentiable_loss(
        self, model: nn.Module, guide: nn.Module, images: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Return the negated IWAE of K particles, in nats per image, with the gradients above."""
        count, size = self.num_particles, len(images)
        _, log_p, log_q = wake(model, guide, *repeat_batch(images, labels, count))
        log_weight = (log_p - log_q).detach().view(count, size)
        fraction = log_weight.softmax(0).flatten() / size
        value = -log_mean_exp(log_weight).mean()
        recognize = -(1 - self.sleep) * (fraction * log_q).sum()
        if self.sleep:
            recognize = recognize - self.sleep * sleep(model, guide, Trace(), images, labels)
        generate = -(fraction * log_p).sum()
        return descending(value, {model: generate, guide: recognize})


def wake(
    model: nn.Module, guide: nn.Module, images: Tensor, labels: Tensor | None = None
) -> tuple[Trace, Tensor, Tensor]:
    """Sample the guide, with samples held constant; return log p(x, z) and log q(z | x), (B,)."""
    arguments = call_arguments(images, labels)
    with _Constant():
        drawn = poutine.trace(guide).get_trace(*arguments)
    scored = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*arguments)
    return drawn, log_density(scored, images), log_density(drawn, images)


def sleep(
    model: nn.Module, guide: nn.Module, start: Trace, images: Tensor, labels: Tensor | None = None
) -> Tensor:
    """Return the mean of log q(z | x) over samples (z, x) of the model, one per image, in nats.

    Args:
        start: values of the sites from which sampling starts; the model draws the rest.
    """
    with torch.no_grad(), poutine.block():
        program = poutine.trace(poutine.replay(model, trace=start))
        dream = program.get_trace(None, labels, batch_size=len(images))
    samples = dream.nodes["_RETURN"]["value"]
    bounded = is_discrete(observed_node(dream, model)["fn"])
    # Gaussian pixels of samples may leave the range that the guide accepts
    with nullcontext() if bounded else pyro.validation_enabled(False):
        trace = poutine.trace(poutine.replay(guide, trace=dream)).get_trace(
            *call_arguments(samples, labels)
        )
    return log_density(trace, samples).mean()


def top_sites(model: nn.Module) -> Iterable[str]:
    """Return the sites from which the model samples all others; ValueError if it names none."""
    sites = getattr(model, "top_sites", None)
    if sites is None:
        raise ValueError(
            f"recycle_top=True needs a model that names its top_sites, and {type(model).__name__} "
            "does not; use recycle_top=False"
        )
    return sites


class _Constant(Messenger):
    """The messenger that detaches every sample from the parameters."""

    def _pyro_post_sample(self, msg: Any) -> None:
        if not msg["is_observed"]:
            msg["value"] = msg["value"].detach()


def descending(value: Tensor, losses: Mapping[nn.Module, Tensor]) -> Tensor:
    """Return a value with the gradient of each loss in its own module's parameters only."""
    parameters: list[Tensor] = []
    gradients: list[Tensor | None] = []
    for module, loss in losses.items():
        module_parameters = [p for p in module.parameters() if p.requires_grad]
        if module_parameters and torch.is_grad_enabled():
            parameters += module_parameters
            gradients += torch.autograd.grad(loss, module_parameters, allow_unused=True)
    return with_gradient(value, parameters, gradients)
