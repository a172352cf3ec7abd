"""Routing of parts to several objects with shape codes, by alternating assignments and regressions.

The objects of a scene are found one after the other, and then together:

    one by one    each kind, alone, is fitted to the parts that no object has yet, where a part may
                  also belong to a background as wide as all kinds together; the best kind stays
    together      r_is = p(s_i = slot s | t, A_1..P, objects); every slot is fitted again, in all
                  kinds, to its fraction of the parts, and the best kind stays

Each fit is the pair of ridge regressions of `guides.parts.ridge`. Slots that begin
with the wrong kind seldom recover, so that several kinds are tried for the first slot, and the
scene with the largest joint density wins. All of it is coordinate ascent on the model's log joint.

References:
    Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing"; the model's story in
    `capsule_zoo.models.shape_codes`.
"""

from collections.abc import Callable
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.guides.parts.kind_network import KindProposals
from capsule_zoo.guides.parts.part_reader import PartReader, move_capsules
from capsule_zoo.guides.parts.ridge import RidgeKinds, alternate
from capsule_zoo.guides.parts.shape_codes import ShapeCodesGuide
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import Capsules, as_presence
from capsule_zoo.models.shape_codes import ShapeCodes

_SHARPENING = (
    3.0,
    1.0,
)  # standard deviations of the parts in later steps of a fit, relative to the model's
_ALTERNATIONS = 2  # alternations of pose and code in each fit


class Scene(NamedTuple):
    """The objects, one for each slot, that explain a part set.

    Attributes:
        kind, pose, code: values of the objects' sites, (B, S), (B, S, 6) and (B, S, d).
        pose_scale, code_scale: conditional standard deviations of pose and code.
    """

    kind: Tensor
    pose: Tensor
    code: Tensor
    pose_scale: Tensor
    code_scale: Tensor


class RoutingSlots(ShapeCodesGuide):
    """The guide that finds the objects of a scene by routing parts to slots.

    Args:
        model, pose, objects: as for every `ShapeCodesGuide`.
        rounds: assignments of all parts to all slots, after these were found one by one.
        starts: kinds that are tried for the first slot.
        reader: the class of the part reader: `PartReader` or a partial of it.

    Raises:
        ValueError: `rounds` or `starts` below 1.
    """

    most_slots = 8

    def __init__(
        self,
        model: ShapeCodes,
        pose: str = "delta",
        *,
        objects: str = "normal",
        reader: Callable[..., PartReader] = PartReader,
        rounds: int = 4,
        starts: int = 4,
    ) -> None:
        check_at_least(1, rounds=rounds, starts=starts)
        super().__init__(model, pose, objects=objects, reader=reader, above=RidgeKinds)
        self.rounds = rounds
        self.starts = min(starts, model.kinds)

    def _draw_object(self, parts: Capsules, frame: Tensor | None, labels: Tensor | None) -> None:
        """Sample kind, pose and code of every slot's object."""
        with torch.no_grad():
            scene = self.find(
                parts if frame is None else move_capsules(parts, poses.inverse(frame))
            )
        pose = scene.pose if frame is None else poses.compose(frame[:, None], scene.pose)
        with pyro.plate("slots", self.model.slots, dim=-1):
            pyro.sample("object_kind", dist.Delta(scene.kind))
            if self.objects == "delta":
                pyro.sample("object_pose", dist.Delta(pose, event_dim=1))
                pyro.sample("object_code", dist.Delta(scene.code, event_dim=1))
            else:
                pyro.sample("object_pose", dist.Normal(pose, scene.pose_scale).to_event(1))
                pyro.sample("object_code", dist.Normal(scene.code, scene.code_scale).to_event(1))

    @torch.no_grad()
    def find(self, parts: Capsules) -> Scene:
        """Return the most probable of the scenes that are tried, for parts (B, P)."""
        first, score = self._one_more(parts, torch.ones_like(parts.pose[..., 0]))
        scenes = []
        for kind in score.topk(self.starts, dim=-1).indices.unbind(-1):
            scene = self._one_by_one(parts, pick_kind(first, kind))
            for _ in range(self.rounds):
                scene = self._improve_scene(parts, scene)
            scenes.append(scene)
        joint = [self.model.log_joint_of_slots(parts, *scene[:3]) for scene in scenes]
        best = torch.stack(joint).argmax(0)
        rows = torch.arange(len(best), device=best.device)
        return Scene(*(torch.stack(tensors)[best, rows] for tensors in zip(*scenes, strict=True)))

    def _one_by_one(self, parts: Capsules, scene: Scene) -> Scene:
        """Add objects to a scene, one at a time, until every slot has one."""
        while scene.kind.shape[1] < self.model.slots:
            fractions = self.model.responsibilities(*scene[:3], parts)  # the dummy keeps the others
            proposals, score = self._one_more(parts, fractions[..., 0])
            scene = join_scenes([scene, pick_kind(proposals, score.argmax(-1))])
        return scene

    def _improve_scene(self, parts: Capsules, scene: Scene) -> Scene:
        """Return the scene with every slot's object refitted to the parts it is responsible for."""
        fractions = self.model.responsibilities(*scene[:3], parts)[..., 1:]
        slots = []
        for fraction in fractions.unbind(-1):
            weight = fraction[:, None].expand(-1, self.model.kinds, -1)
            proposals = self._fit(parts, weight)
            score = (weight * self._log_density(parts, proposals)).sum(-1) + self._log_prior(
                proposals
            )
            slots.append(pick_kind(proposals, score.argmax(-1)))
        return join_scenes(slots)

    def _one_more(self, parts: Capsules, free: Tensor) -> tuple[KindProposals, Tensor]:
        """Fit an object of each kind to the free fraction (B, P) of each part; score each kind."""
        shapes = self.model.shapes
        batch = len(free)
        identity = poses.identity_like(parts.pose)
        proposals = KindProposals(
            identity.expand(batch, self.model.kinds, 6),
            free.new_zeros(batch, self.model.kinds, self.model.codes),
        )
        wide = self._background(parts)
        spread = (shapes.scale.square() + shapes.pose_codes.square().sum(-1)).sqrt()
        for scale in (spread, *(factor * shapes.scale for factor in _SHARPENING)):
            log_density = self._log_density(parts, proposals, scale)
            proposals = self._fit(parts, free[:, None] * (log_density - wide).sigmoid())
        log_density = self._log_density(parts, proposals)
        return proposals, (free[:, None] * torch.logaddexp(log_density, wide)).sum(
            -1
        ) + self._log_prior(proposals)

    def _fit(self, parts: Capsules, fraction: Tensor) -> KindProposals:
        """Fit an object of every kind to its fraction (B, K, P) of the parts."""
        return alternate(self.model, parts, lambda *_: fraction, _ALTERNATIONS, counted=fraction)

    def _log_density(
        self, parts: Capsules, proposals: KindProposals, scale: Tensor | None = None
    ) -> Tensor:
        """Compute the log density of every part as a part of an object of every kind, (B, K, P).

        Args:
            scale: standard deviations to use instead of the model's, (K, P, 6).
        """
        shapes = self.model.shapes
        part_presence = as_presence(parts.presence, self.model.relaxed)[:, None]
        kinds = torch.arange(self.model.kinds, device=part_presence.device)[None]
        vote, logits = shapes.votes(kinds, proposals.pose, proposals.code)
        distribution = dist.Normal(vote, shapes.scale if scale is None else scale).to_event(1)
        presence = part_presence * logits - F.softplus(logits)
        return presence + part_presence * distribution.log_prob(parts.pose[:, None])

    def _log_prior(self, proposals: KindProposals) -> Tensor:
        """Compute the log prior log p(k, A, c) of proposed objects, (B, K)."""
        pose = self.model.pose.distribution(proposals.pose).log_prob(proposals.pose)
        code = self.model.object_code_distribution().log_prob(proposals.code)
        return self.model.kind_logits.log_softmax(-1) + pose + code

    def _background(self, parts: Capsules) -> Tensor:
        """Compute the log density of every part as a part of any object, (B, 1, P)."""
        shapes = self.model.shapes
        fraction = self.model.kind_logits.softmax(-1)[:, None, None]
        mean = (fraction * shapes.place).sum(0)
        spread = shapes.scale.square() + shapes.pose_codes.square().sum(-1)
        variance = (fraction * (spread + (shapes.place - mean).square())).sum(0)
        part_presence = as_presence(parts.presence, self.model.relaxed)
        distribution = dist.Normal(mean, variance.sqrt()).to_event(1)
        return (part_presence * distribution.log_prob(parts.pose))[:, None]


def pick_kind(proposals: KindProposals, kind: Tensor) -> Scene:
    """Return the scene of one object: the proposal for the kind (B,)."""
    rows = torch.arange(len(kind), device=kind.device)
    numbers = [tensor[rows, kind][:, None] for tensor in proposals if tensor is not None]
    return Scene(kind[:, None], *numbers)


def join_scenes(scenes: list[Scene]) -> Scene:
    """Join the objects of several scenes into one scene."""
    return Scene(*(torch.cat(tensors, dim=1) for tensors in zip(*scenes, strict=True)))
