"""Routing as a guide: EM on the model's transformations, not a network, infers objects.

Every part votes for the pose of each parent, and every parent gathers the votes of its parts. This
is coordinate ascent on the model's own log joint. Its steps are exactly the classic steps of
routing:

    E step       r_ij = p(s_i = j | t, A)
    M step       A_j  = argmin_A sum_i r_ij |A_i - A (I + M_ij)|^2 / sigma_ij^2 + |A - I|^2 / s^2
    activation   logit t_j = logit pi_j + log p(children | t_j = 1) - log p(children | t_j = 0)

The M step weights the votes A_i (I + M_ij)^{-1} as the model does, in the children's frame. It is a
ridge regression with a closed form. For a prior with several rotations it uses the identity only.

References:
    Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing"; votes as in Smith, Schut, Gal &
    van der Wilk 2020 (arXiv 2004.03553).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor

from capsule_zoo.guides.parts.part_reader import Proposal
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.plates import bayesian_parameters
from capsule_zoo.models.common.remembering import Submodule
from capsule_zoo.models.part_whole import PartWholeCapsules
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import (
    Capsules,
    ChildDistribution,
    as_presence,
    log_presence,
    parent_log_weights,
)


class EMObjects(Submodule, PyroModule):
    """The module that infers objects from parts by EM, described at the top of this file.

    It has no parameters.

    Args:
        model: part-whole capsules.
        iterations: number of EM steps for each level.

    Raises:
        ValueError: `iterations` below 1, or a model with types of parts.
    """

    model_class = PartWholeCapsules

    features = 7  # inputs of the standard deviations: a presence and a pose

    def __init__(self, model: PartWholeCapsules, *, iterations: int = 3) -> None:
        super().__init__()
        check_at_least(1, iterations=iterations)
        if model.types:
            raise ValueError(
                f"EMObjects takes one vote of a part for each object, and parts of this model have "
                f"{model.types} types; use SetTransformers, or a model with types=0"
            )
        self.iterations = iterations

    def forward(self, model: PartWholeCapsules, index: int, children: Capsules) -> Proposal:
        """Infer the capsules of level `index` by EM, from prior presences and identity poses.

        Raises:
            ValueError: a parameter of the model is a `PyroSample`.
        """
        selection = model.selections[index]
        if bayesian_parameters(model):
            raise ValueError(
                "EMObjects reads the parameters of its model, and one of this model is a "
                "PyroSample; use SetTransformers, or make the parameter a tensor"
            )
        prior: Tensor = model.presence_logits
        scale = model.pose.scale(children.pose)[:3]
        if index > 0:  # no prior from parents above: even odds, and a flat distribution of poses
            prior = prior.new_zeros(model.levels[index].size)
            scale = torch.full_like(scale, selection.sigma_off)
        presence = as_presence(children.presence, model.relaxed)

        def child_evidence(logits: Tensor, pose: Tensor) -> Evidence:
            # the model's distribution, at the presences of parents that are believed so far
            distribution = selection(Capsules(logits, pose), relaxed=True)
            density = child_log_density(model, distribution, children)
            precision = distribution.scale(presence)[..., 1:, 0].square().reciprocal()
            return Evidence(density, distribution.log_weights, precision)

        affinity = selection.log_affinity, selection.epsilon
        return route(
            child_evidence,
            children.pose,
            selection.transform,
            affinity,
            prior,
            scale**-2,
            self.iterations,
        )


class Evidence(NamedTuple):
    """The likelihoods of children given their parents; column 0 of the choices is the dummy.

    Attributes:
        log_density: log p(child | its choice), (B, children, 1 + parents).
        log_weights: unnormalized log p(choice), (B, children, 1 + parents).
        precision: precision of a child's pose about each parent's vote, (B, children, parents).
    """

    log_density: Tensor
    log_weights: Tensor
    precision: Tensor


def route(
    compute_evidence: Callable[[Tensor, Tensor], Evidence],
    child_pose: Tensor,
    transform: Tensor,
    affinity: tuple[Tensor, float],
    prior: Tensor,
    precision: Tensor,
    iterations: int,
) -> Proposal:
    """Infer parents by EM, from prior presences and identity poses.

    Args:
        compute_evidence: the children's evidence, given presence logits (B, parents) and poses.
        child_pose: A_i, (B, children, 6).
        transform: M_ij, (children, parents, 6).
        affinity: log rho, (children, parents), and the dummy's weight.
        prior: logits of the parents' presences, (parents,).
        precision: precision of the prior about the identity for each column of a pose, (3,).
        iterations: number of EM steps.
    """
    batch = child_pose.shape[:-2]
    logits = prior.expand(*batch, len(prior))
    pose = poses.identity_like(child_pose).expand(*batch, len(prior), 6)
    for _ in range(iterations):
        evidence = compute_evidence(logits, pose)
        fraction = (evidence.log_density + evidence.log_weights).softmax(-1)[..., 1:]
        pose = best_pose(child_pose, transform, fraction * evidence.precision, precision)
        density = compute_evidence(logits, pose).log_density
        logits = prior + activation(logits, affinity[0], density, affinity[1])
    return Proposal(logits, pose, torch.cat([logits[..., None].tanh(), pose], dim=-1))


def child_log_density(
    model: PartWholeCapsules, distribution: ChildDistribution, children: Capsules
) -> Tensor:
    """Compute log p(t_i, A_i | s_i = j), (B, children, 1 + parents); column 0 is the dummy."""
    presence_distribution = model.presence_distribution(distribution.presence_logits)
    presence = presence_distribution.log_prob(children.presence[..., None])
    child_presence = as_presence(children.presence, model.relaxed)
    return presence + distribution.pose_distribution(child_presence).log_prob(
        children.pose[..., None, :]
    )


def best_pose(child_pose: Tensor, transform: Tensor, weight: Tensor, precision: Tensor) -> Tensor:
    """Compute the best pose of every parent, (B, parents, 6), given its weighted children.

    This is the M step: it minimizes, over A_j,

        sum_i w_ij |A_i - A_j (I + M_ij)|^2 + sum_c precision_c |(A_j - I)_c|^2.

    Args:
        child_pose: A_i, (B, children, 6).
        transform: M_ij, (children, parents, 6).
        weight: w_ij, (B, children, parents).
        precision: precision of the prior about the identity for each column of a pose, (3,).
    """
    place = poses.to_matrix(poses.identity_like(transform) + transform)  # (children, parents, 3, 3)
    target = child_pose.unflatten(-1, (2, 3))  # (B, children, 2, 3)
    eye = torch.eye(3, dtype=place.dtype, device=place.device)
    gram = torch.einsum("...ij,ijkl,ijml->...jkm", weight, place, place) + precision * eye
    cross = torch.einsum("...ij,...ikl,ijml->...jkm", weight, target, place) + precision * eye[:2]
    return poses.from_matrix(torch.linalg.solve(gram, cross.mT).mT)


def activation(logits: Tensor, log_affinity: Tensor, log_density: Tensor, epsilon: float) -> Tensor:
    """Compute the log ratio of the children's likelihood with and without each parent.

    The result is (B, parents), in nats. The other parents have the presences that `logits` give.
    The choice of a parent is summed out.

    Args:
        logits: logits of the parents' presences, (B, parents).
        log_affinity: log rho, (children, parents).
        log_density: log p(child | its choice), (B, children, 1 + parents).
        epsilon: the dummy's weight.
    """
    weights = parent_log_weights(log_presence(logits, relaxed=True), log_affinity, epsilon)
    diagonal = torch.eye(logits.shape[-1], dtype=torch.bool, device=logits.device)
    # (B, children, parent, 1 + parents): weights of the choices without that parent
    others = weights[..., None, :].masked_fill(F.pad(diagonal, (1, 0)), -torch.inf)
    possible = others.logsumexp(-1)
    explained = (others + log_density[..., None, :]).logsumexp(-1)
    with_it = torch.logaddexp(explained, log_affinity + log_density[..., 1:])
    with_it = with_it - torch.logaddexp(possible, log_affinity)
    return (with_it - (explained - possible)).sum(-2)
