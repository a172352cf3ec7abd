"""Calibration of routings: checks of the assignments of children to parents, given the votes."""

import math
from typing import NamedTuple

import pyro.distributions as dist
import torch
from checks import check
from machines import DRAWS, at
from posteriors import choices_calibrated
from pyro.infer import TraceEnum_ELBO
from torch import Tensor

from capsule_zoo.guides import DynamicRouting, EMRouting, VBRouting
from capsule_zoo.inference.calibration import Outcome, rank_uniformity, sbc_ranks
from capsule_zoo.models import SwitchableGaussians
from capsule_zoo.models.routing.parent_distribution import Belief, ParentDistribution, Routing
from capsule_zoo.models.routing.votes import Votes

CHILDREN, PARENTS, SIZE = 4, 3, 1
HALF_WIDTH, REACH, SCALE, NOISE = 6.0, 1.5, 0.8, 0.1


class World(NamedTuple):
    """A batch of N draws of a layer of switchable Gaussians.

    Votes for absent parents and for parents that the child did not choose are uniform over a box. A
    vote for a chosen parent that is present is drawn from the parent's Gaussian.

    Attributes:
        presence: 1 for parents that are present, else 0, (N, J).
        mean: means of the parents' Gaussians, (N, J, D); their variance is the same for all.
        parents: parent of each child, (N, I).
        votes: votes of the children, (N, I, J, D).
    """

    presence: Tensor
    mean: Tensor
    parents: Tensor
    votes: Tensor

    @property
    def apart(self) -> Tensor:
        """The squared distances of votes from means, (N, I, J)."""
        return (self.votes - self.mean[:, None]).square().sum(-1)


def draw_world(number: int) -> World:
    """Draw from the prior; vote noise makes the choice of a present parent less likely."""
    presence = torch.rand(number, PARENTS).double().lt(0.7).double()
    mean = REACH * (2 * torch.rand(number, PARENTS, SIZE).double() - 1)
    weight = presence * math.exp(-SIZE * NOISE / (2 * SCALE**2)) + (1 - presence)
    parents = dist.Categorical(weight).sample((CHILDREN,)).T
    box = HALF_WIDTH * (2 * torch.rand(number, CHILDREN, PARENTS, SIZE).double() - 1)
    drawn = mean[:, None] + SCALE * torch.randn_like(box)
    claims = torch.nn.functional.one_hot(parents, PARENTS) * presence[:, None]  # (N, I, J)
    return World(presence, mean, parents, torch.where(claims[..., None] > 0, drawn, box))


def parent_distribution() -> ParentDistribution:
    """Return the distribution of the parents, in which beta_u is the log density of the box."""
    beta_u = torch.full((PARENTS,), -SIZE * math.log(2 * HALF_WIDTH)).double()
    return ParentDistribution(torch.zeros(PARENTS).double(), beta_u, noise=NOISE)


@check("sbc_em_e_step", of=[EMRouting], e_step="exact")
@check("sbc_em_e_step_paper", of=[EMRouting], e_step="paper", approximate=True)
def e_step(number: int, e_step: str) -> Outcome:
    """Check responsibilities at known parents; the paper's E step gives absent parents none."""
    world = draw_world(number)
    variance = torch.full_like(world.mean, SCALE**2)[:, None]
    logits = 200 * (world.presence - 0.5)[:, None]
    belief = Belief(torch.empty(0), world.mean[:, None], variance, logits)
    responsibilities = EMRouting(e_step=e_step).responsibilities(
        Votes.dense(world.votes), belief, parent_distribution()
    )
    return choices_calibrated(world.parents, responsibilities[:, 0].mT, world.apart)


@check("sbc_switchable_gaussians", of=[SwitchableGaussians, TraceEnum_ELBO])
def enumerated(number: int) -> Outcome:
    """Check the responsibilities that Pyro finds by enumerating the layer as a model."""
    world, rule = draw_world(number), parent_distribution()
    sizes = CHILDREN, PARENTS, SIZE
    layer = SwitchableGaussians(*sizes, beta_u=rule.beta_u[0].item(), noise=NOISE).double()
    values = {
        "parent_presence": world.presence,
        "parent_mean": world.mean,
        "parent_variance": torch.full_like(world.mean, SCALE**2),
        "child_presence": torch.ones_like(world.votes[..., 0, 0]),
    }
    guide = at(layer.sites, layer.plate_dims, values)
    elbo = TraceEnum_ELBO(max_plate_nesting=2)
    posterior = elbo.compute_marginals(layer, guide, world.votes)["child_parent"].probs
    return choices_calibrated(world.parents, posterior.detach(), world.apart)


@check("sbc_em_routing", of=[EMRouting], routing=EMRouting(3), approximate=True)
@check("sbc_vb_routing", of=[VBRouting], routing=VBRouting(3), approximate=True)
@check("sbc_dynamic_routing", of=[DynamicRouting], routing=DynamicRouting(3), approximate=True)
def whole_routing(number: int, routing: Routing) -> Outcome:
    """Check responsibilities after three iterations from votes alone, as if a posterior."""
    world = draw_world(number)
    responsibilities = routing(Votes.dense(world.votes), parent_distribution()).responsibility
    return choices_calibrated(world.parents, responsibilities[:, 0].mT, world.apart)


@check("sbc_vb_one_parent", of=[VBRouting])
def one_parent(number: int) -> Outcome:
    """Check variational Bayes for a single parent, where its Normal-Gamma posterior is exact."""
    routing = VBRouting(kappa=0.7, nu=5.0, psi=2.0)
    half = torch.full((number, 2), 0.5).double()
    precision = dist.Gamma(routing.nu * half, routing.psi * half).sample()
    mean = dist.Normal(0 * half, (routing.kappa * precision).rsqrt()).sample()
    values = dist.Normal(mean, precision.rsqrt()).sample((CHILDREN,)).transpose(0, 1)  # (N, I, D)
    votes = Votes.dense(values[:, :, None])
    q = routing.posterior(votes.gather(votes.uniform()), parent_distribution()._replace(noise=0.0))

    def quantities(mean: Tensor, precision: Tensor) -> Tensor:
        misfit = precision[..., None, :] * (values - mean[..., None, :]).square()
        likelihood = 0.5 * (CHILDREN * precision.log() - misfit.sum(-2))
        return torch.cat([mean, precision, likelihood], -1)

    drawn = dist.Gamma(q.shape[:, 0, 0].expand(-1, 2), q.rate[:, 0, 0]).sample((DRAWS,))
    center = q.mean[:, 0, 0] + torch.randn_like(drawn) * (q.kappa[:, 0, 0] * drawn).rsqrt()
    ranks = sbc_ranks(quantities(mean, precision), quantities(center, drawn))
    return rank_uniformity(ranks, DRAWS)
