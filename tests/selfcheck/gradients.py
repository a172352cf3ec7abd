"""Gradient checks: averaged over many draws, each objective's gradient equals the exact one.

Images are few and every latent is listed or integrated, so both the loss and its gradient are
known. A batch holds many copies of each image, which makes the mean over a batch nearly normal.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from checks import check
from machines import binary, list_states, randomized
from means import compare_mean
from pyro import distributions as dist
from pyro import plate, sample
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from torch import Tensor, nn

from capsule_zoo.guides import PartWholeGuide, RecognitionMachine
from capsule_zoo.guides.base import Guide
from capsule_zoo.inference import (
    ImportanceWeightedELBO,
    ReweightedWakeSleep,
    WakeSleep,
    loss_per_image,
)
from capsule_zoo.inference.calibration import Outcome
from capsule_zoo.inference.objectives.score_function import ScoreFunctionELBO
from capsule_zoo.inference.objectives.thermodynamic import ThermodynamicObjective
from capsule_zoo.models import CapsuleHelmholtzMachine, PartWholeCapsules
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.parts.parent_selection import LogitRelaxedBernoulli
from capsule_zoo.settings import configure

COPIES = 128  # of every image in a batch; with fewer, rare states skew the mean


def slopes_agree(
    estimate: Callable[[], Tensor], exact: Tensor, modules: Sequence[nn.Module], number: int
) -> Outcome:
    """Compare the gradients of `number` estimates of a loss with the gradient of the exact loss."""
    parameters = [p for module in modules for p in module.parameters()]

    def slope(loss: Tensor) -> Tensor:
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        pairs = zip(grads, parameters, strict=True)
        return torch.cat([(p.new_zeros(p.shape) if g is None else g).flatten() for g, p in pairs])

    wanted = slope(exact)
    return compare_mean(torch.stack([slope(estimate()) for _ in range(number)]), wanted)


def estimates(
    objective: ELBO, model: Model, guide: Guide, images: Tensor, copies: int = COPIES
) -> Callable[[], Tensor]:
    """Return a function that draws an objective's loss on a batch of copies, in nats per image."""
    batch = images.repeat(copies, 1, 1, 1)
    return lambda: loss_per_image(objective, model, guide, batch)


def negative_elbo(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute the negative ELBO from all states, (states, B), in nats per image."""
    return (log_q.exp() * (log_q - log_p)).sum(0).mean()


# Directed models with binary latents, all of whose states are listed


def helmholtz(
    capsules: tuple[int, ...] = (1, 2), scale: float = 0.5
) -> tuple[CapsuleHelmholtzMachine, RecognitionMachine, Tensor]:
    """Return a machine with few states, its guide, and all eight images of three pixels."""
    model = randomized(CapsuleHelmholtzMachine((1, 1, 3), capsules, 1), scale)
    return model, randomized(RecognitionMachine(model), scale), binary(1, 1, 3)


@check(
    "gradient_elbo_score_function",
    of=[ScoreFunctionELBO],
    objective=ScoreFunctionELBO(2),
    capsules=(1, 3),
)
@check("gradient_elbo_discrete", of=[Trace_ELBO], objective=Trace_ELBO(), capsules=(1, 1))
@check(
    "gradient_elbo_across_plates",
    of=[Trace_ELBO],
    objective=Trace_ELBO(),
    capsules=(1, 3),
    scale=1.0,
    copies=4 * COPIES,
    fraction=0.25,
    approximate=True,
)
def elbo_discrete(number: int, objective: ELBO, copies: int = COPIES, **sizes: Any) -> Outcome:
    """Check score function estimators for binary latents.

    Pyro's estimator assumes that the capsules of one plate are independent given the sites outside
    the plate. In recognition these outer sites are drawn from all capsules of the plate, so the
    estimator is biased with two capsules or more.
    """
    model, guide, images = helmholtz(**sizes)
    images = images[1:4]
    _, log_p, log_q = list_states(model, guide, images)
    losses = estimates(objective, model, guide, images, copies)
    return slopes_agree(losses, negative_elbo(log_p, log_q), (model, guide), number)


@check("gradient_wake_sleep", of=[WakeSleep], recycle_top=False)
@check("gradient_wake_sleep_recycled", of=[WakeSleep], recycle_top=True)
def wake_sleep(number: int, recycle_top: bool) -> Outcome:
    """Check wake-sleep: -E_q log p for the model, -E_sample log q for the guide."""
    model, guide, every = helmholtz()
    images = every[1:4]
    _, log_p, log_q = list_states(model, guide, images)
    wake = -(log_q.exp().detach() * log_p).sum(0).mean()
    asleep = _asleep(model, guide, every, log_q.exp().detach() if recycle_top else None)
    exact = _apart(model, guide, wake, asleep)
    losses = estimates(WakeSleep(recycle_top), model, guide, images)
    return slopes_agree(losses, exact, (model, guide), number)


@check("gradient_reweighted_wake_sleep", of=[ReweightedWakeSleep])
def reweighted(number: int) -> Outcome:
    """Check reweighted wake-sleep with two particles, over all pairs of states."""
    model, guide, every = helmholtz()
    images, sleep = every[1:4], 0.3
    _, log_p, log_q = list_states(model, guide, images)
    weight, chance = (log_p - log_q).detach().exp(), log_q.exp().detach()
    # E[fraction of a state in the pair's weight | it is in the pair], for either member
    fraction = torch.einsum("tb,stb->sb", chance, weight[:, None] / (weight[:, None] + weight))
    expected = 2 * chance * fraction
    wake, recognize = (-(expected * terms).sum(0).mean() for terms in (log_p, log_q))
    asleep = _asleep(model, guide, every)
    exact = _apart(model, guide, wake, (1 - sleep) * recognize + sleep * asleep)
    losses = estimates(ReweightedWakeSleep(2, sleep), model, guide, images)
    return slopes_agree(losses, exact, (model, guide), number)


@check("gradient_importance_weighted", of=[ImportanceWeightedELBO])
def importance_weighted(number: int) -> Outcome:
    """Check the importance-weighted bound of two particles, over all pairs of states."""
    model, guide, every = helmholtz()
    images = every[1:4]
    _, log_p, log_q = list_states(model, guide, images)
    log_weight = log_p - log_q
    bound = torch.logaddexp(log_weight, log_weight[:, None]) - math.log(2)  # (states, states, B)
    chance = log_q.exp()
    exact = -torch.einsum("sb,tb,stb->b", chance, chance, bound).mean()
    losses = estimates(ImportanceWeightedELBO(2), model, guide, images)
    return slopes_agree(losses, exact, (model, guide), number)


@check("gradient_thermodynamic", of=[ThermodynamicObjective])
def thermodynamic(number: int) -> Outcome:
    """Check the thermodynamic objective with two particles, over all pairs of states.

    Of a pair, the fraction of a state is the logistic function of a difference of logits.
    """
    model, guide, every = helmholtz()
    images = every[1:4]
    _, log_p, log_q = list_states(model, guide, images)
    chance, log_weight = log_q.exp().detach(), log_p - log_q
    objective = ThermodynamicObjective(2, intervals=3, first=0.2)
    bound = torch.zeros(()).double()
    for begin, end in pairwise(objective.points):
        logits = begin * log_p + (1 - begin) * log_q - log_q.detach()  # (states, B)
        fraction = (logits[:, None] - logits).sigmoid()  # (states, states, B)
        mean = fraction * log_weight[:, None] + (1 - fraction) * log_weight
        bound = bound + (end - begin) * torch.einsum("sb,tb,stb->b", chance, chance, mean).mean()
    losses = estimates(objective, model, guide, images)
    return slopes_agree(losses, -bound, (model, guide), number)


def _asleep(
    model: CapsuleHelmholtzMachine,
    guide: RecognitionMachine,
    every: Tensor,
    recognized: Tensor | None = None,
) -> Tensor:
    """Return -E log q(z | x) over model samples, from the prior or from recognized top states.

    Args:
        every: all images, (X, C, H, W).
        recognized: q(z | x), (states, B); if given, samples start at its states of the top layer.
    """
    values, log_p, log_q = list_states(model, guide, every)
    dream = log_p.exp().detach()  # p(z, x), (states, X)
    if recognized is not None:
        top = torch.cat([values[name].flatten(1) for name in model.top_sites], 1)
        same = (top[:, None] == top).all(-1).double()
        dream = dream * ((same @ recognized.mean(1)) / (same @ dream.sum(1)))[:, None]
    return -(dream * log_q).sum()


def _apart(model: nn.Module, guide: nn.Module, of_model: Tensor, of_guide: Tensor) -> Tensor:
    """Return a loss whose gradient is `of_model`'s for the model and `of_guide`'s for the guide."""
    total = torch.zeros(()).double()
    for module, loss in ((model, of_model), (guide, of_guide)):
        parameters = list(module.parameters())
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(grads, parameters, strict=True)
        total = total + sum((g * p).sum() for g, p in pairs if g is not None)
    return total


def part_whole(pose: str, **options: Any) -> tuple[PartWholeCapsules, PartWholeGuide, Tensor]:
    """Return a model of two objects and a part, a guide in evaluation mode, and two images."""
    sizes: dict[str, Any] = dict(
        template_size=3, image_shape=(1, 5, 5), sigma_image=1.0, sigma_min=0.05
    )
    model = configure(PartWholeCapsules, objects=2, parts=1, **sizes, **options).double()
    small: dict[str, Any] = dict(channels=2, width=4, heads=1, blocks=1, inducing=2)
    guide = configure(PartWholeGuide, model, pose, **small).double().eval()
    return model, guide, torch.rand(2, 1, 5, 5).double()


@check("gradient_elbo_parents_summed", of=[Trace_ELBO], selection="marginal", fraction=0.5)
@check(
    "gradient_enum_across_plates",
    of=[TraceEnum_ELBO],
    selection="enumerate",
    fraction=0.25,
    approximate=True,
)
def elbo_of_parts(number: int, selection: str) -> Outcome:
    """Check the ELBO of a part-whole model: discrete presences, point poses, parents summed out.

    With enumeration Pyro credits a draw only with terms that are scored inside its own plates. A
    randomly drawn presence is therefore not credited with the effect of its part on the image.
    """
    model, guide, images = part_whole("delta", selection=selection, presence="discrete")
    _, log_p, log_q = list_states(model.with_selection("marginal"), guide, images)
    objective = Trace_ELBO() if selection == "marginal" else TraceEnum_ELBO(max_plate_nesting=2)
    losses = estimates(objective, model, guide, images)
    return slopes_agree(losses, negative_elbo(log_p, log_q), (model, guide), number)


@check("gradient_elbo_parents_enumerated", of=[TraceEnum_ELBO], fraction=0.1)
def enumerated(number: int) -> Outcome:
    """Check that parents enumerated by Pyro and summed out by hand give the same gradient.

    Presences are relaxed and poses normal, as in training. Under the same noise the difference is
    zero.
    """
    model, guide, images = part_whole("normal", selection="enumerate")
    by_hand = estimates(Trace_ELBO(), model.with_selection("marginal"), guide, images)
    by_pyro = estimates(TraceEnum_ELBO(max_plate_nesting=2), model, guide, images)

    def difference() -> Tensor:
        noise = torch.get_rng_state()
        first = by_pyro()
        torch.set_rng_state(noise)
        return first - by_hand()

    return slopes_agree(difference, 0 * by_hand(), (model, guide), number)


# Continuous latents, integrated


class Brightness(Model):
    """A model of one number z per image, with three pixels ~ Normal(f(z), .7).

    Args:
        relaxed: z is the logit of a relaxed presence of probability .6, and f the logistic
            function; otherwise z ~ Normal(mean, 1) and f(z) = z.
    """

    sites = (Site("code", ("images",)),)
    space = ImageSpace((1, 1, 3), (-math.inf, math.inf))
    noise = 0.7

    def __init__(self, relaxed: bool) -> None:
        super().__init__()
        self.relaxed = relaxed
        self.mean = nn.Parameter(torch.tensor(0.4).double())

    def distribution(self, mean: Tensor, log_scale: Tensor) -> dist.TorchDistribution:
        """Return the code's distribution; the scale of a relaxed presence sets its temperature."""
        if self.relaxed:
            return LogitRelaxedBernoulli(0.7 * log_scale.exp(), logits=mean)
        return dist.Normal(mean, log_scale.exp())

    def log_likelihood(self, code: Tensor, images: Tensor) -> Tensor:
        """Compute log p(image | code) of codes (..., B)."""
        mean = (code.sigmoid() if self.relaxed else code)[..., None]
        return dist.Normal(mean, self.noise).log_prob(images.flatten(1)).sum(-1)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        with plate("images", len(images), dim=-1):
            code = sample("code", self.distribution(self.mean, torch.zeros(()).double()))
            mean = code.sigmoid() if self.relaxed else code
            distribution = dist.Normal(mean[:, None, None, None].expand(-1, 1, 1, 3), self.noise)
            return sample("image", distribution.to_event(3), obs=images)


class BrightnessGuide(Guide):
    """A guide q(code | image): the model's family at slope * (mean of the image) + offset."""

    covers = ("code",)

    def __init__(self, model: Brightness) -> None:
        super().__init__(model)
        self.slope, self.offset, self.log_scale = (
            nn.Parameter(torch.tensor(value).double()) for value in (0.5, 0.1, -0.3)
        )

    def distribution(self, images: Tensor) -> dist.TorchDistribution:
        """Return the distribution of the code, of batch shape (B,)."""
        return self.model.distribution(
            self.slope * images.mean((1, 2, 3)) + self.offset, self.log_scale
        )

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        with plate("images", len(images), dim=-1):
            return sample("code", self.distribution(images))


@check("gradient_elbo_normal", of=[Trace_ELBO], objective=Trace_ELBO(), relaxed=False)
@check(
    "gradient_elbo_analytic",
    of=[TraceMeanField_ELBO],
    objective=TraceMeanField_ELBO(),
    relaxed=False,
)
@check(
    "gradient_elbo_relaxed",
    of=[Trace_ELBO, LogitRelaxedBernoulli],
    objective=Trace_ELBO(),
    relaxed=True,
)
def elbo_continuous(number: int, objective: ELBO, relaxed: bool) -> Outcome:
    """Check reparametrized draws against an integral over a grid, accurate up to rounding."""
    model = Brightness(relaxed)
    guide, images = BrightnessGuide(model), torch.rand(3, 1, 1, 3).double()
    width = 0.01
    code = torch.arange(-80, 80, width, dtype=torch.float64)[:, None]  # (grid, 1)
    log_q = guide.distribution(images).log_prob(code)
    log_prior = model.distribution(model.mean, torch.zeros(()).double()).log_prob(code)
    log_p = log_prior + model.log_likelihood(code, images)
    exact = width * negative_elbo(log_p, log_q)
    return slopes_agree(estimates(objective, model, guide, images), exact, (model, guide), number)
