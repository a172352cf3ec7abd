"""The routings of the capsule network of 2017 as guides: from the image to its class capsules.

    maps = convolutions(image)                              # (B, channels, H', W')
    u_i  = squash(primary(maps))                            # primary capsules, (B, I, 8)
    V_ij = W_ij u_i                                         # votes, (B, I, J, 16)
    v_j  = routing(V_.j)                                    # class capsules, (B, J, 16)
    s_j  ~ Delta(squash^-1(v_j)) | Normal(squash^-1(v_j), scale_j)

The routing is an argument (`with_routing`), so that one set of weights can be read by dynamic
routing, EM or variational Bayes. Two sets of convolutions are known. "paper" has one layer of 9x9
and primary capsules on a grid, as published. "small" has four small layers with batch
normalization, and each primary capsule sees the whole image through a filter of its own: 16
capsules instead of 1,152, so that it trains on two cores.

References:
    Sabour, Frosst & Hinton 2017 (arXiv 1710.09829), section 4 and figure 1, for "paper".
    Mazzia, Salvetti & Chiaberge 2021, "Efficient-CapsNet" (Scientific Reports 11:14634), section 3,
    for "small": its layers and depthwise primary capsules, with a stride in the second layer
    instead of the fourth, which is a third of the work, and with routing instead of self-attention.
"""

from typing import Self

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.capsule_network import CapsuleNetwork, OverlappingCapsuleNetwork
from capsule_zoo.models.checks import check_at_least, check_one_of
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.models.routing.parent_distribution import (
    ParentDistribution,
    Routed,
    Routing,
    pay_for_connections,
)
from capsule_zoo.models.routing.vector_capsules import (
    CLASS,
    KERNEL,
    PRIMARY,
    first_transforms,
    keep_scale,
    primary_capsules,
    route_classes,
    squash,
    votes_for_classes,
)
from capsule_zoo.models.routing.votes import Votes

POSES = ("delta", "normal")
_INITIAL_SCALE = 0.05  # standard deviation of a fresh normal pose
_LONGEST = 12.0  # log-odds of a presence, at most: |v| = .999994
_SMALL_LAYERS = ((5, 1), (3, 2), (3, 1), (3, 1))  # kernel and stride


class PaperPrimary(PyroModule):
    """The paper's primary capsules: two convolutions of 9x9, the second with stride 2.

    Args:
        image_shape: (channels, height, width), 17x17 pixels or more.
        channels: maps of the first convolution.
        types: types of primary capsules at each position.
    """

    def __init__(self, image_shape: tuple[int, int, int], channels: int, types: int) -> None:
        super().__init__()
        check_at_least(1, channels=channels, types=types)
        inputs, height, width = image_shape
        check_at_least(2 * KERNEL - 1, **{"image_shape[1]": height, "image_shape[2]": width})
        self.first = PyroModule[nn.Conv2d](inputs, channels, KERNEL)
        self.second = PyroModule[nn.Conv2d](channels, types * PRIMARY, KERNEL, stride=2)
        keep_scale(self.first, inputs * KERNEL**2)
        keep_scale(self.second, channels * KERNEL**2)
        rows, columns = ((n - KERNEL + 1 - KERNEL) // 2 + 1 for n in (height, width))
        self.capsules = types * rows * columns

    def forward(self, images: Tensor) -> Tensor:
        """Compute primary capsules (B, capsules, 8) from images (B, C, H, W)."""
        return primary_capsules(self.second(self.first(images).relu()))


class SmallPrimary(PyroModule):
    """Four small convolutions, and primary capsules that each see the whole image.

    Args:
        image_shape: (channels, height, width), 15x15 pixels or more.
        channels: maps of the first convolution; the later ones have two, two and four times as
            many.
    """

    def __init__(self, image_shape: tuple[int, int, int], channels: int) -> None:
        super().__init__()
        check_at_least(PRIMARY // 4, channels=channels)
        if channels % (PRIMARY // 4):
            raise ValueError(
                f"channels must be even, so that capsules have {PRIMARY} numbers, not {channels}"
            )
        inputs, height, width = image_shape
        check_at_least(15, **{"image_shape[1]": height, "image_shape[2]": width})
        sizes = (channels, 2 * channels, 2 * channels, 4 * channels)
        layers: list[nn.Module] = []
        for outputs, (kernel, stride) in zip(sizes, _SMALL_LAYERS, strict=True):
            layers.append(PyroModule[nn.Conv2d](inputs, outputs, kernel, stride, bias=False))
            layers.append(PyroModule[nn.BatchNorm2d](outputs))
            layers.append(PyroModule[nn.ReLU]())
            height, width = ((n - kernel) // stride + 1 for n in (height, width))
            inputs = outputs
        self.maps = PyroModule[nn.Sequential](*layers)
        self.read = nn.Parameter(torch.randn(inputs, height, width) / (height * width) ** 0.5)
        self.capsules = inputs // PRIMARY

    def forward(self, images: Tensor) -> Tensor:
        """Compute primary capsules (B, capsules, 8) from images (B, C, H, W)."""
        numbers = (self.maps(images) * self.read).sum((2, 3))
        return squash(numbers.unflatten(1, (-1, PRIMARY)))


class RoutedCapsules(Routed, Guide[CapsuleNetwork]):
    """The guide q(class capsules | image) by convolutions and a routing.

    Args:
        model: the capsule network.
        routing: infers the class capsules from the votes, such as `DynamicRouting(3, fair=False)`.
        pose: "delta" for points, or "normal" with a learned standard deviation for every number.
        network: "small" or "paper".
        channels: maps of the first convolution; 32 for "small" and 256 for "paper" by default.
        types: types of primary capsules of "paper"; "small" does not use it.

    Raises:
        ValueError: another kind of model, an unknown name, a size that is too small.
    """

    def __init__(
        self,
        model: CapsuleNetwork,
        routing: Routing,
        pose: str = "delta",
        *,
        network: str = "small",
        channels: int | None = None,
        types: int = 32,
    ) -> None:
        super().__init__(model)
        check_one_of("pose", pose, POSES)
        check_one_of("network", network, ("small", "paper"))
        self.pose = pose
        if network == "paper":
            self.primary = PaperPrimary(model.image_shape, channels or 256, types)
        else:
            self.primary = SmallPrimary(model.image_shape, channels or 32)
        transform = first_transforms(self.primary.capsules, model.num_classes)
        self.transform = nn.Parameter(transform)  # W
        self.route_by(routing, self.primary.capsules, model.num_classes, CLASS)
        if pose == "normal":
            self.log_scale = _first_log_scale(model)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Draw the class capsules before squash and return them, (B, J, 16)."""
        loc = self.poses(self.model.network_inputs(images))
        with pyro.plate("images", len(images), dim=-1):
            pay_for_connections([self], 1.0)
            return pyro.sample("class_pose", self._distribution(loc))

    @pyro_method
    def poses(self, images: Tensor) -> Tensor:
        """Infer the class capsules before squash, (B, J, 16), from images (B, C, H, W).

        A presence is |v| = |s|^2 / (1 + |s|^2), so its log-odds are the logarithm of |s|^2.
        """
        logits, direction = self._classes(images)
        return (logits.clamp(max=_LONGEST) / 2).exp()[..., None] * direction

    @pyro_method
    def scores(self, images: Tensor) -> Tensor:
        """Compute the log-odds (B, J) of the classes' presences from images (B, C, H, W)."""
        return self._classes(images)[0]

    @pyro_method
    def predict(self, images: Tensor) -> Tensor:
        """Return the classes (B,) whose capsules are longest on images (B, C, H, W)."""
        self.model.space.check(images)
        return self.scores(images).argmax(-1)

    @torch.no_grad()
    def class_votes(self, images: Tensor) -> tuple[Votes, ParentDistribution]:
        """Return the votes for the class capsules and their distribution, for inspection."""
        return votes_for_classes(self.primary(images), self.transform, self.routing_connections())

    def with_poses(self, pose: str) -> Self:
        """Return a guide with shared networks and another distribution of the poses.

        A new normal distribution starts at the points with a standard deviation of .05.
        """
        check_one_of("pose", pose, POSES)
        other = self.sharing_parameters(pose=pose)
        if pose == "normal" and self.pose != "normal":
            other._parameters = dict(self._parameters)
            other.log_scale = _first_log_scale(self.model)
        return other

    def _classes(self, images: Tensor) -> tuple[Tensor, Tensor]:
        primary = self.primary(images)
        return route_classes(primary, self.transform, self.routing, self.routing_connections())

    def _distribution(self, loc: Tensor) -> dist.TorchDistribution:
        if self.pose == "delta":
            return dist.Delta(loc, event_dim=2)
        return dist.Normal(loc, self.log_scale.exp()).to_event(2)


class OverlappingRoutedCapsules(RoutedCapsules):
    """The guide q(class capsules | image over the one before it) of `OverlappingCapsuleNetwork`.

    `predict`, `scores` and `poses` take the overlay itself.

    Raises:
        ValueError: `model` is not an `OverlappingCapsuleNetwork`.
    """

    model_class = OverlappingCapsuleNetwork

    @torch.no_grad()
    def take_out(self, pairs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean image of the digits of classes (B,) in overlapping pairs (B, C, H, W)."""
        with eval_mode(self):
            return self.model.draw(squash(self.poses(pairs)), labels)


def _first_log_scale(model: CapsuleNetwork) -> nn.Parameter:
    start = torch.full((model.num_classes, CLASS), _INITIAL_SCALE)
    return nn.Parameter(start.log().to(next(model.parameters())))
