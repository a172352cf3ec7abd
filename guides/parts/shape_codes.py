"""Guides to shape codes: parts from an encoder, and for every kind an object that explains them.

    parts    ~ q(parts | image)                                   # a `PartReader`'s network
    a_k, m_k = centers of the object's pose and code, were it of kind k              # every kind
    k        ~ softmax_k(log p(k, a_k, m_k, parts) - log q(a_k, m_k | k))            # (B, 1)
    A, c     ~ Normal(a_k, .), Normal(m_k, .)                     # of the kind that was drawn

Given the proposals of all kinds, the law of the kind is nearly the best one, softmax_k(log pi_k +
ELBO_k), and exactly the best one where the proposals are exact or are points. It needs no network
of its own. The kind is drawn, so that (k, A, c) has a density like any other draw, in `evaluate`
too. A guide `with_enumerated_kinds()` is for `TraceEnum_ELBO`, which sums the kind out exactly, at
a cost that grows with the number of kinds:

    ELBO = sum_k q(k) (log pi_k + ELBO_k - log q(k)) = log sum_k pi_k exp(ELBO_k)    at the best q

`AmortizedShapeCodes` computes the proposals of all kinds by one network on the parts.
`RoutingShapeCodes` computes them by alternating ridge regressions, without a network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Self

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from pyro.ops.indexing import Vindex
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.parts.part_reader import OUTPUTS, PartReader, Proposal, moved
from capsule_zoo.guides.parts.part_whole import FIT_SETTINGS, PoseHead
from capsule_zoo.guides.parts.turns import best_turn
from capsule_zoo.models.checks import check_at_least, check_labels, check_one_of
from capsule_zoo.models.common.modes import seeded
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import Capsules
from capsule_zoo.models.parts.selection import as_presence
from capsule_zoo.models.shape_codes import ShapeCodes, from_part_sets

LAWS = ("delta", "normal")
_AT_ONCE = 2**16  # numbers of poses of all kinds whose densities are computed at a time
_INITIAL_SCALE = 0.1  # deviation of a fresh code, whose prior has 1
_INITIAL_POSE_SCALE = 0.02


class KindProposals(NamedTuple):
    """The laws q(A, c | parts, k) of the object's pose and code for every kind.

    Attributes:
        pose, pose_scale: means and deviations of the pose, (B, K, 6).
        code, code_scale: means and deviations of the code, (B, K, d).

    The deviations are None where pose and code are points.
    """

    pose: Tensor
    code: Tensor
    pose_scale: Tensor | None = None
    code_scale: Tensor | None = None

    def log_density_at_centers(self) -> Tensor | float:
        """Return log q(a_k, m_k | k), (B, K), in nats; 0 for points."""
        if self.pose_scale is None or self.code_scale is None:
            return 0.0
        pose = dist.Normal(self.pose, self.pose_scale).to_event(1)
        code = dist.Normal(self.code, self.code_scale).to_event(1)
        return pose.log_prob(self.pose) + code.log_prob(self.code)

    def laws(self, kind: Tensor) -> tuple[dist.TorchDistribution, dist.TorchDistribution]:
        """Return the laws of the pose and of the code for a kind (B, 1), perhaps enumerated."""
        pose, code = (Vindex(x.unsqueeze(-3))[..., kind, :] for x in self[:2])
        if self.pose_scale is None or self.code_scale is None:
            return dist.Delta(pose, event_dim=1), dist.Delta(code, event_dim=1)
        scales = (self.pose_scale, self.code_scale)
        pose_scale, code_scale = (Vindex(x.unsqueeze(-3))[..., kind, :] for x in scales)
        return dist.Normal(pose, pose_scale).to_event(1), dist.Normal(code, code_scale).to_event(1)


class ShapeCodesGuide(Guide[ShapeCodes]):
    """The base of the guides to shape codes; subclasses write `propose`.

    Args:
        model: the model to invert. A guide to a model in another scope draws the sites of that
            scope alone.
        pose: the law of the parts' poses, "delta" or "normal".
        objects: the law of the object's pose and code, "delta" or "normal".
        channels, max_scale, anisotropy, coordinates, turns, centered: arguments of `PartReader`.

    Attributes:
        reader: the settings of the reader of parts.
        options: all arguments but the model and `pose`.

    Raises:
        ValueError: another kind of model, an unknown law, or a size below 1.
    """

    fit_settings = FIT_SETTINGS
    most_slots = 1

    def __init__(
        self,
        model: ShapeCodes,
        pose: str = "delta",
        *,
        objects: str = "normal",
        channels: int = 64,
        max_scale: float = 0.8,
        anisotropy: float | None = 1.6,
        coordinates: bool = False,
        turns: int = 1,
        centered: bool = False,
    ) -> None:
        check_one_of("pose", pose, LAWS)
        check_one_of("objects", objects, LAWS)
        super().__init__(model)
        if model.slots > self.most_slots:
            raise ValueError(
                f"no guide of shape-codes reads several objects, but slots={model.slots}; leave "
                "slots=1, train the entry scenes, whose objects shape codes can draw "
                "(--set thing='\"shape-codes\"'), or build the pair in Python: "
                "RoutingSlots(ShapeCodes(slots=2, ...))"
            )
        self.pose = pose
        self.objects = objects
        self.kind = "drawn"
        self.reader = PartReader(channels, max_scale, anisotropy, coordinates, turns, centered)
        self.options: dict[str, Any] = dict(objects=objects, **vars(self.reader))
        parts = model.levels[-1].size
        self.read_parts = self.reader.build(model.image_shape, parts)
        self.pose_head = PoseHead(OUTPUTS, parts, pose)

    def with_laws(self, pose: str, objects: str) -> ShapeCodesGuide:
        """Return a guide to the same model with other laws, and copies of the same weights.

        Train with points for the parts first. A new normal law of a part's pose starts at the point
        with a deviation of .02.
        """
        options = {**self.options, "objects": objects}
        return type(self)(self.model, pose, **options).copy_matching(self)

    def with_poses(self, pose: str) -> ShapeCodesGuide:
        """Return `with_laws(pose, ...)` with the present law of the objects."""
        return self.with_laws(pose, self.objects)

    def with_turns(self, turns: int) -> ShapeCodesGuide:
        """Return a guide with the same parameters that tries `turns` turns of the image."""
        reader = replace(self.reader, turns=turns)
        reader.check_images_turn(self.model.image_shape)
        return self.sharing_parameters(reader=reader, options={**self.options, "turns": turns})

    def copy_matching(self, source: nn.Module) -> Self:
        """Copy every tensor that another module, such as a guide, has under the same name."""
        self.to(next(source.parameters()))
        mine, theirs = self.state_dict(), source.state_dict()
        same = {k: v for k, v in theirs.items() if k in mine and mine[k].shape == v.shape}
        self.load_state_dict({**mine, **same})
        return self

    def propose(self, parts: Capsules) -> KindProposals:
        """Return the laws of the object's pose and code for every kind, given the parts."""
        raise NotImplementedError(f"{type(self).__name__} must write propose")

    def with_scope(self, scope: str) -> ShapeCodesGuide:
        """Return a guide with the same parameters for the model's `with_scope`."""
        return self.sharing_parameters(_model=(self.model.with_scope(scope),))

    def with_enumerated_kinds(self) -> ShapeCodesGuide:
        """Return a guide with the same parameters whose kinds `TraceEnum_ELBO` sums out."""
        return self.sharing_parameters(kind="enumerated")

    def forward(
        self, images: Tensor, labels: Tensor | None = None, angle: Tensor | None = None
    ) -> Capsules:
        """Draw every site and return the parts.

        Args:
            labels: the kinds of the objects, (B,), where they are known.
            angle: turn of each image, (B,), in radians, at which the networks see the image and the
                parts; by default the best of the reader's `turns`.
        """
        check_labels(labels, self.model.kinds)
        with pyro.plate("images", len(images), dim=-2):
            if self.model.scope == "objects":
                parts, frame = from_part_sets(images), None
            else:
                if angle is None and self.reader.turns > 1:
                    angle = best_turn(self, images, self.reader.turns)
                seen, frame = self.reader.view(images, angle)
                parts = self._draw_parts(self.read_parts(seen), frame)
            if self.model.scope != "parts":
                self._draw_object(parts, frame, labels)
        return parts

    def _draw_object(self, parts: Capsules, frame: Tensor | None, labels: Tensor | None) -> None:
        """Draw the kind, the pose and the code of the object."""
        below = parts
        if frame is not None:
            below = moved(parts, poses.inverse(frame))
        found = self.propose(below)
        if frame is not None:
            found = found._replace(pose=poses.compose(frame[:, None], found.pose))
        if labels is None:
            law = dist.Categorical(logits=self.kind_logits(parts, found)[..., None, :])
            infer = {"enumerate": "parallel"} if self.kind == "enumerated" else {}
            kind = pyro.sample("object_kind", law, infer=infer)
        else:
            kind = labels[:, None]
        pose, code = found.laws(kind)
        pyro.sample("object_pose", pose)
        pyro.sample("object_code", code)

    @torch.no_grad()
    def kind_logits(self, parts: Capsules, found: KindProposals) -> Tensor:
        """Compute the logits of q(k), (B, K): log p(k, a_k, m_k, parts) - log q(a_k, m_k | k).

        They have no gradient. At the best q(k) the gradient of the ELBO through it is zero.
        """
        joint: Callable[..., Tensor] = self.model.log_joint_of_kinds
        if parts.presence.dim() > 2:  # plates outside the model
            return joint(parts, found.pose, found.code) - found.log_density_at_centers()
        rows = max(1, _AT_ONCE // found.pose[0].numel())
        each = (*parts, found.pose, found.code)
        few = zip(*(x.split(rows) for x in each), strict=True)
        found_in = [joint(Capsules(t, place), pose, code) for t, place, pose, code in few]
        return torch.cat(found_in) - found.log_density_at_centers()

    @torch.no_grad()
    def explained(self, parts: Capsules) -> Tensor:
        """Estimate log p(parts), (B,), in nats: the kind summed out, pose and code at the centers.

        Where the proposals are points it is a MAP objective, log p(parts, A, c) with k summed out.
        """
        return self.kind_logits(parts, self.propose(parts)).logsumexp(-1)

    def _draw_parts(self, proposal: Proposal, frame: Tensor | None) -> Capsules:
        """Draw the parts; the normal law of a part that is off is as wide as the model's own."""
        level = self.model.levels[-1]
        if frame is not None:
            proposal = moved(proposal, frame)
        with pyro.plate(level.plate, level.size, dim=-1):
            presence_law = self.model.presence_law(proposal.logits)
            presence = pyro.sample(f"{level.name}_presence", presence_law)
            law = self.pose_head(proposal.pose, proposal.features)
            if self.pose == "normal":
                there = as_presence(presence, self.model.relaxed)[..., None]
                scale = law.base_dist.scale
                scale = there * scale + (1 - there) * self.model.shapes.sigma_off
                law = dist.Normal(proposal.pose, scale).to_event(1)
            return Capsules.drawn(level, presence, pyro.sample(f"{level.name}_pose", law))


class AmortizedShapeCodes(ShapeCodesGuide):
    """The guide whose proposals for all kinds come from one network on the parts.

    The centers are a linear map of the parts, which the posterior would be if all parts were
    present, plus the output of a perceptron.

    Args:
        model, pose, objects: as for every `ShapeCodesGuide`.
        width: units of each hidden layer.
        hidden: number of hidden layers.
        reader: arguments of `PartReader`.
    """

    def __init__(
        self,
        model: ShapeCodes,
        pose: str = "delta",
        *,
        objects: str = "normal",
        width: int = 384,
        hidden: int = 2,
        **reader: Any,
    ) -> None:
        super().__init__(model, pose, objects=objects, **reader)
        check_at_least(1, width=width, hidden=hidden)
        self.options |= dict(width=width, hidden=hidden)
        layers: list[nn.Module] = []
        inputs = 7 * model.levels[-1].size
        for _ in range(hidden):
            layers += [PyroModule[nn.Linear](inputs, width), nn.ELU()]
            inputs = width
        self.body = PyroModule[nn.Sequential](*layers)
        outputs = model.kinds * (6 + model.codes)
        self.center = PyroModule[nn.Linear](width, outputs)
        self.center.weight.data *= 0.1  # objects start near the identity, with codes near zero
        if objects == "normal":
            self.spread = PyroModule[nn.Linear](width, outputs)
            self.spread.weight.data *= 0.1
        with seeded(0):  # its draws are not used
            self.direct = PyroModule[nn.Linear](7 * model.levels[-1].size, outputs, bias=False)
        self.direct.weight.data.zero_()

    @torch.no_grad()
    def start_at_posterior(self) -> None:
        """Set the proposals to the posterior of codes given parts, for objects at the identity.

        They are exact where all parts are present, none is the dummy's, presences do not depend on
        codes, and the numbers of a code are independent given the parts. Models that start from
        factor analyzers, by `start_kinds`, are such. What the perceptron adds begins at zero.
        """
        shapes = self.model.shapes
        precision = shapes.scale**-2  # (K, P, 6)
        weighted = precision[..., None] * shapes.pose_codes  # (K, P, 6, d)
        code = 1 + (weighted * shapes.pose_codes).sum((1, 2))  # (K, d)
        by_pose = weighted / code[:, None, None]
        by_presence = -torch.einsum("kpid,kpi->kpd", by_pose, shapes.place)
        by_part = torch.cat([by_presence[:, :, None], by_pose], dim=2)  # (K, P, 7, d)
        onto_code = by_part.flatten(1, 2).mT  # (K, d, 7 P)
        self.direct.weight.copy_(F.pad(onto_code, (0, 0, 6, 0)).flatten(0, 1))
        self.center.weight.zero_()
        self.center.bias.zero_()
        if self.objects == "normal":
            place = poses.to_matrix(shapes.place).square()
            rows = precision.unflatten(-1, (2, 3))
            pose = torch.einsum("kprl,kpjl->krj", rows, place).flatten(1)
            pose = pose + self.model.object_pose_scale(pose) ** -2
            first = pose.rsqrt() / _INITIAL_POSE_SCALE, code.rsqrt() / _INITIAL_SCALE
            self.spread.weight.zero_()
            self.spread.bias.copy_(torch.cat(first, dim=-1).log().flatten())

    def propose(self, parts: Capsules) -> KindProposals:
        there = as_presence(parts.presence, self.model.relaxed)[..., None]
        seen = torch.cat([there, there * parts.pose], dim=-1).flatten(-2)
        hidden = self.body(seen)
        pose, code = self._by_kind(self.center(hidden) + self.direct(seen))
        pose = poses.identity_like(pose) + pose
        if self.objects == "delta":
            return KindProposals(pose, code)
        pose_spread, code_spread = self._by_kind(self.spread(hidden))
        scales = _INITIAL_POSE_SCALE * pose_spread.exp(), _INITIAL_SCALE * code_spread.exp()
        return KindProposals(pose, code, *scales)

    def _by_kind(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        numbers = numbers.unflatten(-1, (self.model.kinds, 6 + self.model.codes))
        pose, code = numbers.split([6, self.model.codes], dim=-1)
        return pose, code
