"""The distribution of a scene of points: presences and poses of objects, and the matching.

    t_k     ~ Bernoulli(presence)                      # for each object k
    y_k     ~ Normal(0, tau^2 I_4)                     # its similarity, see `similarities`
    c       ~ Uniform{0, ..., clutter}                 # number of clutter points
    order   ~ a random order of the n = sum_k t_k n_k + c points
    point   ~ Normal(its corner moved by y_k, s_k^2 I_2)  or  Uniform([-1, 1]^2) for clutter

The density of a scene and of one matching of its points to corners is, with poses integrated out,

    log p(points, matching) = sum_k log p(t_k) + log p(c) + log c! - log n! - c log 4
                              + sum_k log p(points of k, in the order of its corners)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from capsule_zoo.models.constellations.exact_cover import Plan, plan
from capsule_zoo.models.constellations.similarities import (
    MANY_STEPS,
    Fit,
    Noise,
    Template,
    as_complex,
    equal,
    first_alike,
    fit_of,
    log_evidence,
)

LOG_AREA = math.log(4.0)  # log area of the square [-1, 1]^2, where clutter lies


@dataclass(frozen=True, eq=False)
class SceneDistribution:
    """The distribution of the scenes of a few objects; see the top of this file.

    Attributes:
        templates: templates of the objects.
        noise: noise of the corners, in the units of the templates before they were scaled.
        tau: standard deviation of every number of a pose.
        presence: probability of each object.
        clutter: the largest number of clutter points.
    """

    templates: tuple[Template, ...]
    noise: Noise
    tau: float
    presence: float = 0.5
    clutter: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of corners of every object."""
        return tuple(map(len, self.templates))

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The index of the first object with an equal template, for every object."""
        return first_alike(self.templates, equal)

    @property
    def most(self) -> int:
        """The largest number of points of a scene."""
        return sum(self.sizes) + self.clutter

    @cached_property
    def first(self) -> Tensor:
        """The index of each object's first corner among all corners, (objects,)."""
        return torch.tensor([0, *self.sizes]).cumsum(0)[:-1]

    def noise_of(self, index: int) -> Noise:
        """Return the noise of an object, for its template scaled to mean square distance 1."""
        return Noise(self.noise.floor, self.noise.proportional / self.templates[index].radius)

    def log_present(self, reference: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log prior of presences, log p(t_k = 1) and log p(t_k = 0), (objects,) each."""
        count = len(self.templates)
        on = reference.new_full((count,), math.log(self.presence))
        return on, reference.new_full((count,), math.log1p(-self.presence))

    def log_left(self, number: int, reference: Tensor) -> Tensor:
        """Return the log weight of c clutter points among `number` points, for every allowed c."""
        count = torch.arange(self.clutter + 1).to(reference)
        factorials = (count + 1).lgamma() - math.lgamma(number + 1)
        return factorials - count * LOG_AREA - math.log(self.clutter + 1)

    def plan(self, number: int) -> Plan:
        """Return the recursion over all covers of `number` points."""
        return plan(number, self.sizes, self.clutter)


def group_by_number(points: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Group scenes by their number of points, and yield each group's rows, slots and points.

    Args:
        points: (B, N, 2), NaN where absent.

    Yields:
        rows (b,), slots (b, n) of the points that are present, and complex points (b, n).
    """
    present = ~points[..., 0].isnan()
    order = (~present).to(torch.int8).argsort(dim=1, stable=True)
    numbers = present.sum(1)
    for number in numbers.unique().tolist():
        rows = (numbers == number).nonzero()[:, 0]
        slots = order[rows, :number]
        yield rows, slots, as_complex(points[rows[:, None], slots])


def object_fit(
    distribution: SceneDistribution, points: Tensor, objects: Tensor, corners: Tensor, index: int
) -> tuple[Fit, Tensor, Tensor]:
    """Return the fit of one object to its points in a matching.

    Args:
        points: (B, N, 2), NaN where absent.
        objects, corners: a matching, (*batch, N), where the last dim of batch is B.
        index: the number of the object.

    Returns:
        The fit; True where the object has any point, and where it has each corner once, (*batch).
    """
    template = distribution.templates[index]
    member_mask = objects == index
    number = torch.arange(len(template), device=objects.device)
    held = member_mask[..., None, :] & (corners[..., None, :] == number[:, None])  # (*batch, n, N)
    slots = held.to(torch.int8).argmax(-1)
    everywhere = points.expand(*objects.shape, 2)
    object_points = everywhere.gather(-2, slots[..., None].expand(*slots.shape, 2)).nan_to_num()
    places = as_complex(object_points)
    whole = (held.sum(-1) == 1).all(-1) & (member_mask.sum(-1) == len(template))
    return fit_of(places, template.corners.to(places)), member_mask.any(-1), whole


def log_joint(
    distribution: SceneDistribution, points: Tensor, objects: Tensor, corners: Tensor
) -> Tensor:
    """Compute log p(points, matching) in nats, (*batch,), with poses integrated out.

    Args:
        points: (B, N, 2), NaN where absent.
        objects, corners: (*batch, N), -1 for clutter and where a point is absent; the last dim of
            batch is B.

    Returns:
        -inf where an object has a part of its corners only, or where clutter is too much.
    """
    present = ~points[..., 0].isnan()
    number = present.sum(-1)
    left = (present & (objects < 0)).sum(-1)
    on, off = distribution.log_present(points)
    total = (left + 1.0).to(points).lgamma() - (number + 1.0).to(points).lgamma()
    total = total - left * LOG_AREA - math.log(distribution.clutter + 1)
    total = total.masked_fill(left > distribution.clutter, -torch.inf)
    for k in range(len(distribution.templates)):
        fit, is_present, whole = object_fit(distribution, points, objects, corners, k)
        evidence = on[k] + log_evidence(
            fit, distribution.noise_of(k), distribution.tau, steps=MANY_STEPS
        )
        evidence = evidence.masked_fill(~whole, -torch.inf)
        total = total + torch.where(is_present, evidence, off[k])
    return total


def log_equivalent(distribution: SceneDistribution, objects: Tensor) -> Tensor:
    """Compute the log number of matchings that are equivalent to one by symmetries, (B,).

    Rotations map some templates to themselves, and objects with equal templates may be exchanged.

    Args:
        objects: object of each point, (B, N), -1 for clutter and absent points.
    """
    is_present = torch.stack([(objects == k).any(1) for k in range(len(distribution.templates))], 1)
    symmetry_order = torch.tensor(
        [float(t.symmetry_order) for t in distribution.templates], device=objects.device
    ).log()
    total = is_present.double() @ symmetry_order.double()
    kinds = torch.tensor(distribution.kinds, device=objects.device)
    for kind in kinds.unique():
        alike = kinds == kind
        every, present = alike.sum(), is_present[:, alike].sum(1)
        total += (every + 1.0).double().lgamma() - (every - present + 1.0).double().lgamma()
    return total
