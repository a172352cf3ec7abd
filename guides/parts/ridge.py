"""Routing for shape codes: an object is fitted to its parts by alternating ridge regressions.

Given the kind and the presences, the votes A (N_i + U_i c) are linear in the pose A for a given
code c, and linear in c for a given A. Both steps, and the choice of each part between the object
and the dummy, are coordinate ascent on the model's own log joint:

    E step   r_i = p(s_i = object | t, A_1..P)
    pose     A = argmin_A sum_i r_i t_i |A_i - A (N_i + U_i c)|^2_i + |A - I|^2 / sigma_top^2
    code     c = argmin_c sum_i r_i t_i |A_i - A (N_i + U_i c)|^2_i + |c|^2 - 2 log p(t | c)

|.|_i divides by the standard deviations sigma_i. The presences' log likelihood is replaced by its
quadratic expansion at the current code, as in logistic regression by reweighted least squares. Each
part votes for the object, and the object gathers the votes of its parts: the classic steps of
routing. The E step begins halfway. Before, no part is far from the dummy's distribution, but many
are far from the object's, whose code is still zero: the dummy would take them all, and keep them.
The normal distribution has the exact conditional standard deviations of the regressions.

References:
    Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing"; the model's story in
    `capsule_zoo.models.shape_codes`.
"""

from collections.abc import Callable

import torch
from pyro.nn import PyroModule
from torch import Tensor

from capsule_zoo.guides.parts.kind_network import KindProposals
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.remembering import Submodule
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import Capsules, as_presence
from capsule_zoo.models.shape_codes import ShapeCodes


class RidgeKinds(Submodule, PyroModule):
    """The module of ridge regressions that fit an object of every kind to the parts.

    They have no parameters. A prior with several rotations is used as the identity
    alone.

    Args:
        model, objects: as for `KindNetwork`.
        iterations: number of alternations.

    Raises:
        ValueError: `iterations` below 1.
    """

    model_class = ShapeCodes

    def __init__(self, model: ShapeCodes, objects: str, *, iterations: int = 5) -> None:
        super().__init__()
        check_at_least(1, iterations=iterations)
        self.objects = objects
        self.iterations = iterations

    def forward(self, model: ShapeCodes, parts: Capsules) -> KindProposals:
        """Return the proposed pose and code of an object of every kind."""

        def fraction(step: int, pose: Tensor, code: Tensor) -> Tensor | float:
            return 1.0 if step < self.iterations // 2 else _share(model, parts, pose, code)

        proposals = alternate(model, parts, fraction, self.iterations)
        return proposals.points() if self.objects == "delta" else proposals


def alternate(
    model: ShapeCodes,
    parts: Capsules,
    fraction: Callable[[int, Tensor, Tensor], Tensor | float],
    steps: int,
    counted: Tensor | float = 1.0,
) -> KindProposals:
    """Fit an object of every kind to the parts by alternation: its pose, then its code.

    Args:
        fraction: fraction (B, K, P) of each object in the poses of the parts, at a step, given the
            pose and the code of every kind.
        steps: number of alternations.
        counted: weight (B, K, P) of the presences of the parts.
    """
    shapes = model.shapes
    part_presence = as_presence(parts.presence, model.relaxed)[..., None, :]  # (B, 1, P)
    target = parts.pose[..., None, :, :]  # (B, 1, P, 6)
    batch = parts.presence.shape[:-1]
    precision = model.pose.scale(target) ** -2
    pose = poses.identity_like(target).expand(*batch, model.kinds, 6)
    code = target.new_zeros(*batch, model.kinds, model.codes)
    for step in range(steps):
        weight = (fraction(step, pose, code) * part_presence)[..., None] / shapes.scale.square()
        arrangement = shapes.place + bend(shapes.pose_codes, code)
        pose, pose_scale = fit_pose(target, arrangement, weight, precision)
        shift = presence_shift(shapes.presence_codes, code)
        believed = (shapes.presence_logits + shift).sigmoid()  # (B, K, P)
        curve = counted * believed * (1 - believed)
        code, code_scale = fit_code(
            target - poses.compose(pose[..., None, :], shapes.place),
            directions(pose, shapes.pose_codes),
            weight,
            shapes.presence_codes,
            counted * (part_presence - believed) + curve * shift,
            curve,
        )
    return KindProposals(pose, code, pose_scale, code_scale)


def _share(model: ShapeCodes, parts: Capsules, pose: Tensor, code: Tensor) -> Tensor:
    """Compute the responsibility of an object of every kind for every part, (B, K, P)."""
    kind = torch.arange(model.kinds, device=pose.device).view(-1, *[1] * (pose.dim() - 1))
    pose, code = (x.movedim(-2, 0).unsqueeze(-2) for x in (pose, code))
    return model.responsibilities(kind, pose, code, parts)[..., 1].movedim(0, -2)


def bend(pose_codes: Tensor, code: Tensor) -> Tensor:
    """Return the deformations U c of the parts' poses by the codes, (B, K, P, 6)."""
    return torch.einsum("kpid,...kd->...kpi", pose_codes, code)


def presence_shift(presence_codes: Tensor, code: Tensor) -> Tensor:
    """Return the shifts w c of the parts' presence logits by the codes, (B, K, P)."""
    return torch.einsum("kpd,...kd->...kp", presence_codes, code)


def directions(pose: Tensor, pose_codes: Tensor) -> Tensor:
    """Return the derivatives of votes by the code, (B, K, P, 6, d): A U without A's translation."""
    rotation = pose.unflatten(-1, (2, 3))[..., :2]  # (B, K, 2, 2)
    bent = pose_codes.unflatten(-2, (2, 3))  # (K, P, 2, 3, d)
    return torch.einsum("...krm,kpmld->...kprld", rotation, bent).flatten(-3, -2)


def fit_pose(
    target: Tensor, arrangement: Tensor, weight: Tensor, precision: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the pose A that best moves an arrangement to the parts, and its standard deviations.

    It minimizes, over A,

        sum_ic w_ic (target_i - A arrangement_i)_c^2 + sum_c precision_c (A - I)_c^2.

    Args:
        target: poses of the parts, (B, K or 1, P, 6).
        arrangement: poses of the parts in the object's frame, (B, K, P, 6).
        weight: w, (B, K, P, 6).
        precision: precision of the prior about the identity, (6,).

    Returns:
        Pose and standard deviations, (B, K, 6) each.
    """
    place = poses.to_matrix(arrangement)  # (B, K, P, 3, 3)
    rows = weight.unflatten(-1, (2, 3))  # (B, K, P, 2, 3)
    prior = precision.unflatten(-1, (2, 3))  # (2, 3)
    center = poses.identity_like(arrangement).unflatten(-1, (2, 3))
    gram = torch.einsum("...prl,...pjl,...pml->...rjm", rows, place, place)
    gram = gram + torch.diag_embed(prior)
    weighted = rows * target.unflatten(-1, (2, 3))
    cross = torch.einsum("...prl,...pjl->...rj", weighted, place) + prior * center
    pose = torch.linalg.solve(gram, cross)
    return pose.flatten(-2), gram.diagonal(dim1=-2, dim2=-1).rsqrt().flatten(-2)


def fit_code(
    rest: Tensor,
    directions: Tensor,
    weight: Tensor,
    presence_codes: Tensor,
    presence_rest: Tensor,
    presence_weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the code c that best explains poses and presences, and its standard deviations.

    It minimizes, over c, sum_ic w_ic (rest_i - directions_i c)_c^2 + |c|^2 and the quadratic
    expansion of the presences' log likelihood, sum_i v_i (w_i c)^2 - 2 u_i (w_i c).

    Args:
        rest: poses of the parts minus the votes without a code, (B, K, P, 6).
        directions: derivatives of the votes, (B, K, P, 6, d).
        weight: w, (B, K, P, 6).
        presence_codes: w_i, (K, P, d).
        presence_rest, presence_weight: u and v, (B, K, P).

    Returns:
        Code and standard deviations, (B, K, d) each.
    """
    weighted = weight[..., None] * directions
    gram = torch.einsum("...pid,...pie->...de", weighted, directions)
    gram = gram + torch.einsum("...kp,kpd,kpe->...kde", presence_weight, *[presence_codes] * 2)
    gram = gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    cross = torch.einsum("...pid,...pi->...d", weighted, rest)
    cross = cross + torch.einsum("...kp,kpd->...kd", presence_rest, presence_codes)
    code = torch.linalg.solve(gram, cross)
    return code, gram.diagonal(dim1=-2, dim2=-1).rsqrt()
