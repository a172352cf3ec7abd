"""A convolutional network: the baseline of matrix capsules.

Two convolutions, each followed by a maximum over 2x2 pixels, a dense layer and the classes:

    maps   = maxpool(relu(conv5x5(standardized image)))      # (B, 32, H / 2, W / 2)
    maps   = maxpool(relu(conv5x5(maps)))                    # (B, 64, H / 4, W / 4)
    hidden = dropout(relu(dense(maps)))                      # (B, 1024)
    label  ~ Categorical(logits = dense(hidden))             # (B,)

On 32x32 pixels it has 4.2 million parameters, the number that the paper reports. The paper chose
the network to perform best on smallNORB.

References:
    Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing" (ICLR), section 5.
"""

from __future__ import annotations

import torch.nn.functional as F
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from capsule_zoo.models.blocks.classifier import Classifier, standardized
from capsule_zoo.models.checks import check_at_least


class ConvolutionalClassifier(Classifier):
    """The convolutional classifier, described at the top of this file.

    Args:
        image_shape: (channels, height, width), 4x4 pixels or more.
        classes: of the label.
        channels: maps of the two convolutions.
        hidden: units of the dense layer, half of which are dropped in training.

    Raises:
        ValueError: a size that is too small.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        classes: int = 10,
        *,
        channels: tuple[int, int] = (32, 64),
        hidden: int = 1024,
    ) -> None:
        super().__init__(image_shape, classes)
        colors, height, width = image_shape
        first, second = channels
        check_at_least(4, height=height, width=width)
        check_at_least(1, channels=channels, hidden=hidden)
        self.first = PyroModule[nn.Conv2d](colors, first, 5, padding=2)
        self.second = PyroModule[nn.Conv2d](first, second, 5, padding=2)
        self.hidden = PyroModule[nn.Linear](second * (height // 4) * (width // 4), hidden)
        self.read = PyroModule[nn.Linear](hidden, classes)

    @pyro_method
    def scores(self, images: Tensor) -> Tensor:
        """Compute the logits of the classes, (B, classes)."""
        maps = standardized(images)
        for convolution in (self.first, self.second):
            maps = F.max_pool2d(F.relu(convolution(maps)), 2)
        hidden = F.relu(self.hidden(maps.flatten(1)))
        return self.read(F.dropout(hidden, training=self.training))
