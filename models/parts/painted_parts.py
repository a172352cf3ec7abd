"""Models of parts: parts have presences and poses, and paint the image.

A story draws the parts of an image from a `ChildDistribution`, with the choice of a parent
enumerated or summed out, and then the image from the parts:

    s_i ~ Categorical(dummy: epsilon, parent j: t_j rho_ij)           # (B, P), enumerated
    t_i ~ Bernoulli(gamma_{i, s_i})                                   # (B, P)
    A_i ~ Normal(vote_{i, s_i}, t_i sigma_{i, s_i} + (1 - t_i) sigma_off)               # (B, P, 6)
    image ~ Normal(over_i(warp(template_i, A_i), t_i warp(alpha_i, A_i)), sigma_image)
"""

from dataclasses import dataclass
from typing import Self

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.ops.indexing import Vindex
from torch import Tensor, nn

from capsule_zoo.data.registration import Settings
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive
from capsule_zoo.models.common.plates import bayesian_parameters, per_image
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.networks.leading import flat_batch, unflat_batch
from capsule_zoo.models.parts import templates
from capsule_zoo.models.parts.parent_selection import (
    Capsules,
    ChildDistribution,
    Level,
    LogitRelaxedBernoulli,
    ParentMixture,
    as_presence,
    pose_about_rotations,
)
from capsule_zoo.models.parts.part_sets import PartSets
from capsule_zoo.models.parts.pixel_mixture import PixelMixture

_BACKGROUND_WEIGHT = 0.1  # weight of the background, compared with alphas that reach 1


@dataclass(frozen=True)
class Painting(Settings):
    """The settings of how parts paint the image.

    Args:
        template_size: height and width of a part's template, in template pixels.
        instances: parts that share a template: part i is drawn with template i // instances.
        sigma_image: standard deviation of a pixel, in units of its range.
        background: "black", or "learned" for a trained image behind the parts.
        likelihood: "composite" (parts laid over each other, as in the paper of part-whole
            capsules) or "mixture" (each pixel from one part, as in stacked capsule autoencoders;
            `PixelMixture`).

    Raises:
        ValueError: a size below 1, a standard deviation that is not positive, an unknown option.
    """

    template_size: int = 11
    instances: int = 1
    sigma_image: float = 0.15
    background: str = "black"
    likelihood: str = "composite"

    def __post_init__(self) -> None:
        check_at_least(1, template_size=self.template_size, instances=self.instances)
        check_positive(sigma_image=self.sigma_image)
        check_one_of("background", self.background, ("black", "learned"))
        check_one_of("likelihood", self.likelihood, ("composite", "mixture"))


@dataclass(frozen=True)
class ObjectPose(Settings):
    """The prior of an object's pose: a normal distribution about one of several rotations.

    Args:
        sigma_top: standard deviation of an object's pose from a rotation, by coordinate. Where it
            is wide, objects copy the poses of their parts, and their presences carry no
            information.
        sigma_place: standard deviation of an object's position, x and y; by default `sigma_top`.
        rotations: number of rotations, spread evenly over the circle and equally likely, that are
            the means of an object's pose. With 1 the only mean is the identity. Many rotations are
            nearly a uniform distribution.

    Raises:
        ValueError: `rotations` below 1, or a standard deviation that is not positive.
    """

    sigma_top: float = 0.1
    sigma_place: float | None = None
    rotations: int = 1

    def __post_init__(self) -> None:
        check_at_least(1, rotations=self.rotations)
        check_positive(sigma_top=self.sigma_top)
        if self.sigma_place is not None:
            check_positive(sigma_place=self.sigma_place)

    def scale(self, like: Tensor) -> Tensor:
        """Return the standard deviations of a pose, (6,), in the dtype of `like`."""
        place = self.sigma_top if self.sigma_place is None else self.sigma_place
        return like.new_tensor([self.sigma_top, self.sigma_top, place] * 2)

    def distribution(self, like: Tensor) -> dist.TorchDistribution:
        """Return the prior of a pose, in the dtype of `like`."""
        return pose_about_rotations(self.rotations, self.scale(like))


class PartsModel(Model):
    """The base class of models of parts: levels of capsules, each of which is present or absent.

    Args:
        image_shape: (channels, height, width).
        levels: levels of capsules from the top down; the last is the parts.
        presence: "relaxed" (Concrete; for gradients) or "discrete" (Bernoulli; for reporting).
        temperature: temperature of the Concrete distribution of relaxed presences.

    Attributes:
        painted: the space of the images that the parts paint, whatever the model observes.
        scopes: the scopes that `with_scope` accepts.
        scope: the levels of the model, one of `scopes`.

    Raises:
        ValueError: an unknown presence, or a temperature that is not positive.
    """

    scopes: tuple[str, ...] = ("scene",)
    scope = "scene"

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        levels: tuple[Level, ...],
        presence: str,
        temperature: float,
    ) -> None:
        super().__init__()
        check_at_least(1, image_shape=image_shape)
        check_positive(temperature=temperature)
        check_one_of("presence", presence, ("relaxed", "discrete"))
        self.space = self.painted = ImageSpace(image_shape)
        self.levels = levels
        self.presence = presence
        self.temperature = temperature

    @property
    def relaxed(self) -> bool:
        return self.presence == "relaxed"

    @property
    def part_sets(self) -> PartSets:
        """The observation space of the scope "objects": one row (t, A) for each part."""
        return PartSets(self.levels[-1].size, 7)

    def with_scope(self, scope: str) -> Self:
        """Return the model reduced to one level, with shared parameters, for training in stages.

        Args:
            scope: one of `scopes`. "scene" is everything. In "parts" no object is drawn, so that
                parts can be learned first. In "objects" no image is painted: the parts are data.

        Raises:
            ValueError: an unknown scope.
        """
        check_one_of("scope", scope, self.scopes)
        space = self.part_sets if scope == "objects" else self.painted
        return self.sharing_parameters(scope=scope, space=space)

    def discretize(self) -> Self:
        """Return the model with Bernoulli presences and shared parameters."""
        return self.sharing_parameters(presence="discrete")

    def presence_distribution(self, logits: Tensor) -> dist.TorchDistribution:
        """Return the distribution of a presence site from the logit of its probability."""
        if self.relaxed:
            return LogitRelaxedBernoulli(logits.new_tensor(self.temperature), logits=logits)
        return dist.Bernoulli(logits=logits)


class PaintedParts(PartsModel):
    """The base class of models whose parts paint the image; subclasses write the levels above.

    A subclass makes its own parameters and then calls `_make_templates`.

    Args:
        image_shape: (channels, height, width); 1 channel (gray) or 3 (color).
        levels, presence, temperature: as for `PartsModel`.
        selection: way to sum out the choice of a parent, "marginal" or "enumerate"; the same
            density either way.
        painting: settings of how parts paint the image.
        pose: the prior of an object's pose.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        levels: tuple[Level, ...],
        *,
        selection: str,
        presence: str,
        temperature: float,
        painting: Painting,
        pose: ObjectPose,
    ) -> None:
        if len(image_shape) != 3 or image_shape[0] not in (1, 3):
            raise ValueError(
                f"image_shape must be (1 or 3 channels, height, width), not {image_shape!r}"
            )
        super().__init__(image_shape, levels, presence, temperature)
        check_one_of("selection", selection, ("marginal", "enumerate"))
        self.selection = selection
        self.painting = painting
        self.pose = pose

    @property
    def sigma_image(self) -> float:
        """The standard deviation of a pixel given its mean."""
        return self.painting.sigma_image

    @property
    def _part_groups(self) -> Level:
        """The level of the parts, grouped by the template that they share."""
        return self.levels[-1]._replace(exchangeable=self.painting.instances)

    def _make_templates(self) -> None:
        """Create the parameters of the templates and of the background."""
        size, channels = self.painting.template_size, self.image_shape[0]
        number = self._part_groups.groups
        self.template_logits = nn.Parameter(templates.faint((number, channels + 1, size, size)))
        if self.painting.background == "learned":
            self.background_logits = nn.Parameter(torch.full(self.image_shape, -3.0))

    def with_selection(self, selection: str) -> Self:
        """Return the model with shared parameters that sums out the selection in another way."""
        check_one_of("selection", selection, ("marginal", "enumerate"))
        return self.sharing_parameters(selection=selection)

    def discretize(self) -> Self:
        """Return the model with Bernoulli presences, no enumerated site, and shared parameters."""
        return self.sharing_parameters(presence="discrete", selection="marginal")

    def _draw_bayesian_parameters(self) -> None:
        """Sample the parameters that are a `PyroSample`, outside the plates and once in a call."""
        for module, name in bayesian_parameters(self):
            getattr(module, name)

    def _draw_enumerated(self, name: str, distribution: ChildDistribution) -> tuple[Tensor, Tensor]:
        """Sample children with the parent selection as an enumerated site."""
        choice = dist.Categorical(logits=distribution.log_weights)
        parent = pyro.sample(f"{name}_parent", choice, infer={"enumerate": "parallel"})
        logits = Vindex(distribution.presence_logits)[..., parent]
        presence = pyro.sample(f"{name}_presence", self.presence_distribution(logits))
        child_presence = as_presence(presence, self.relaxed)
        pose = pyro.sample(
            f"{name}_pose", distribution.chosen_pose_distribution(parent, child_presence)
        )
        return presence, pose

    def _marginal(self, name: str, distribution: ChildDistribution) -> tuple[Tensor, Tensor]:
        """Sample children with the parent selection summed out: from p(t), then from p(A | t)."""
        presence = pyro.sample(f"{name}_presence", self._presence_mixture(distribution))
        return presence, pyro.sample(f"{name}_pose", self._pose_mixture(distribution, presence))

    def _presence_mixture(self, distribution: ChildDistribution) -> ParentMixture:
        logits = distribution.presence_logits.expand_as(distribution.log_weights)
        return ParentMixture(
            dist.Categorical(logits=distribution.log_weights), self.presence_distribution(logits)
        )

    def _pose_mixture(self, distribution: ChildDistribution, presence: Tensor) -> ParentMixture:
        """Return p(A | t), a mixture over parents weighted by their prediction of the presence."""
        log_presence = self.presence_distribution(distribution.presence_logits).log_prob(
            presence[..., None]
        )
        choice = dist.Categorical(logits=distribution.log_weights + log_presence)
        return ParentMixture(
            choice, distribution.pose_distribution(as_presence(presence, self.relaxed))
        )

    def templates(self) -> tuple[Tensor, Tensor]:
        """Return every part's color (parts, C, h, w) and alpha (parts, 1, h, w), in [0, 1]."""
        return self._paint().split([self.image_shape[0], 1], dim=-3)

    def _paint(self) -> Tensor:
        return self._part_groups.spread(per_image(self.template_logits, 4).sigmoid(), -4)

    def layers(self, parts: Capsules) -> tuple[Tensor, Tensor]:
        """Render every part alone, parts first: color (parts, C, B, H, W), alpha (parts, 1, ...).

        Batch dims in front of B are flattened into it.
        """
        drawn = templates.warp_templates(self._paint(), parts.pose, self.image_shape[1:])
        part_presence = as_presence(flat_batch(parts.presence, 1), self.relaxed).T[
            :, None, :, None, None
        ]
        # split, not two slices: the backward of a slice fills a zero tensor of the whole stack
        color, alpha = drawn.split([self.image_shape[0], 1], dim=1)
        return color, alpha * part_presence

    def canvas(self, like: Tensor) -> Tensor:
        """Return the background, (C, 1, H, W), or (C, B, H, W) if it differs between images.

        Args:
            like: the alpha of the parts, (parts, 1, B, H, W).
        """
        if self.painting.background == "learned":
            behind = flat_batch(per_image(self.background_logits, 3).sigmoid(), 3)
            if behind.dim() == 3:
                return behind[:, None]
            return behind.repeat_interleave(like.shape[2] // len(behind), 0).transpose(0, 1)
        return like.new_zeros(self.image_shape)[:, None]

    def image_distribution(self, parts: Capsules) -> dist.TorchDistribution:
        """Return p(image | parts), batch shape (B, 1), event shape (C, H, W)."""
        if self.painting.likelihood == "mixture":
            return self._pixel_mixture(*self.layers(parts), parts.presence.shape[:-1])
        return dist.Normal(self.render(parts).unsqueeze(-4), self.sigma_image).to_event(3)

    def render(self, parts: Capsules) -> Tensor:
        """Render the mean images (B, C, H, W) of the parts' presences and poses."""
        batch = parts.presence.shape[:-1]
        color, alpha = self.layers(parts)
        if self.painting.likelihood == "mixture":
            return self._pixel_mixture(color, alpha, batch).mean.squeeze(-4)
        canvas = templates.over(color, alpha, self.canvas(alpha))
        return unflat_batch(canvas.transpose(0, 1), 0, batch)

    def _pixel_mixture(self, color: Tensor, alpha: Tensor, batch: torch.Size) -> PixelMixture:
        behind = self.canvas(alpha).expand(color.shape[1:])
        weight = F.pad(alpha, (0, 0) * 4 + (1, 0), value=_BACKGROUND_WEIGHT)
        colors = unflat_batch(torch.cat([behind[None], color]), 2, batch)
        return PixelMixture(colors, unflat_batch(weight, 2, batch), self.sigma_image)
