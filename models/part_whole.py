"""Part-whole capsules: objects select and place their parts, and parts paint the image.

Story. A capsule is a presence (on or off) and a pose (an affine frame). Every part chooses a parent
among the objects that are present. The parent determines how likely the part is to be present, and
its pose. Each part that is present has a small learned template, which is warped by the part's pose
and laid over the parts before it. A dummy parent, always on, explains clutter. There may be any
number of levels between objects and parts. Each level relates to the level above as parts relate to
objects.

    t_k ~ Bernoulli(pi_k)                                         # objects, (B, K)
    A_k ~ Normal(identity, sigma_top)                             # (B, K, 6)
    s_i ~ Categorical(dummy: epsilon, object j: t_j rho_ij)       # parts, (B, P), enumerated
    t_i ~ Bernoulli(gamma_{i, s_i})                               # (B, P)
    A_i ~ Normal(A_{s_i} (I + M_{i, s_i}), t_i sigma_{i, s_i} + (1 - t_i) sigma_off)    # (B, P, 6)
    image ~ Normal(over_i(warp(template_i, A_i), t_i warp(alpha_i, A_i)), sigma_image)

Parts with types. In the story above a part is an individual: it has its own place in every object,
and a rotated stroke that another part explains is another part. With `types` parts that share a
template (`painting.instances`) are exchangeable. A part then also chooses its type, one of the
places that an object has for parts of this template:

    s_i, c_i ~ Categorical(dummy: epsilon, object j, type c: t_j rho_jc)    # (B, P)
    t_i ~ Bernoulli(gamma_jc)                                    # with j = s_i, c = c_i
    A_i ~ Normal(A_j (I + M_jc), t_i sigma_jc + (1 - t_i) sigma_off)

The type is summed out together with the parent. It cannot choose the template too, or the sum
would not factorize: the image couples all parts. Parts choose independently, so that two parts may
have one type. Parts of a template are exchangeable in the prior, not where they hide one another.

Given everything else the choices s_i are independent, so they are summed out exactly. With
`selection="enumerate"` Pyro's parallel enumeration does this. With `selection="marginal"` (equal up
to rounding) p(t_i) and p(A_i | t_i) are written as mixtures over the parents. For training,
presences are relaxed to Concrete variables, and their sites then hold logits.

References:
    Smith, Schut, Gal & van der Wilk 2020, "Capsule Networks -- A Probabilistic Perspective"
    (arXiv 2004.03553). Templates and the set transformer:
    Kosiorek, Sabour, Teh & Hinton 2019, "Stacked Capsule Autoencoders" (arXiv 1906.06818).
    The paper leaves open how a pose is parametrized (here: the six numbers of the matrix) and how a
    relaxed presence mixes the two scales (linearly). Its sizes are not known to us; the defaults
    are ours.
"""

from itertools import pairwise

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.models.base import Site
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.plates import per_image
from capsule_zoo.models.parts.painted_parts import ObjectPose, PaintedParts, Painting
from capsule_zoo.models.parts.parent_selection import Belonging, Capsules, Level, ParentSelection


class PartWholeCapsules(PaintedParts):
    """The generative model of part-whole capsules, described at the top of this file.

    Args:
        image_shape: (channels, height, width); 1 channel (gray) or 3 (color).
        objects: number of objects, the capsules of the top level.
        parts: number of parts.
        layers: capsules of every level from the top down, two or more; overrides both.
        types: number of types of parts. Parts that share a template are then exchangeable: a part
            chooses an object and one of the object's types. With 0 every part has a fixed place in
            an object.
        selection: "marginal" or "enumerate"; the same density either way.
        presence: "relaxed" (Concrete; for gradients) or "discrete" (Bernoulli; for reporting).
        temperature: temperature of the Concrete distribution of relaxed presences.
        painting: settings of how parts paint the image.
        pose: the prior of an object's pose.
        belonging: weights and standard deviations of children.

    Raises:
        ValueError: a size below 1, a standard deviation that is not positive, an unknown option.

    Called as `model(images=None, labels=None, batch_size=1)` it returns the image (B, C, H, W).
    The value of the image site has that shape too, although the images plate is at dim -2. Plates
    outside the model, at dim -3 and further left, add their dims in front of B. Presences cannot be
    enumerated (`EnumeratedPresence`). Parameters may be a `PyroSample`; see `models.plates`.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        objects: int = 32,
        parts: int = 16,
        *,
        layers: tuple[int, ...] | None = None,
        types: int = 0,
        selection: str = "marginal",
        presence: str = "relaxed",
        temperature: float = 0.5,
        painting: Painting = Painting(),
        pose: ObjectPose = ObjectPose(),
        belonging: Belonging = Belonging(),
    ) -> None:
        layers = (objects, parts) if layers is None else tuple(layers)
        if len(layers) < 2:
            raise ValueError(f"layers needs two levels or more, objects to parts, not {layers}")
        check_at_least(1, objects=objects, parts=parts, layers=layers)
        check_at_least(0, types=types)
        super().__init__(
            image_shape,
            _name_levels(layers, painting.instances if types else 1),
            selection=selection,
            presence=presence,
            temperature=temperature,
            painting=painting,
            pose=pose,
        )
        self.types = types
        self.plate_dims = {"images": -2, **{level.plate: -1 for level in self.levels}}
        self.presence_logits = nn.Parameter(torch.zeros(layers[0]))  # logit of pi
        scale = 0.3 ** (1 / (len(layers) - 1))
        of_types = [1] * (len(layers) - 2) + [max(types, 1)]
        self.selections = PyroModule[nn.ModuleList](
            ParentSelection(children, parents.size, belonging, scale, number)
            for (parents, children), number in zip(pairwise(self.levels), of_types, strict=True)
        )
        self._make_templates()

    @property
    def sites(self) -> tuple[Site, ...]:
        all_sites = []
        for level in self.levels:
            plates = ("images", level.plate)
            if self.selection == "enumerate" and level is not self.levels[0]:
                all_sites.append(
                    Site(f"{level.name}_parent", plates, discrete=True, enumerated=True)
                )
            all_sites.append(Site(f"{level.name}_presence", plates, discrete=not self.relaxed))
            all_sites.append(Site(f"{level.name}_pose", plates, event_dim=1))
        return tuple(all_sites)

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        self._draw_bayesian_parameters()
        batch = batch_size if images is None else len(images)
        top, *below = self.levels
        with pyro.plate("images", batch, dim=-2):
            with pyro.plate(top.plate, top.size, dim=-1):
                logits = per_image(self.presence_logits, 1)
                presence = pyro.sample("object_presence", self.presence_distribution(logits))
                pose = pyro.sample("object_pose", self.pose.distribution(logits))
            capsules = Capsules.from_sites(top, presence, pose)
            for level, selection in zip(below, self.selections, strict=True):
                distribution = selection(capsules, self.relaxed)
                with pyro.plate(level.plate, level.size, dim=-1):
                    draw = self._marginal if self.selection == "marginal" else self._draw_enumerated
                    presence, pose = draw(level.name, distribution)
                capsules = Capsules.from_sites(level, presence, pose)
            return self.sample_image(self.image_distribution(capsules), images)

    def responsibilities(self, parents: Capsules, children: Capsules, level: int = -1) -> Tensor:
        """Compute the posterior p(s_i | everything else) of each child's parent; column 0: dummy.

        Args:
            parents, children: the choices of two adjacent levels.
            level: index of the children's level among `selections`; the parts' by default.
        """
        choices = self.choices(parents, children, level)
        return self.selections[level].sum_types(choices)

    def choices(self, parents: Capsules, children: Capsules, level: int = -1) -> Tensor:
        """Compute the posterior of each child's choice, (B, children, 1 + parents * types).

        It is that of `responsibilities`, for pairs of a parent and a type; column 0: dummy.
        """
        distribution = self.selections[level](parents, self.relaxed)
        return self._pose_mixture(distribution, children.presence).responsibilities(children.pose)


def _name_levels(layers: tuple[int, ...], exchangeable: int) -> tuple[Level, ...]:
    between = [Level(f"group{i}", n) for i, n in enumerate(layers[1:-1], start=1)]
    return Level("object", layers[0]), *between, Level("part", layers[-1], exchangeable)
