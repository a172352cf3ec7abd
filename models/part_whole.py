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
    The paper leaves open how a pose is parametrised (here: the six numbers of the matrix), how a
    relaxed presence mixes the two scales (linearly), and all sizes; these are arguments.
"""

from __future__ import annotations

from itertools import pairwise

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from pyro.ops.indexing import Vindex
from torch import Tensor, nn

from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.blocks import templates
from capsule_zoo.models.blocks.leading import flat_batch, unflat_batch
from capsule_zoo.models.blocks.parent_selection import (
    Capsules,
    ChildLaw,
    Level,
    ParentSelection,
)
from capsule_zoo.models.blocks.pixel_mixture import PixelMixture
from capsule_zoo.models.blocks.plates import bayesian_parameters, per_image
from capsule_zoo.models.blocks.selection import (
    LogitRelaxedBernoulli,
    ParentMixture,
    as_presence,
    pose_about_rotations,
)
from capsule_zoo.models.blocks.spaces import ImageSpace
from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive

_BACKGROUND_WEIGHT = 0.1  # weight of the background, compared with alphas that reach 1


class PartWholeCapsules(Model):
    """The generative model of part-whole capsules, described at the top of this file.

    Args:
        objects, parts: capsules of the usual two levels.
        layers: capsules of every level from the top down, two or more; overrides both.
        template_size: height and width of a part's template, in template pixels.
        image_size: height and width of the images, in pixels; one number for a square.
        channels: 1 (grey) or 3 (colour).
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
    enumerated (`EnumeratedPresence`). Parameters may be a `PyroSample`; see `models.blocks.plates`.
    """

    def __init__(
        self,
        objects: int = 32,
        parts: int = 16,
        *,
        layers: tuple[int, ...] | None = None,
        template_size: int = 11,
        image_size: int | tuple[int, int] = 28,
        channels: int = 1,
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
        layers = (objects, parts) if layers is None else tuple(layers)
        if len(layers) < 2:
            raise ValueError(f"layers needs two levels or more, objects to parts, not {layers}")
        height, width = templates.height_and_width(image_size)
        check_at_least(1, objects=objects, parts=parts, rotations=rotations, instances=instances)
        check_at_least(1, layers=layers, template_size=template_size, image_size=image_size)
        check_positive(temperature=temperature, sigma_image=sigma_image, sigma_top=sigma_top)
        check_positive(sigma_min=sigma_min, sigma_off=sigma_off, sigma_dummy=sigma_dummy)
        sigma_place = sigma_top if sigma_place is None else sigma_place
        check_positive(epsilon=epsilon, sigma_place=sigma_place)
        if not 0 < dummy_presence < 1:
            raise ValueError(f"dummy_presence must lie inside (0, 1), not {dummy_presence!r}")
        check_one_of("channels", channels, (1, 3))
        check_one_of("selection", selection, ("marginal", "enumerate"))
        check_one_of("presence", presence, ("relaxed", "discrete"))
        check_one_of("background", background, ("black", "learned"))
        check_one_of("likelihood", likelihood, ("composite", "mixture"))

        self.levels = _name_levels(layers)
        self.plate_dims = {"images": -2, **{level.plate: -1 for level in self.levels}}
        self.space = ImageSpace((channels, height, width))
        self.selection, self.presence, self.temperature = selection, presence, temperature
        self.sigma_image, self.rotations, self.instances = sigma_image, rotations, instances
        self.sigma_top, self.sigma_place = sigma_top, sigma_place
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
        shape = (-(-layers[-1] // instances), channels + 1, template_size, template_size)
        self.template_logits = nn.Parameter(templates.faint(shape))  # colour, then alpha
        if background == "learned":
            self.background_logits = nn.Parameter(torch.full(self.image_shape, -3.0))
        self.background, self.likelihood = background, likelihood

    @property
    def relaxed(self) -> bool:
        return self.presence == "relaxed"

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

    def with_selection(self, selection: str) -> PartWholeCapsules:
        """Return the model with the same parameters and another way to sum out the selection."""
        check_one_of("selection", selection, ("marginal", "enumerate"))
        return self.sharing_parameters(selection=selection)

    def discretized(self) -> PartWholeCapsules:
        """Return the model with the same parameters, Bernoulli presences and no enumerated site."""
        return self.sharing_parameters(presence="discrete", selection="marginal")

    def presence_law(self, logits: Tensor) -> dist.TorchDistribution:
        """Return the law of a presence site from the logit of its probability."""
        if self.relaxed:
            return LogitRelaxedBernoulli(logits.new_tensor(self.temperature), logits=logits)
        return dist.Bernoulli(logits=logits)

    def object_pose_law(self) -> dist.TorchDistribution:
        """Return the law of an object's pose."""
        row = [self.sigma_top, self.sigma_top, self.sigma_place]
        return pose_about_rotations(self.rotations, self.presence_logits.new_tensor(row + row))

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

    def _draw_bayesian_parameters(self) -> None:
        """Draw the parameters that are a `PyroSample`, outside the plates and once in a call."""
        for module, name in bayesian_parameters(self):
            getattr(module, name)

    def _enumerated(self, name: str, law: ChildLaw) -> tuple[Tensor, Tensor]:
        """Draw children whose choice of a parent is an enumerated site."""
        choice = dist.Categorical(logits=law.log_weights)
        parent = pyro.sample(f"{name}_parent", choice, infer={"enumerate": "parallel"})
        logits = Vindex(law.presence_logits)[..., parent]
        presence = pyro.sample(f"{name}_presence", self.presence_law(logits))
        there = as_presence(presence, self.relaxed)
        scale_on = Vindex(law.scale_on)[..., parent]
        scale_off = Vindex(law.scale_off)[..., parent]
        scale = there * scale_on + (1 - there) * scale_off
        vote = Vindex(law.vote)[..., parent, :]
        pose = pyro.sample(f"{name}_pose", dist.Normal(vote, scale[..., None]).to_event(1))
        return presence, pose

    def _marginal(self, name: str, law: ChildLaw) -> tuple[Tensor, Tensor]:
        """Draw children with the choice of a parent summed out: from p(t), then from p(A | t)."""
        presence = pyro.sample(f"{name}_presence", self._presence_mixture(law))
        return presence, pyro.sample(f"{name}_pose", self._pose_mixture(law, presence))

    def _presence_mixture(self, law: ChildLaw) -> ParentMixture:
        logits = law.presence_logits.expand_as(law.log_weights)
        return ParentMixture(dist.Categorical(logits=law.log_weights), self.presence_law(logits))

    def _pose_mixture(self, law: ChildLaw, presence: Tensor) -> ParentMixture:
        """Return p(A | t), with each choice weighted by how well it predicts the presence."""
        foretold = self.presence_law(law.presence_logits).log_prob(presence[..., None])
        choice = dist.Categorical(logits=law.log_weights + foretold)
        return ParentMixture(choice, law.pose_law(as_presence(presence, self.relaxed)))

    def responsibilities(self, parents: Capsules, children: Capsules, level: int = -1) -> Tensor:
        """Compute p(s_i | everything else), (B, children, 1 + parents); column 0 is the dummy.

        Args:
            parents, children: the choices of two adjacent levels.
            level: index of the children's level among `selections`; the parts' by default.
        """
        law = self.selections[level](parents, self.relaxed)
        return self._pose_mixture(law, children.presence).responsibilities(children.pose)

    def templates(self) -> tuple[Tensor, Tensor]:
        """Return every part's colour (parts, C, h, w) and alpha (parts, 1, h, w), in [0, 1]."""
        return self._paint().split([self.image_shape[0], 1], dim=-3)

    def _paint(self) -> Tensor:
        paint = per_image(self.template_logits, 4).sigmoid().repeat_interleave(self.instances, -4)
        return paint[..., : self.levels[-1].size, :, :, :]

    def layers(self, parts: Capsules) -> tuple[Tensor, Tensor]:
        """Render every part alone, part-major: colour (parts, C, B, H, W), alpha (parts, 1, ...).

        Batch dims in front of B are flattened into it.
        """
        drawn = templates.warp_templates(self._paint(), parts.pose, self.image_shape[1:])
        there = as_presence(flat_batch(parts.presence, 1), self.relaxed).T[:, None, :, None, None]
        # split, not two slices: the backward of a slice fills a zero tensor of the whole stack
        colour, alpha = drawn.split([self.image_shape[0], 1], dim=1)
        return colour, alpha * there

    def canvas(self, like: Tensor) -> Tensor:
        """Return the background, (C, 1, H, W), or (C, B, H, W) where images differ in it.

        Args:
            like: the alpha of the parts, (parts, 1, B, H, W).
        """
        if self.background == "learned":
            behind = flat_batch(per_image(self.background_logits, 3).sigmoid(), 3)
            if behind.dim() == 3:
                return behind[:, None]
            return behind.repeat_interleave(like.shape[2] // len(behind), 0).transpose(0, 1)
        return like.new_zeros(self.image_shape)[:, None]

    def image_law(self, parts: Capsules) -> dist.TorchDistribution:
        """Return the law of the image site, with batch shape (B, 1) and event shape (C, H, W)."""
        if self.likelihood == "mixture":
            return self._pixel_mixture(*self.layers(parts), parts.presence.shape[:-1])
        return dist.Normal(self.render(parts).unsqueeze(-4), self.sigma_image).to_event(3)

    def render(self, parts: Capsules) -> Tensor:
        """Render the mean image (B, C, H, W) for the parts' presences and poses."""
        batch = parts.presence.shape[:-1]
        colour, alpha = self.layers(parts)
        if self.likelihood == "mixture":
            return self._pixel_mixture(colour, alpha, batch).mean.squeeze(-4)
        canvas = templates.over(colour, alpha, self.canvas(alpha))
        return unflat_batch(canvas.transpose(0, 1), 0, batch)

    def _pixel_mixture(self, colour: Tensor, alpha: Tensor, batch: torch.Size) -> PixelMixture:
        behind = self.canvas(alpha).expand(colour.shape[1:])
        weight = F.pad(alpha, (0, 0) * 4 + (1, 0), value=_BACKGROUND_WEIGHT)
        colours = unflat_batch(torch.cat([behind[None], colour]), 2, batch)
        return PixelMixture(colours, unflat_batch(weight, 2, batch), self.sigma_image)


def _name_levels(layers: tuple[int, ...]) -> tuple[Level, ...]:
    between = [Level(f"group{i}", n) for i, n in enumerate(layers[1:-1], start=1)]
    return Level("object", layers[0]), *between, Level("part", layers[-1])
