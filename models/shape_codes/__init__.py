"""Shape codes: an object of some kind, whose code determines the presence and pose of parts.

Story. A scene holds one object. The object is of one of several kinds, stands at a pose, and has a
shape code: a few numbers that deform the arrangement of parts that its kind has. Every part belongs
to the object, or to a dummy that explains clutter. The kind and the code determine a part's
probability of presence, and its pose in the object's frame. Parts paint the image as in
part-whole capsules.

    k   ~ Categorical(pi)                                         # kind of the object, (B, 1)
    A   ~ Normal(one of R rotations, sigma_top)                   # its pose, (B, 1, 6)
    c   ~ Normal(0, I)                                            # its shape code, (B, 1, d)
    s_i ~ Categorical(dummy: epsilon, the object: rho_ik)         # parts, (B, P), enumerated
    t_i ~ Bernoulli(sigmoid(g_ik + w_ik c))                       # (B, P)
    A_i ~ Normal(A (N_ik + U_ik c), t_i sigma_ik + (1 - t_i) sigma_off)           # (B, P, 6)
    image ~ Normal(over_i(warp(template_i, A_i), t_i warp(alpha_i, A_i)), sigma_image)

Several objects in a scene are S slots. Each has a separate kind, pose and code, (B, S, ...),
and every part chooses among the dummy and the slots:

    s_i ~ Categorical(dummy: epsilon, slot s: rho_ik of its kind)

All parts of an object may be present at once, so that two objects need twice as many parts: as many
instances of a template as there are slots.

A (N + U c) is the affine product. Kinds exclude each other, and codes say where all parts are
together. The objects of part-whole capsules are independent and rigid, so that their prior knows
little of which parts go together.

Given everything else the choices s_i are independent. They are summed out as in part-whole
capsules. The kind can be summed out exactly too: by a guide that enumerates it, with a distribution
of A and c for every kind, or by the model itself (`with_enumerated_kinds`), for guides that do not
draw it.

References:
    Part-whole capsules: Smith, Schut, Gal & van der Wilk 2020 (arXiv 2004.03553). Relatives of the
    codes: Cootes, Taylor, Cooper & Graham 1995, "Active Shape Models"; the special features of
    Kosiorek, Sabour, Teh & Hinton 2019 (arXiv 1906.06818); mixtures of factor analyzers
    (Ghahramani & Hinton 1996).
"""

from contextlib import nullcontext
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from capsule_zoo.models.base import Site
from capsule_zoo.models.checks import check_at_least, check_labels
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.painted_parts import ObjectPose, PaintedParts, Painting
from capsule_zoo.models.parts.parent_selection import Belonging, Capsules, Level
from capsule_zoo.models.shape_codes.kinds import ShapeKinds


class ShapeCodes(PaintedParts):
    """The generative model of objects with shape codes, described at the top of this file.

    Args:
        image_shape: (channels, height, width); 1 channel (gray) or 3 (color).
        kinds: kinds of objects.
        parts: parts of an image.
        codes: numbers of a shape code.
        slots: S, objects in a scene; more than 1 in Python only, with the guide `RoutingSlots`.
        selection, presence, temperature, painting, pose: as for `PaintedParts`.
        belonging: weights and standard deviations of parts.

    Raises:
        ValueError: a size below 1, a standard deviation that is not positive, an unknown option.

    Called as `model(images=None, labels=None, batch_size=1)` it returns the image (B, C, H, W).
    Where labels (B,) are given they are the kinds of the objects. The model may be reduced to a
    scope, see `with_scope`: in "parts" the object is of the first kind, at the identity, with a
    code of zeros; in "objects" presences are observed, 0 or 1 (`as_part_sets`).
    """

    scopes = ("scene", "objects", "parts")

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        kinds: int = 32,
        parts: int = 16,
        codes: int = 16,
        *,
        slots: int = 1,
        selection: str = "marginal",
        presence: str = "relaxed",
        temperature: float = 0.5,
        painting: Painting = Painting(),
        pose: ObjectPose = ObjectPose(),
        belonging: Belonging = Belonging(),
    ) -> None:
        check_at_least(1, kinds=kinds, parts=parts, codes=codes, slots=slots)
        super().__init__(
            image_shape,
            (Level("part", parts),),
            selection=selection,
            presence=presence,
            temperature=temperature,
            painting=painting,
            pose=pose,
        )
        self.plate_dims = {"images": -2, "parts": -1} | ({"slots": -1} if slots > 1 else {})
        self.codes = codes
        self.slots = slots
        self.kind = "guided"
        self.kind_logits = nn.Parameter(torch.zeros(kinds))  # log pi
        self.shapes = ShapeKinds(kinds, parts, codes, belonging)
        self._make_templates()

    @property
    def kinds(self) -> int:
        """The number of kinds."""
        return len(self.kind_logits)

    @property
    def sites(self) -> tuple[Site, ...]:
        images, both = ("images",), ("images", "parts")
        object_plates = ("images", "slots") if self.slots > 1 else images
        kind = Site(
            "object_kind", object_plates, discrete=True, enumerated=self.kind == "enumerate"
        )
        objects = (
            kind,
            Site("object_pose", object_plates, 1),
            Site("object_code", object_plates, 1),
        )
        parts: tuple[Site, ...] = (
            Site("part_presence", both, discrete=not self.relaxed),
            Site("part_pose", both, event_dim=1),
        )
        if self.selection == "enumerate":
            parts = (Site("part_parent", both, discrete=True, enumerated=True), *parts)
        return {"scene": objects + parts, "objects": objects, "parts": parts}[self.scope]

    @property
    def relaxed(self) -> bool:
        return super().relaxed and self.scope != "objects"

    def with_enumerated_kinds(self) -> "ShapeCodes":
        """Return the model, with shared parameters, that sums out the kind by enumeration.

        It is meant for guides that do not draw the kind, such as Pyro's AutoGuides.

        Raises:
            ValueError: several slots, whose kinds depend on each other given the parts.
        """
        self._refuse_slots("with_enumerated_kinds")
        return self.sharing_parameters(kind="enumerate")

    def _refuse_slots(self, name: str) -> None:
        """Raise ValueError if the model has several slots."""
        if self.slots > 1:
            raise ValueError(
                f"{name} needs one object in a scene, but the model has slots={self.slots}; build "
                "it with slots=1"
            )

    def object_code_distribution(self) -> dist.TorchDistribution:
        """Return the prior of the object's shape code."""
        return dist.Normal(self.kind_logits.new_zeros(self.codes), 1.0).to_event(1)

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        if labels is not None:
            self._refuse_slots("labels")
        check_labels(labels, self.kinds)
        batch = batch_size if images is None else len(images)
        with pyro.plate("images", batch, dim=-2):
            kind, pose, code = self._draw_object(labels)
            if self.scope == "objects":
                observation = None if images is None else images[:, 0]
                with pyro.plate("parts", self.levels[-1].size, dim=-1):
                    distribution = self.shapes.part_distribution(kind, pose, code)
                    return pyro.sample("part", distribution, obs=observation).unsqueeze(-3)
            draw = self._marginal if self.selection == "marginal" else self._draw_enumerated
            with pyro.plate("parts", self.levels[-1].size, dim=-1):
                parts = draw("part", self.shapes(kind, pose, code))
            drawn = Capsules.from_sites(self.levels[-1], *parts)
            return self.sample_image(self.image_distribution(drawn), images)

    def _draw_object(self, labels: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Sample kind (B, 1), pose (B, 1, 6) and code (B, 1, d), or return the object at rest."""
        if self.scope == "parts":
            like = self.kind_logits
            rest = poses.identity_like(like).view(1, 1, 6), like.new_zeros(1, 1, self.codes)
            return torch.zeros(1, 1, dtype=torch.long, device=like.device), *rest
        options: dict[str, Any] = {} if labels is None else {"obs": labels[:, None].long()}
        if self.kind == "enumerate":
            options["infer"] = {"enumerate": "parallel"}
        slot_plate = pyro.plate("slots", self.slots, dim=-1) if self.slots > 1 else nullcontext()
        with slot_plate:
            kind = pyro.sample("object_kind", dist.Categorical(logits=self.kind_logits), **options)
            pose = pyro.sample("object_pose", self.pose.distribution(self.kind_logits))
            return kind, pose, pyro.sample("object_code", self.object_code_distribution())

    def responsibilities(self, kind: Tensor, pose: Tensor, code: Tensor, parts: Capsules) -> Tensor:
        """Compute the posterior p(s_i | everything else) of each part's parent, (B, P, 1 + S).

        Args:
            kind, pose, code: values of the objects' sites, (B, S), (B, S, 6) and (B, S, d).
            parts: values of the parts' sites.
        """
        distribution = self.shapes(kind, pose, code)
        return self._pose_mixture(distribution, parts.presence).responsibilities(parts.pose)

    def log_joint_of_slots(
        self, parts: Capsules, kind: Tensor, pose: Tensor, code: Tensor
    ) -> Tensor:
        """Compute log p(k, A, c, parts) at given objects, (B,), in nats, in closed form.

        Args:
            parts: values of the parts' sites.
            kind, pose, code: values of the objects' sites, (B, S), (B, S, 6) and (B, S, d).
        """
        top = self.pose.distribution(self.kind_logits).log_prob(
            pose
        ) + self.object_code_distribution().log_prob(code)
        below = self._log_density_of_parts(parts, kind, pose, code)
        return top.sum(-1) + below + self.kind_logits.log_softmax(-1)[kind].sum(-1)

    def log_joint_of_kinds(self, parts: Capsules, pose: Tensor, code: Tensor) -> Tensor:
        """Compute log p(k, A, c, parts) for every kind, (B, K), in nats, in closed form.

        Raises:
            ValueError: several slots; see `log_joint_of_slots`.

        Args:
            parts: values of the parts' sites. In the scope "objects" the poses of parts that are
                off are summed out.
            pose: a pose for every kind, (B, K, 6).
            code: a code for every kind, (B, K, d).
        """
        self._refuse_slots("log_joint_of_kinds")
        kinds = torch.arange(self.kinds, device=pose.device)
        kind = kinds.view(-1, *[1] * (pose.dim() - 1))  # (K, 1, ..., 1)
        pose, code = (x.movedim(-2, 0).unsqueeze(-2) for x in (pose, code))  # (K, B, 1, ...)
        return self.log_joint_of_slots(parts, kind, pose, code).movedim(0, -1)

    def _log_density_of_parts(
        self, parts: Capsules, kind: Tensor, pose: Tensor, code: Tensor
    ) -> Tensor:
        """Compute log p(parts | k, A, c), summed over parts."""
        if self.scope == "objects":
            value = torch.cat([parts.presence[..., None], parts.pose], dim=-1)
            return self.shapes.part_distribution(kind, pose, code).log_prob(value).sum(-1)
        distribution = self.shapes(kind, pose, code)
        presence = self._presence_mixture(distribution).log_prob(parts.presence)
        return (
            presence + self._pose_mixture(distribution, parts.presence).log_prob(parts.pose)
        ).sum(-1)
