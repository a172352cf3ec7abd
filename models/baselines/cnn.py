"""Networks without capsules: the baseline of matrix capsules, and one of equal size.

The baseline has two convolutions, each followed by a maximum over 2x2 pixels, a dense layer and the
classes:

    maps   = maxpool(relu(conv5x5(standardized image)))      # (B, 32, H / 2, W / 2)
    maps   = maxpool(relu(conv5x5(maps)))                    # (B, 64, H / 4, W / 4)
    hidden = dropout(relu(dense(maps)))                      # (B, 1024)
    label  ~ Categorical(logits = dense(hidden))             # (B,)

On 32x32 pixels it has 4.2 million parameters, the number that the paper reports. The paper chose
the network to perform best on smallNORB.

`EqualClassifier` has the stem of another classifier, and as many parameters. It has a form for
overlays of two images.

References:
    Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing" (ICLR), section 5.
"""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from capsule_zoo.models.checks import check_at_least, check_one_of
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.models.matrix_capsules import MatrixCapsules
from capsule_zoo.models.networks.classifier import Classifier, standardize_images
from capsule_zoo.models.networks.leading import PairsOfImages
from capsule_zoo.models.recurrent_capsules import RecurrentCapsules


class ConvolutionalClassifier(Classifier):
    """A convolutional classifier, without capsules.

    Args:
        image_shape: (channels, height, width), 4x4 pixels or more.
        classes: number of classes of the label.
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
        maps = standardize_images(images)
        for convolution in (self.first, self.second):
            maps = F.max_pool2d(F.relu(convolution(maps)), 2)
        hidden = F.relu(self.hidden(maps.flatten(1)))
        return self.read(F.dropout(hidden, training=self.training))


class EqualClassifier(Classifier):
    """A baseline with the stem of a capsule network, convolutions, and equally many parameters.

    Args:
        image_shape, classes: as for `ConvolutionalClassifier`.
        capsules: the network with capsules, a model or a guide that reads images. Its layers before
            the capsules are the stem here, and the width is the one that comes nearest to its
            number of parameters.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], classes: int, capsules: nn.Module
    ) -> None:
        super().__init__(image_shape, classes)
        stem, layers, parameters = before_capsules(capsules)
        self.stem = stem = PyroModule[nn.Sequential](*stem, PyroModule[nn.ReLU]())
        with torch.no_grad(), eval_mode(stem):
            inputs, height, width = stem(torch.zeros(1, *image_shape)).shape[1:]
        for kernel, stride in layers:
            height, width = ((n - kernel) // stride + 1 for n in (height, width))
        stem_parameters, area = sum(p.numel() for p in stem.parameters()), height * width

        def apart(maps: int) -> int:
            sizes = zip((inputs, *[maps] * (len(layers) - 1)), layers, strict=True)
            hidden = sum((before * kernel**2 + 1) * maps for before, (kernel, _) in sizes)
            return abs(stem_parameters + hidden + (maps * area + 1) * classes - parameters)

        maps, parts = min(range(1, 1 + parameters // area), key=apart), []
        for before, (kernel, stride) in zip((inputs, *[maps] * len(layers)), layers, strict=False):
            parts += [PyroModule[nn.Conv2d](before, maps, kernel, stride), PyroModule[nn.ReLU]()]
        self.layers = PyroModule[nn.Sequential](*parts)
        self.read = PyroModule[nn.Linear](maps * area, classes)

    @pyro_method
    def scores(self, images: Tensor) -> Tensor:
        """Compute the logits of the classes, (B, classes)."""
        return self.read(self.layers(self.stem(images)).flatten(1))


class WholeMap(nn.Conv2d):
    """A depthwise convolution with kernels as large as the maps, in a third of torch's time."""

    def forward(self, maps: Tensor) -> Tensor:
        return (maps * self.weight[:, 0]).sum((2, 3), keepdim=True)


def before_capsules(capsules: Any) -> tuple[list[nn.Module], list[tuple[int, int]], int]:
    """Return a capsule network's stem, convolutions to replace capsules, and parameter count.

    Returns:
        the layers; kernel and stride of the convolutions that replace the capsules; the number of
        parameters of what reads images.

    Raises:
        ValueError: the network of a paper whose stem is its capsules, or capsules at every step.
    """
    if isinstance(capsules, MatrixCapsules):
        standard = PyroModule[nn.LayerNorm](capsules.image_shape, elementwise_affine=False)
        return [standard, capsules.stem], [(3, 2), (3, 1)], capsules.num_parameters
    if isinstance(capsules, RecurrentCapsules):
        check_one_of("capsules", capsules.capsules, ("once",))
        reader: Any = capsules.reader
        return [reader.network, reader.primary], [(1, 1)], reader.num_parameters
    if not hasattr(capsules.primary, "read"):
        raise ValueError("network must be 'small': the stem of 'paper' is its capsules")
    read = capsules.primary.read
    maps = len(read)
    summed = PyroModule[WholeMap](maps, maps, read.shape[1:], groups=maps, bias=False)
    summed.weight.data[:] = read.data[:, None]
    return [*capsules.primary.maps, summed], [(1, 1)], capsules.num_parameters


class OverlappingEqualClassifier(PairsOfImages, EqualClassifier):
    """The `EqualClassifier` of two overlapping images, which predicts the classes of both.

    The overlay is of an image and the one before it in the batch. There is one logit for each
    class, and `label` is 1 for the classes of both.
    """

    def sample_label(self, scores: Tensor, labels: Tensor | None) -> None:
        present = None if labels is None else self.present(labels).to(scores)
        pyro.sample("label", dist.Bernoulli(logits=scores).to_event(1), obs=present)
