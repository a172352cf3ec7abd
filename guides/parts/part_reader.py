"""The part reader: a network that proposes the parts of an image, and the views it may have.

    features = CNN(image)                              # four 3x3 convolutions
    (logit_i, A_i, features_i) = attention_pooling(features)[i]      # (B, P), (B, P, 6), (B, P, F)

The settings and the network are two objects. `PartReader` holds the settings, can be compared and
printed, and knows no model. `PartReader.build` makes the network for images and parts of a given
number:

>>> reader = PartReader(channels=32).build(image_shape=(1, 28, 28), parts=24)
>>> reader(images)                                     # -> Proposal: logits, poses, features

References:
    Encoder and sizes after Kosiorek et al. 2019 (arXiv 1906.06818), appendix.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.parts.turns import centered, turned
from capsule_zoo.models.checks import check_at_least, check_positive
from capsule_zoo.models.common.remembering import Settings
from capsule_zoo.models.networks.layers import ELU, AttentionPooling, elu
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import Capsules

OUTPUTS = 7 + 16  # presence logit, raw pose, and features from which deviations are computed
_SMALLEST = 0.01  # scale of a part, in units of half an image


class Proposal(NamedTuple):
    """The numbers that define the law of the capsules of one level.

    Attributes:
        logits: logits of the presences, (B, capsules).
        pose: centers of the poses, (B, capsules, 6).
        features: numbers from which deviations are computed, (B, capsules, features).
    """

    logits: Tensor
    pose: Tensor
    features: Tensor


_Posed = TypeVar("_Posed", Capsules, Proposal)


def moved(capsules: _Posed, frame: Tensor) -> _Posed:
    """Return the same with poses (B, capsules, 6) moved by one pose for each image, (B, 6)."""
    return capsules._replace(pose=poses.compose(frame[:, None], capsules.pose))


@dataclass(frozen=True)
class PartReader(Settings):
    """The settings of a reader of parts.

    Args:
        channels: width of the convolutions.
        max_scale: largest part, in units of half an image.
        anisotropy: bound on a part's stretch, or None. Bounded parts become strokes; free ones
            become blobs that are stretched into strokes (`poses.from_parameters`).
        coordinates: whether the pooling gets the position of each feature on the image. Otherwise
            positions follow only from the padding at the image's edge, which is too far away on
            larger images.
        turns: number of rotations of the image that are tried, spread over the circle (see
            `capsule_zoo.guides.parts.turns`). Only a guide can try them, because its model scores
            them.
        centered: whether the networks see each image with its ink in the middle. What is read is
            then equivariant under shifts.

    Raises:
        ValueError: a size below 1, or a bound that is not positive.
    """

    channels: int = 64
    max_scale: float = 0.8
    anisotropy: float | None = 1.6
    coordinates: bool = False
    turns: int = 1
    centered: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, channels=self.channels, turns=self.turns)
        check_positive(max_scale=self.max_scale)
        if self.anisotropy is not None:
            check_positive(anisotropy=self.anisotropy)

    def build(
        self, image_shape: tuple[int, int, int], parts: int, outputs: int = OUTPUTS
    ) -> "PartNetwork":
        """Return a new network that reads this number of parts off images (C, H, W).

        Args:
            outputs: numbers of each part: presence logit, raw pose, and features.

        Raises:
            ValueError: images that are to be turned are not square, or a size is below 1.
        """
        check_at_least(1, image_shape=image_shape, parts=parts)
        colors, height, width = image_shape
        if self.turns > 1 and height != width:
            raise ValueError(
                f"turns above 1 need square images, not {height}x{width}; give turns=1"
            )
        return PartNetwork(self, colors, parts, outputs)

    def view(self, images: Tensor, angle: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return what the networks see of images (B, C, H, W), and the way back.

        Args:
            angle: turn of each image, (B,), in radians, or None.

        Returns:
            The images as seen, and the pose (B, 6) that moves a pose in the view to its place in
            the image, None if the view is the image itself.
        """
        frame: Tensor | None = None
        if self.centered:
            images, frame = centered(images)
        if angle is not None:
            images = turned(images, angle)
            turn = poses.rotation(angle)
            frame = turn if frame is None else poses.compose(frame, turn)
        return images, frame


class PartNetwork(PyroModule):
    """The network of a `PartReader`, from images to a proposal for the parts.

    Args:
        settings: the reader.
        colours: channels of the images.
        parts: number of parts.
        outputs: numbers of each part.
    """

    def __init__(
        self, settings: PartReader, colors: int, parts: int, outputs: int = OUTPUTS
    ) -> None:
        super().__init__()
        self.settings = settings
        convolutions: list[nn.Module] = []
        inputs = colors
        for stride in (2, 2, 1, 1):
            convolution = PyroModule[nn.Conv2d](inputs, settings.channels, 3, stride, padding=1)
            convolutions += [convolution, ELU()]
            inputs = settings.channels
        self.encoder = PyroModule[nn.Sequential](*convolutions)
        read = settings.channels + 2 * settings.coordinates
        self.pool = AttentionPooling(read, parts, outputs)

    def forward(self, images: Tensor) -> Proposal:
        """Read the parts off images (B, C, H, W), as they are seen; see `PartReader.view`."""
        features = self.encoder(images - 0.5)
        if self.settings.coordinates:
            features = _with_coordinates(features)
        read = self.pool(features)  # (B, parts, outputs)
        bounds = self.settings.max_scale, self.settings.anisotropy
        pose = poses.from_parameters(read[..., 1:7], _SMALLEST, *bounds)
        return Proposal(read[..., 0], pose, elu(read))


def _with_coordinates(features: Tensor) -> Tensor:
    """Return features (B, channels, H, W) with their x and y as two more channels."""
    identity = poses.identity_like(features).view(1, 2, 3)
    places = F.affine_grid(identity, [1, 1, *features.shape[2:]], align_corners=False)
    places = places.permute(0, 3, 1, 2).expand(len(features), -1, -1, -1)
    return torch.cat([features, places], dim=1)
