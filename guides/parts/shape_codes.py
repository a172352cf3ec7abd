"""Guides to shape codes: an encoder proposes parts, and each kind an object that explains them.

    parts    ~ q(parts | image)                                   # a `PartReader`'s network
    a_k, m_k = centers of the object's pose and code, were it of kind k              # every kind
    k        ~ softmax_k(log p(k, a_k, m_k, parts) - log q(a_k, m_k | k))            # (B, 1)
    A, c     ~ Normal(a_k, .), Normal(m_k, .)                     # of the kind that was drawn

Given the proposals of all kinds, the distribution of the kind is nearly the best one, softmax_k(log
pi_k + ELBO_k), and exactly the best one where the proposals are exact or are points. It needs no
network of its own. The kind is drawn, so that (k, A, c) has a density like any other draw, in
`evaluate` too. A guide `with_enumerated_kinds()` is for `TraceEnum_ELBO`, which sums the kind out
exactly, at a cost that grows with the number of kinds:

    ELBO = sum_k q(k) (log pi_k + ELBO_k - log q(k)) = log sum_k pi_k exp(ELBO_k)    at the best q

What computes the proposals of all kinds is an argument:

>>> ShapeCodesGuide(model, above=partial(KindNetwork, width=384))  # one network on the parts
>>> ShapeCodesGuide(model, above=RidgeKinds)                # ridge regressions, without a network
"""

from collections.abc import Callable
from typing import Self

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from capsule_zoo.guides.parts.guide import FIT_SETTINGS, PartsGuide, PoseHead
from capsule_zoo.guides.parts.kind_network import KindNetwork, KindProposals
from capsule_zoo.guides.parts.part_reader import OUTPUTS, PartReader, Proposal, move_capsules
from capsule_zoo.models.checks import check_labels, check_one_of
from capsule_zoo.models.common.remembering import Submodule
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import Capsules, as_presence
from capsule_zoo.models.parts.part_sets import from_part_sets
from capsule_zoo.models.shape_codes import ShapeCodes

_AT_ONCE = 2**16  # numbers in the poses of all kinds whose densities are computed at once


class ShapeCodesGuide(PartsGuide[ShapeCodes]):
    """The guide that encodes an image as parts and proposes an object of every kind from the parts.

    It is described at the top of this file.

    Args:
        model: the model to invert. A guide to a model in another scope draws the sites of that
            scope alone.
        pose: the distribution of the parts' poses, "delta" or "normal".
        objects: the distribution of the object's pose and code, "delta" or "normal".
        reader: the class of the part reader: `PartReader` or a partial of it.
        above: the class that proposes the objects: `KindNetwork`, `RidgeKinds` or a partial.

    Raises:
        ValueError: another kind of model, an unknown distribution, or a size below 1.
    """

    fit_settings = FIT_SETTINGS
    of_parts = ("read_parts.", "pose_head.")
    most_slots = 1

    def __init__(
        self,
        model: ShapeCodes,
        pose: str = "delta",
        *,
        objects: str = "normal",
        reader: Callable[..., PartReader] = PartReader,
        above: Callable[..., Submodule] = KindNetwork,
    ) -> None:
        check_one_of("objects", objects, self.poses)
        super().__init__(model, pose, reader, above)
        if model.slots > self.most_slots:
            raise ValueError(
                f"no guide of shape-codes reads several objects, but slots={model.slots}; leave "
                "slots=1, train the entry scenes, whose objects shape codes can draw "
                "(--set thing='\"shape-codes\"'), or build the pair in Python: "
                "RoutingSlots(ShapeCodes(slots=2, ...))"
            )
        self.objects = objects
        self.kind = "drawn"
        self.pose_head = PoseHead(OUTPUTS, model.levels[-1].size, pose)
        self.infer_objects = above(model, objects)

    def with_distributions(self, pose: str, objects: str) -> Self:
        """Return a guide with other distributions of pose and code, and copied weights.

        Train with points for the parts first. A new normal distribution of a part's pose starts at
        the point with a standard deviation of .02.
        """
        return self._copy_with(pose=pose, objects=objects)

    def propose(self, parts: Capsules) -> KindProposals:
        """Return the distributions of an object's pose and code for every kind, given parts."""
        return self.infer_objects(self.model, parts)

    def with_enumerated_kinds(self) -> "ShapeCodesGuide":
        """Return the guide, with shared parameters, whose kinds `TraceEnum_ELBO` sums out."""
        return self.sharing_parameters(kind="enumerated")

    def forward(
        self, images: Tensor, labels: Tensor | None = None, angle: Tensor | None = None
    ) -> Capsules:
        """Sample every site and return the parts.

        Args:
            labels: the kinds of the objects, (B,), where they are known.
            angle: rotation of each image, (B,), in radians, at which networks see the image and the
                parts; by default the best of the reader's `rotations`.
        """
        check_labels(labels, self.model.kinds)
        with pyro.plate("images", len(images), dim=-2):
            if self.model.scope == "objects":
                parts, frame = from_part_sets(images), None
            else:
                view, frame = self._view(images, angle)
                level = self.model.levels[-1]
                parts = self._draw(level, self.pose_head, self.read_parts(view), frame)
            if self.model.scope != "parts":
                self._draw_object(parts, frame, labels)
        return parts

    def _draw_object(self, parts: Capsules, frame: Tensor | None, labels: Tensor | None) -> None:
        """Sample the kind, the pose and the code of the object."""
        below = parts
        if frame is not None:
            below = move_capsules(parts, poses.inverse(frame))
        proposals = self.propose(below)
        if frame is not None:
            proposals = proposals._replace(pose=poses.compose(frame[:, None], proposals.pose))
        if labels is None:
            distribution = dist.Categorical(logits=self.kind_logits(parts, proposals)[..., None, :])
            infer = {"enumerate": "parallel"} if self.kind == "enumerated" else {}
            kind = pyro.sample("object_kind", distribution, infer=infer)
        else:
            kind = labels[:, None].long()
        pose, code = proposals.distributions(kind)
        pyro.sample("object_pose", pose)
        pyro.sample("object_code", code)

    @torch.no_grad()
    def kind_logits(self, parts: Capsules, proposals: KindProposals) -> Tensor:
        """Compute the logits of q(k), (B, K): log p(k, a_k, m_k, parts) - log q(a_k, m_k | k).

        They have no gradient. At the best q(k) the gradient of the ELBO through it is zero.
        """
        joint: Callable[..., Tensor] = self.model.log_joint_of_kinds
        if parts.presence.dim() > 2:  # there are plates outside the model
            return joint(parts, proposals.pose, proposals.code) - proposals.log_density_at_centers()
        rows = max(1, _AT_ONCE // proposals.pose[0].numel())
        tensors = (*parts, proposals.pose, proposals.code)
        chunks = zip(*(x.split(rows) for x in tensors), strict=True)
        found_in = [joint(Capsules(t, place), pose, code) for t, place, pose, code in chunks]
        return torch.cat(found_in) - proposals.log_density_at_centers()

    @torch.no_grad()
    def estimate_log_prob(self, parts: Capsules) -> Tensor:
        """Estimate log p(parts), (B,), in nats: the kind summed out, pose and code at the centers.

        Where the proposals are points it is a MAP objective, log p(parts, A, c) with k summed out.
        """
        return self.kind_logits(parts, self.propose(parts)).logsumexp(-1)

    def _pose_distribution(
        self, head: PoseHead, proposal: Proposal, presence: Tensor
    ) -> dist.TorchDistribution:
        """Return the distribution of poses; the pose of an absent part has the model's scale."""
        distribution = head(proposal.pose, proposal.features)
        if self.pose == "delta":
            return distribution
        part_presence = as_presence(presence, self.model.relaxed)[..., None]
        scale = (
            part_presence * distribution.base_dist.scale
            + (1 - part_presence) * self.model.shapes.sigma_off
        )
        return dist.Normal(proposal.pose, scale).to_event(1)
