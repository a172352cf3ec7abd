"""Part-whole capsules: objects choose and place their parts, parts paint the image.

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

Given everything else the choices s_i are independent, so they are summed out exactly. With
`selection="enumerate"` Pyro's parallel enumeration does this. With `selection="marginal"` (equal up
to rounding) p(t_i) and p(A_i | t_i) are written as mixtures over the parents. For training,
presences are relaxed to Concrete variables, and their sites then hold logits.

References:
    Smith, Schut, Gal & van der Wilk 2020, "Capsule Networks: A Generative Probabilistic
    Perspective" (arXiv 2004.03553). Templates and the set transformer:
    Kosiorek, Sabour, Teh & Hinton 2019, "Stacked Capsule Autoencoders" (arXiv 1906.06818).
    The paper leaves open how a pose is parametrized (here: the six numbers of the matrix) and how a
    relaxed presence mixes the two scales (linearly). Its sizes are not known to us; the defaults
    are ours.
"""

from __future__ import annotations

from itertools import pairwise

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.models.base import Site
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.plates import per_image
from capsule_zoo.models.parts.painted_parts import PaintedParts
from capsule_zoo.models.parts.parent_selection import Capsules, Level, ParentSelection
from capsule_zoo.models.parts.selection import pose_about_rotations


class PartWholeCapsules(PaintedParts):
    """The generative model of part-whole capsules, described at the top of this file.

    Args:
        image_shape: (channels, height, width); 1 channel (gray) or 3 (color).
        objects, parts: capsules of the usual two levels.
        layers: capsules of every level from the top down, two or more; overrides both.
        template_size: height and width of a part's template, in template pixels.
        selection: "marginal" or "enumerate"; the same density either way.
        presence: "relaxed" (Concrete; for gradients) or "discrete" (Bernoulli; for reporting).
        temperature: of the relaxed presences.
        sigma_image: deviation of a pixel, in units of its range.
        sigma_top: deviation of an object's pose from the identity, by coordinate. Where it is wide,
            objects copy the poses of their parts, and their presences carry no information.
        sigma_place: the same for the position alone, x and y; by default `sigma_top`.
        rotations: number of rotations, spread evenly over the circle and equally likely, that are
            the means of an object's pose. With 1 the only mean is the identity. Many rotations are
            nearly a uniform law.
        instances: parts that share a template: part i is drawn with template i // instances.
        sigma_min: least deviation of a child's pose from its parent's vote.
        sigma_off, sigma_dummy: the same for children that are off, or whose parent is the dummy.
        epsilon: weight of the dummy parent, compared with the parents' rho.
        dummy_presence: probability that a child of the dummy is present.
        background: "black", or "learned" for a trained image behind the parts.
        likelihood: "composite" (parts laid over each other, as in the paper) or "mixture" (each
            pixel from one part, as in stacked capsule autoencoders; `PixelMixture`).

    Raises:
        ValueError: a size below 1, a deviation that is not positive, an unknown option.

    Called as `model(images=None, labels=None, batch_size=1)` it returns the image (B, C, H, W).
    The image site is in the images plate at dim -2, so its value is (B, 1, C, H, W). Plates
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
        template_size: int = 11,
        selection: str = "marginal",
        presence: str = "relaxed",
        temperature: float = 0.5,
        sigma_image: float = 0.15,
        sigma_top: float = 0.1,
        sigma_place: float | None = None,
        rotations: int = 1,
        instances: int = 1,
        sigma_min: float = 0.02,
        sigma_off: float = 1.0,
        sigma_dummy: float = 1.0,
        epsilon: float = 0.02,
        dummy_presence: float = 0.01,
        background: str = "black",
        likelihood: str = "composite",
    ) -> None:
        super().__init__()
        self._set_options(
            image_shape=image_shape,
            selection=selection,
            presence=presence,
            temperature=temperature,
            sigma_image=sigma_image,
            instances=instances,
            background=background,
            likelihood=likelihood,
        )
        layers = (objects, parts) if layers is None else tuple(layers)
        if len(layers) < 2:
            raise ValueError(f"layers needs two levels or more, objects to parts, not {layers}")
        check_at_least(1, objects=objects, parts=parts, layers=layers)
        self._set_object_pose(rotations, sigma_top, sigma_place)

        self.levels = _name_levels(layers)
        self.plate_dims = {"images": -2, **{level.plate: -1 for level in self.levels}}
        self.presence_logits = nn.Parameter(torch.zeros(layers[0]))  # logit of pi
        self.selections = PyroModule[nn.ModuleList](
            ParentSelection(
                children,
                parents,
                epsilon=epsilon,
                dummy_presence=dummy_presence,
                sigma_min=sigma_min,
                sigma_off=sigma_off,
                sigma_dummy=sigma_dummy,
                child_scale=0.3 ** (1 / (len(layers) - 1)),
            )
            for parents, children in pairwise(layers)
        )
        self._make_templates(template_size)

    @property
    def sites(self) -> tuple[Site, ...]:
        found = []
        for level in self.levels:
            plates = ("images", level.plate)
            if self.selection == "enumerate" and level is not self.levels[0]:
                found.append(Site(f"{level.name}_parent", plates, discrete=True, enumerated=True))
            found.append(Site(f"{level.name}_presence", plates, discrete=not self.relaxed))
            found.append(Site(f"{level.name}_pose", plates, event_dim=1))
        return tuple(found)

    def object_pose_law(self) -> dist.TorchDistribution:
        """Return the law of an object's pose."""
        return pose_about_rotations(self.rotations, self.object_pose_scale(self.presence_logits))

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        self._draw_bayesian_parameters()
        batch = batch_size if images is None else len(images)
        top, *below = self.levels
        with pyro.plate("images", batch, dim=-2):
            with pyro.plate(top.plate, top.size, dim=-1):
                logits = per_image(self.presence_logits, 1)
                presence = pyro.sample("object_presence", self.presence_law(logits))
                pose = pyro.sample("object_pose", self.object_pose_law())
            capsules = Capsules.drawn(top, presence, pose)
            for level, selection in zip(below, self.selections, strict=True):
                law = selection(capsules, self.relaxed)
                with pyro.plate(level.plate, level.size, dim=-1):
                    draw = self._marginal if self.selection == "marginal" else self._enumerated
                    presence, pose = draw(level.name, law)
                capsules = Capsules.drawn(level, presence, pose)
            observed = None if images is None else images[:, None]
            return pyro.sample("image", self.image_law(capsules), obs=observed).squeeze(-4)

    def responsibilities(self, parents: Capsules, children: Capsules, level: int = -1) -> Tensor:
        """Compute p(s_i | everything else), (B, children, 1 + parents); column 0 is the dummy.

        Args:
            parents, children: the choices of two adjacent levels.
            level: index of the children's level among `selections`; the parts' by default.
        """
        law = self.selections[level](parents, self.relaxed)
        return self._pose_mixture(law, children.presence).responsibilities(children.pose)


def _name_levels(layers: tuple[int, ...]) -> tuple[Level, ...]:
    between = [Level(f"group{i}", n) for i, n in enumerate(layers[1:-1], start=1)]
    return Level("object", layers[0]), *between, Level("part", layers[-1])
