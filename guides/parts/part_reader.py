"""The part reader: a network that proposes the parts of an image, perhaps rotated or centered.

    features = CNN(image)                              # four 3x3 convolutions
    (logit_i, A_i, features_i) = attention_pooling(features)[i]      # (B, P), (B, P, 6), (B, P, F)

A guide makes its reader from its model:

>>> PartWholeGuide(model, reader=partial(PartReader, channels=32))

References:
    Encoder and sizes after Kosiorek et al. 2019 (arXiv 1906.06818), appendix.
"""

from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.parts.rotations import center_images, rotate_images
from capsule_zoo.models.checks import check_at_least, check_positive
from capsule_zoo.models.common.remembering import Submodule
from capsule_zoo.models.networks.layers import ELU, AttentionPooling, elu
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.painted_parts import PartsModel
from capsule_zoo.models.parts.parent_selection import Capsules

OUTPUTS = (
    7 + 16
)  # outputs of a part: presence logit, raw pose, and the inputs of the standard deviations
_SMALLEST = 0.01  # scale of a part, in units of half an image


class Proposal(NamedTuple):
    """The parameters of the distribution of one level's capsules.

    Attributes:
        logits: logits of the presences, (B, capsules).
        pose: centers of the poses, (B, capsules, 6).
        features: numbers from which standard deviations are computed, (B, capsules, features).
    """

    logits: Tensor
    pose: Tensor
    features: Tensor


_Posed = TypeVar("_Posed", Capsules, Proposal)


def move_capsules(capsules: _Posed, frame: Tensor) -> _Posed:
    """Return the proposal with its poses (B, capsules, 6) moved by one pose per image, (B, 6)."""
    return capsules._replace(pose=poses.compose(frame[:, None], capsules.pose))


class PartReader(Submodule, PyroModule):
    """The network that proposes the parts of images.

    Args:
        model: a model of parts.
        outputs: numbers of each part: presence logit, raw pose, and features.
        channels: width of the convolutions.
        max_scale: largest part, in units of half an image.
        anisotropy: bound on a part's stretch, or None. Bounded parts become strokes; free ones
            become blobs that are stretched into strokes (`poses.from_parameters`).
        coordinates: whether the pooling gets the position of each feature on the image. Otherwise
            positions follow only from the padding at the image's edge, which is too far away on
            larger images.
        rotations: number of rotations of the image that the guide tries, spread over the circle;
            its model scores them (see `capsule_zoo.guides.parts.rotations`).
        centered: whether the networks see each image with its ink in the middle. What is read is
            then equivariant under shifts.

    Raises:
        ValueError: a size below 1, a bound that is not positive, or images that are to be rotated
            and are not square.
    """

    model_class = PartsModel

    def __init__(
        self,
        model: PartsModel,
        outputs: int,
        *,
        channels: int = 64,
        max_scale: float = 0.8,
        anisotropy: float | None = 1.6,
        coordinates: bool = False,
        rotations: int = 1,
        centered: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, channels=channels, rotations=rotations)
        check_positive(max_scale=max_scale)
        if anisotropy is not None:
            check_positive(anisotropy=anisotropy)
        inputs, height, width = model.painted.shape
        if rotations > 1 and height != width:
            raise ValueError(
                f"rotations above 1 need square images, not {height}x{width}; give rotations=1"
            )
        self.bounds = max_scale, anisotropy
        self.coordinates = coordinates
        self.rotations = rotations
        self.centered = centered
        convolutions: list[nn.Module] = []
        for stride in (2, 2, 1, 1):
            convolution = PyroModule[nn.Conv2d](inputs, channels, 3, stride, padding=1)
            convolutions += [convolution, ELU()]
            inputs = channels
        self.encoder = PyroModule[nn.Sequential](*convolutions)
        self.pool = AttentionPooling(channels + 2 * coordinates, model.levels[-1].size, outputs)

    def view(self, images: Tensor, angle: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return images (B, C, H, W) as the networks see them, and the pose that undoes the view.

        Args:
            angle: rotation of each image, (B,), in radians, or None.

        Returns:
            The images as seen, and the pose (B, 6) that moves a pose in the view to its position in
            the image, None if the view is the image itself.
        """
        frame: Tensor | None = None
        if self.centered:
            images, frame = center_images(images)
        if angle is not None:
            images = rotate_images(images, angle)
            rotation_pose = poses.rotation(angle)
            frame = rotation_pose if frame is None else poses.compose(frame, rotation_pose)
        return images, frame

    def forward(self, images: Tensor) -> Proposal:
        """Propose the parts of images (B, C, H, W), as `view` returns them."""
        features = self.encoder(images - 0.5)
        if self.coordinates:
            features = _with_coordinates(features)
        read = self.pool(features)  # (B, parts, outputs)
        pose = poses.from_parameters(read[..., 1:7], _SMALLEST, *self.bounds)
        return Proposal(read[..., 0], pose, elu(read))


def _with_coordinates(features: Tensor) -> Tensor:
    """Append two channels with the x and y of each pixel to features (B, channels, H, W)."""
    identity = poses.identity_like(features).view(1, 2, 3)
    places = F.affine_grid(identity, [1, 1, *features.shape[2:]], align_corners=False)
    places = places.permute(0, 3, 1, 2).expand(len(features), -1, -1, -1)
    return torch.cat([features, places], dim=1)
