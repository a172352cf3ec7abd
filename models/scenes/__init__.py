"""Scenes: several objects on a ground, each drawn by any image model of the zoo.

Story. A picture has S slots. Each slot holds an object or none. An object has a pose (size, x, y
and, where wanted, an angle) and a picture, which an object model draws: a VAE, shape codes,
part-whole capsules, or any other model of small images. Objects hide the ground and each other.

    z_s ~ Bernoulli(rate / (1 + rate))        # presences, (B, S), or a prior of their number
    g   ~ the latents of the ground model, if the ground is one; its mean picture is the ground
    for each slot s, with names slot_<s>/<site>:
    w_s ~ Normal(0, (.15, .7, .7))            # pose: log size over the default, x, y, (B, 3)
    c_s ~ Normal(0, 1.5)                      # logits of a color, (B, C), where objects are masks
    d_s ~ Normal(0, 1)                        # depth, where objects have colors
    l_s ~ the latents of the object model
    a_s, p_s = the object model's mean picture as coverage and color, moved to w_s
    free  = prod_s (1 - z_s a_s)              # fraction of the ground, (B, 1, H, W)
    color = sum_s z_s a_s e^d_s p_s / sum_s z_s a_s e^d_s
    image ~ Normal((1 - free) color + free ground, sigma_image)

The ground model is any image model too, such as `Tones`: a color, or a few, for each scene.
x points to the right and y downwards, in half canvases from the middle. A picture of one channel is
the coverage of an object that is white (on gray canvases) or of one color (c_s). A picture of one
channel more than the canvas holds colors and, last, the coverage.

With counts="poisson" objects are a Poisson process in the plane: their number is Poisson with mean
rate * area, their places are uniform, and what is learned on small tiles reads pictures of any
size, see `guides.scenes.whole_pictures`.

Given everything else there are 2^S presences. They are few, and a guide sums them out.

References:
    Eslami, Heess, Weber, Tassa, Szepesvari, Kavukcuoglu & Hinton 2016, "Attend, Infer, Repeat"
    (arXiv 1603.08575). Their presences are a prefix of a sequence, and objects add up. Ours are
    sets, and objects hide each other.
"""

import itertools
import math
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import pyro_method
from torch import Tensor, nn
from torch.nn import functional as F

from capsule_zoo.data.leveling import Leveling
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.scenes.counts import CountDistribution, log_binomials, upto
from capsule_zoo.models.scenes.grounds import GRIDS, GROUNDS, SPREAD, Tones, enlarge_pictures
from capsule_zoo.models.scenes.pictures import AsObject, Drawn, Pictures, move_pictures, together
from capsule_zoo.models.scenes.places import UniformPlaces

_LEAST_FREE = 1e-4  # fraction of the ground that shows through, which keeps logarithms finite


class Scenes(Model):
    """The generative model of scenes, described at the top of this file.

    Args:
        image_shape: (channels, height, width) of a scene.
        thing: the object model, any `Model` of images whose image site has a mean. Its pictures
            have one channel, or one more than a scene.
        slots: S, the most objects of a scene.
        size: default height and width of an object's picture, in pixels.
        size_spread: standard deviation of the log size.
        size_distribution: "given" for the distribution of `size` and `size_spread`, or "learned":
            the median size and the standard deviation of the log size are parameters that start
            there.
        rotation: standard deviation of an object's angle, in radians; 0 for upright objects.
        rate: odds of the presence of one object in a slot; of "poisson", the expected number of
            objects in an area of size * size pixels.
        counts: "rate" for the distribution that `rate` gives, "learned", or "poisson": objects are
            a Poisson process, whose learned rate starts at `rate`. Their number grows with the
            area of the picture, their places are uniform (`UniformPlaces`), and slots are the
            largest number of objects in a picture of the model's own size.
        sigma_image: standard deviation of a pixel, in units of its range.
        ground: "black", "learned" (one color for all scenes), "learned-picture" (one picture for
            all, resized on another canvas), "color" (one for each scene), "picture" (of 10x10
            colors for each scene, with smooth transitions), or a ground model, any `Model` of
            images with the scene's channels.
        leveling: resizing, ground and contrast by which whole pictures become images.

    Raises:
        ValueError: a size below 1, a standard deviation that is not positive, an unknown option, an
            object model that does not fit or is none.

    Called as `model(images=None, labels=None, batch_size=1)` it returns the image (B, C, H, W).
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        thing: Model,
        slots: int = 3,
        *,
        size: float = 24.0,
        size_spread: float = 0.15,
        size_distribution: str = "given",
        rotation: float = 0.0,
        rate: float = 0.5,
        counts: str = "rate",
        sigma_image: float = 0.3,
        ground: str | Model = "black",
        leveling: Leveling | None = None,
    ) -> None:
        super().__init__()
        check_at_least(1, image_shape=image_shape, slots=slots)
        check_positive(size=size, size_spread=size_spread, rate=rate, sigma_image=sigma_image)
        check_at_least(0, rotation=rotation)
        check_one_of("counts", counts, ("rate", "learned", "poisson"))
        check_one_of("size_distribution", size_distribution, ("given", "learned"))
        if not isinstance(thing, Model):
            raise ValueError(f"thing must be a Model, such as create('vae').model, not {thing!r}")
        if not isinstance(ground, Model):
            check_one_of("ground", ground, GROUNDS)
        self.space = ImageSpace(image_shape)
        self.slots, self.size, self.size_spread, self.rotation = slots, size, size_spread, rotation
        self.rate, self.sigma_image = rate, sigma_image
        self.presence, self.leveling = "guided", leveling
        self.thing = thing
        if ground in GRIDS:
            ground = Tones(image_shape, GRIDS[ground], dict(thing.plate_dims))
        self.ground = ground
        self._check_thing()
        self.learned = counts == "learned"
        start = self._log_counts_of_rate(slots, torch.ones(()))
        self.count_logits = nn.Parameter(start) if self.learned else None
        intensity = torch.tensor(math.log(rate / size**2))  # log objects per pixel
        self.log_intensity = nn.Parameter(intensity) if counts == "poisson" else None
        size_start = torch.tensor(
            [0.0, math.log(size_spread)]
        )  # mean, log standard deviation of log size
        self.size_moments = nn.Parameter(size_start) if size_distribution == "learned" else None
        shape = {"learned": image_shape[:1], "learned-picture": image_shape}.get(str(ground))
        self.ground_logits = None if shape is None else nn.Parameter(torch.zeros(shape))

    def _check_thing(self) -> None:
        """Raise ValueError unless the object model can draw objects of this scene."""
        channels = self.image_shape[0]
        parts = {"thing": self.thing, "ground": self.ground_model}
        for name, part in parts.items():
            if part is not None and (part.supervised or not part.normalized):
                reason = "explains labels" if part.supervised else "has a density up to a constant"
                raise ValueError(
                    f"{name} is a {type(part).__name__}, which {reason}; choose a directed model "
                    "of images, such as that of the entry vae"
                )
        if self.thing.image_shape[0] not in (1, channels + 1):
            raise ValueError(
                f"thing draws pictures of {self.thing.image_shape[0]} channels; objects of scenes "
                f"of {channels} need 1 (a mask) or {channels + 1} (colors and a mask)"
            )
        for name, part in parts.items():
            if part is not None and any(site.enumerated for site in part.sites):
                raise ValueError(
                    f"{name} enumerates some of its sites; use its form that sums them out by "
                    'itself, such as selection="marginal"'
                )
        if self.ground_model is not None and (
            self.ground_model.image_shape[0] != channels
            or self.ground_model.plate_dims["images"] != self.plate_dims["images"]
        ):
            raise ValueError(
                f"ground draws pictures of {self.ground_model.image_shape[0]} channels in a plate "
                f"at dim {self.ground_model.plate_dims['images']}; the ground of these scenes "
                f"needs {channels} channels, at dim {self.plate_dims['images']} as thing has it"
            )

    @property
    def _like(self) -> Tensor:
        """A tensor with dtype and device of the object model, which may have no parameters."""
        held = itertools.chain(self.thing.parameters(), self.thing.buffers())
        return next(tensor for tensor in held if tensor.is_floating_point())

    @property
    def is_tinted(self) -> bool:
        """True if objects are masks with one color each."""
        return self.image_shape[0] > 1 and self.thing.image_shape[0] == 1

    @property
    def has_colors(self) -> bool:
        """True if objects have colors, so that their depths matter."""
        return self.image_shape[0] > 1 or self.thing.image_shape[0] > 1

    @property
    def ground_model(self) -> Model | None:
        """The model of the ground if every scene has a separate ground, else None."""
        return self.ground if isinstance(self.ground, Model) else None

    @property
    def pose_size(self) -> int:
        """The number of coordinates of an object's pose."""
        return 4 if self.rotation else 3

    @property
    def plate_dims(self) -> dict[str, int]:
        """The dims of the scene's plates, equal to the object model's."""
        return dict(self.thing.plate_dims)

    @property
    def sites(self) -> tuple[Site, ...]:
        images = ("images",)
        all_sites = []
        if self.presence != "all":
            summed = self.presence == "enumerate"
            all_sites.append(Site("scene_presence", images, 1, discrete=True, enumerated=summed))
        if self.ground_model is not None:
            all_sites += [
                replace(site, name=f"ground/{site.name}") for site in self.ground_model.sites
            ]
        one = [Site("scene_pose", images, 1)]
        if self.is_tinted:
            one.append(Site("scene_color", images, 1))
        if self.has_colors:
            one.append(Site("scene_depth", images))
        for slot in range(self.slots):
            for site in (*one, *self.thing.sites):
                all_sites.append(replace(site, name=f"slot_{slot}/{site.name}"))
        return tuple(all_sites)

    def orders(self) -> list[dict[str, str]]:
        """Return the S! permutations of the slots, each as a map from new to old site names.

        The density of the latents is the same under all of them.
        """
        first, slots = "slot_0/", range(self.slots)
        names = [s.name.removeprefix(first) for s in self.sites if s.name.startswith(first)]
        return [
            {f"slot_{new}/{n}": f"slot_{old}/{n}" for new, old in enumerate(order) for n in names}
            for order in itertools.permutations(slots)
        ]

    def discretize(self) -> "Scenes":
        """Return the model with the discrete forms of its object model and ground model."""
        parts = {"thing": self.thing, "ground": self.ground_model}
        new = {n: part.discretize() for n, part in parts.items() if part is not None}
        new = {name: part for name, part in new.items() if part is not parts[name]}
        return self.sharing_parameters(**new) if new else self

    def with_enumerated_presences(self) -> "Scenes":
        """Return the model, with shared parameters, that sums presences out by enumeration.

        It is meant for guides that do not draw them, such as Pyro's AutoGuides and free form.
        """
        return self if self.presence == "all" else self.sharing_parameters(presence="enumerate")

    def with_objects(self, number: int) -> "Scenes":
        """Return the model of scenes with `number` objects: p(image, objects | number)."""
        return self.with_slots(number).sharing_parameters(presence="all")

    def with_canvas(
        self, height: int, width: int, slots: int | None = None, rate: float | None = None
    ) -> "Scenes":
        """Return the model for another canvas, with shared parameters.

        Objects keep their size in pixels.

        Args:
            slots, rate: see `with_slots`.
        """
        check_at_least(1, height=height, width=width)
        shape, missing = (self.image_shape[0], height, width), self.missing_fill is not None
        space = ImageSpace(shape, may_miss=missing)
        return self.sharing_parameters(space=space).with_slots(slots or self.slots, rate)

    def with_slots(self, slots: int, rate: float | None = None) -> "Scenes":
        """Return the model for another number of slots, with shared parameters.

        Args:
            rate: odds of one object, which then determine the distribution of counts. By default
                the distribution is unchanged, and counts above its largest one have
                probability zero.
        """
        check_at_least(1, slots=slots)
        if rate is not None:
            check_positive(rate=rate)
            return self.sharing_parameters(slots=slots, rate=rate, learned=False)
        return self.sharing_parameters(slots=slots)

    def _log_counts_of_rate(self, slots: int, like: Tensor) -> Tensor:
        """Return the log probabilities of 0 to `slots` objects, (S + 1,), given `rate`."""
        number = upto(slots + 1, like)
        return (log_binomials(slots, like) + number * math.log(self.rate)).log_softmax(-1)

    @pyro_method
    def presence_distribution(self, like: Tensor) -> CountDistribution:
        """Return the prior of the presences of all slots."""
        if self.log_intensity is not None:
            number = upto(self.slots + 1, like)
            log_counts = number * self.log_expected_count() - (number + 1).lgamma()
            return CountDistribution(log_counts.log_softmax(-1), validate_args=False)
        if self.count_logits is None or not self.learned:
            return CountDistribution(
                self._log_counts_of_rate(self.slots, like), validate_args=False
            )
        log_probs = self.count_logits.log_softmax(-1)
        beyond = log_probs.new_full((max(0, self.slots + 1 - len(log_probs)),), -math.inf)
        counts = torch.cat([log_probs, beyond])[: self.slots + 1]
        return CountDistribution(counts.log_softmax(-1), validate_args=False)

    @pyro_method
    def log_expected_count(self) -> Tensor:
        """Return the log of the expected number of objects of a picture, for counts="poisson"."""
        if self.log_intensity is None:
            raise ValueError('only scenes with counts="poisson" have an expected number of objects')
        return self.log_intensity + math.log(self.image_shape[1] * self.image_shape[2])

    @pyro_method
    def pose_distribution(self, like: Tensor) -> dist.TorchDistribution:
        """Return the prior of the pose of one object, event (3,) or (4,)."""
        spread = [self.size_spread, 0.7, 0.7, self.rotation][: self.pose_size]
        scale = like.new_tensor(spread)
        mean = torch.zeros_like(scale)
        if self.size_moments is not None:
            size = self.size_moments
            mean = torch.cat([size[:1], mean[1:]])
            scale = torch.cat([size[1:].exp(), scale[1:]])
        if self.log_intensity is not None:
            return UniformPlaces(mean, scale, self.usual(like) / 2)
        return dist.Normal(mean, scale).to_event(1)

    def color_distribution(self, like: Tensor) -> dist.TorchDistribution:
        """Return the prior of the logits of an object's color, event (C,)."""
        return dist.Normal(like.new_zeros(self.image_shape[0]), SPREAD).to_event(1)

    def depth_distribution(self, like: Tensor) -> dist.TorchDistribution:
        """Return the prior of an object's depth, event ()."""
        return dist.Normal(like.new_zeros(()), like.new_ones(()))

    def usual(self, like: Tensor) -> Tensor:
        """Return an object's default half-size as a fraction of the half canvas, (2,), x and y."""
        _, height, width = self.image_shape
        return like.new_tensor([self.size / width, self.size / height])

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        plate = self.plate(batch_size if images is None else len(images))
        like = self._like
        infer = {"enumerate": "parallel"} if self.presence == "enumerate" else {}
        presence = like.new_ones(self.slots)
        if self.presence != "all":
            presence = self.draw(
                "scene_presence", self.presence_distribution(like), plate, infer=infer
            )
        with AsObject("ground"):
            ground = self.draw_ground(plate)
        placed = []
        for slot in range(self.slots):
            with AsObject(f"slot_{slot}"):
                placed.append(self.place_object(self.draw_object(plate)))
        mean = self.blend(presence[..., None, :], together(placed), ground).squeeze(-4)
        with plate:
            return self.sample_image(self.image_distribution(self.with_inner(mean, 3)), images)

    @pyro_method
    def draw_object(self, plate: pyro.plate) -> Drawn:
        """Sample one object for each scene of the plate; call it within `AsObject`."""
        like = self._like
        pose = self.draw("scene_pose", self.pose_distribution(like), plate)
        color = (
            self.draw("scene_color", self.color_distribution(like), plate)
            if self.is_tinted
            else None
        )
        depth = (
            self.draw("scene_depth", self.depth_distribution(like), plate)
            if self.has_colors
            else None
        )
        return Drawn(self.thing(batch_size=plate.size), pose, color, depth)

    @pyro_method
    def draw_ground(self, plate: pyro.plate) -> Tensor:
        """Sample the ground of each scene, (*batch, C, H, W), or a tensor that broadcasts to it.

        Call it within `AsObject`.
        """
        if self.ground_model is not None:
            return enlarge_pictures(self.ground_model(batch_size=plate.size), self.image_shape[1:])
        return self.shared_ground()

    @pyro_method
    def shared_ground(self) -> Tensor:
        """Return the fixed ground shared by all scenes, (C, 1, 1) or (C, H, W)."""
        if self.ground_logits is not None:
            ground = self.ground_logits.sigmoid()
            if ground.dim() == 1:
                return ground[:, None, None]
            return enlarge_pictures(ground[None], self.image_shape[1:])[0]
        return self._like.new_zeros(self.image_shape[0], 1, 1)

    def plate(self, batch: int) -> pyro.plate:
        """Return the plate of a batch of scenes."""
        return pyro.plate("images", batch, dim=self.plate_dims["images"])

    @property
    def inner(self) -> tuple[int, ...]:
        """The sizes (1) of the dims right of `images`, used only by plates of the object model."""
        return (1,) * (-1 - self.plate_dims["images"])

    def draw(
        self, name: str, distribution: dist.TorchDistribution, plate: pyro.plate, **options: Any
    ) -> Tensor:
        """Sample a site of the scene and return it without inner dims, (*batch, B, *event)."""
        with plate:
            return self.without_inner(
                pyro.sample(name, distribution, **options), distribution.event_dim
            )

    def with_inner(self, value: Tensor, event_dim: int) -> Tensor:
        """Add the dims of the object model's plates to a value (*batch, *event)."""
        last = value.dim() - event_dim
        return value.reshape(*value.shape[:last], *self.inner, *value.shape[last:])

    def without_inner(self, value: Tensor, event_dim: int) -> Tensor:
        """Remove the dims of the object model's plates from a value (*batch, *inner, *event)."""
        last = value.dim() - event_dim
        return value.reshape(*value.shape[: last - len(self.inner)], *value.shape[last:])

    def image_distribution(self, mean: Tensor) -> dist.TorchDistribution:
        """Return p(image | mean), event (C, H, W)."""
        return dist.Normal(mean, self.sigma_image).to_event(3)

    def log_likelihood(self, images: Tensor, means: Tensor) -> Tensor:
        """Compute log p(image | mean), (B, M), of images (B, C, H, W) and means (B, M, C, H, W).

        It is the log density of `image_distribution` in half of the time. A pixel that is NaN is
        left out.
        """
        targets, missing = images[:, None].expand_as(means), images.new_zeros(())
        if self.missing_fill is not None:
            hidden = images[:, None].isnan()
            targets, missing = (
                torch.where(hidden, means, targets),
                hidden.flatten(2).sum(-1).to(means),
            )
        error = F.mse_loss(means, targets, reduction="none").flatten(2).sum(-1)  # in one kernel
        log_normalizer = math.log(self.sigma_image * math.sqrt(math.tau))
        constant = images[0].numel() * log_normalizer - missing * log_normalizer
        return -0.5 * error / self.sigma_image**2 - constant

    def place_object(self, drawn: Drawn) -> Pictures:
        """Move one object of each scene to its pose, and return its pictures, with S = 1."""
        batch, size = drawn.pose.shape[:-1], self.image_shape[1:]
        picture = drawn.picture.expand(*batch, *drawn.picture.shape[-3:])
        if not self.has_colors or self.is_tinted:
            cover, color = move_pictures(picture, drawn.pose, size, self.usual(drawn.pose)), None
        else:
            whole = torch.cat([picture, torch.ones_like(picture[..., :1, :, :])], -3)
            canvases = move_pictures(whole, drawn.pose, size, self.usual(drawn.pose))
            color, cover, inside = canvases.split([self.image_shape[0], 1, 1], -3)
            color = color / inside.clamp_min(1e-3)
        if not self.thing.means_in_range:
            cover = cover.clamp(0, 1)
        if drawn.color is not None:
            color = drawn.color.expand(*batch, -1).sigmoid()[..., None, None]
        depth = None if drawn.depth is None else drawn.depth.expand(batch)[..., None]
        return Pictures(cover.unsqueeze(-4), None if color is None else color.unsqueeze(-4), depth)

    def blend(self, presences: Tensor, pictures: Pictures, ground: Tensor) -> Tensor:
        """Compute mean images (*batch, M, C, H, W) for M presences (*batch, M, S) of each scene.

        Args:
            ground: see `draw_ground`.
        """
        return self.mix_layers(
            [_sum_over_slots(presences, layer) for layer in self.layers(pictures)], ground
        )

    def layers(self, pictures: Pictures) -> list[Tensor]:
        """Compute each slot's terms in the sums of `mix_layers`, (*batch, S, 1 or C, H, W)."""
        free = (-(1 - _LEAST_FREE) * pictures.cover).log1p()
        if pictures.color is None or pictures.depth is None:
            return [free]
        weight = pictures.cover * pictures.depth.exp()[..., None, None, None]
        return [free, weight, weight * pictures.color]

    def mix_layers(self, sums: list[Tensor], ground: Tensor) -> Tensor:
        """Compute mean images from the terms of `layers`, summed over the present objects."""
        free, ground = sums[0].exp(), ground.unsqueeze(-4)
        if len(sums) == 1:
            return 1 - (free if self.ground == "black" else free * (1 - ground))
        fraction = (1 - free) / (sums[1] + 1e-6)  # one channel, like `free`
        return torch.addcmul(free * ground, fraction, sums[2])


def _sum_over_slots(presences: Tensor, values: Tensor) -> Tensor:
    """Compute sum_s z_ms v_s, (*batch, M, C, H, W); values are (*batch, S, C, H, W)."""
    return (presences @ values.flatten(-3)).unflatten(-1, values.shape[-3:])
