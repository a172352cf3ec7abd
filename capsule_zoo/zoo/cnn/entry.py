"""A convolutional network, the baseline of matrix capsules (Hinton, Sabour and Frosst 2018)."""

from collections.abc import Mapping
from typing import Any

from pyro.infer import Trace_ELBO
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides import ExactLabel
from capsule_zoo.inference import Inputs, Pace
from capsule_zoo.models import ConvolutionalClassifier
from capsule_zoo.models.baselines.cnn import EqualClassifier, OverlappingEqualClassifier
from capsule_zoo.models.checks import check_one_of
from capsule_zoo.registry import Entry, check_known, create, register
from capsule_zoo.sizes import Takes

TRAINING: dict[str, Any] = dict(
    lr=1e-3, pace=Pace("linear"), batch_size=64, inputs=Inputs(labels=True)
)
PAIRS = ("overlapping-capsule-network", "overlapping-capsules")
# Kernels and strides of the layers in the place of capsules
CAPSULES = {name: [(1, 1)] for name in ("capsule-network", *PAIRS)}
CAPSULES["matrix-capsules"] = [(3, 2), (3, 1)]


class WholeMap(nn.Conv2d):
    """A depthwise convolution whose kernels are as large as the maps, in a third of its time."""

    def forward(self, maps: Tensor) -> Tensor:
        return (maps * self.weight[:, 0]).sum((2, 3), keepdim=True)


@register(
    "cnn",
    small=dict(image_shape=(1, 8, 8), classes=2, channels=(4, 4), hidden=16),
    takes={"sizes": Takes(ConvolutionalClassifier)},
)
def cnn(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    like: str | None = None,
    capsules: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> Entry[Any, ExactLabel]:
    """A convolutional network without capsules.

    Args:
        image_shape, classes: arguments of `ConvolutionalClassifier`.
        like: "capsule-network", "overlapping-capsule-network", "overlapping-capsules" or
            "matrix-capsules", for a network with the stem, the training settings and as many
            parameters as reads images there, in place of other sizes.
        capsules: sizes of that entry.
        sizes: arguments of `ConvolutionalClassifier`.
    """
    if (like and sizes) or (capsules and not like):
        given = [*sizes] if like else ["capsules"]
        raise ValueError(f"{given[0]} must be left out {'with' if like else 'without'} like")
    guides = {"exact": ExactLabel}
    if like is None:
        model = ConvolutionalClassifier(image_shape, classes, **sizes)
        return Entry(model, guides, Trace_ELBO(), TRAINING)
    network, training = equal(like, image_shape, classes, capsules or {})
    return Entry(network, guides, Trace_ELBO(), training)


def equal(
    like: str, image_shape: tuple[int, int, int], classes: int, sizes: Mapping[str, Any]
) -> tuple[EqualClassifier, dict[str, Any]]:
    """Return a network without capsules, equal to a classifier with them, and how it is trained."""
    check_known("like", like, CAPSULES)
    other = create(like, image_shape=image_shape, classes=classes, **sizes)
    if like == "matrix-capsules":
        standard = PyroModule[nn.LayerNorm](image_shape, elementwise_affine=False)
        stem, reader = [standard, other.model.stem], other.model
    elif like == "overlapping-capsules":
        check_one_of("capsules", other.model.capsules, ("once",))
        reader = other.model.reader
        stem = [reader.network, reader.primary]
    elif sizes.get("preset") == "paper":
        raise ValueError(f"preset of {like} must be 'small': the stem of 'paper' is its capsules")
    else:
        reader, read = other.guide, other.guide.primary.read
        shape = len(read), len(read), read.shape[1:]
        summed = PyroModule[WholeMap](*shape, groups=len(read), bias=False)
        summed.weight.data[:] = read.data[:, None]
        stem = [*reader.primary.maps, summed]
    whole = PyroModule[nn.Sequential](*stem, PyroModule[nn.ReLU]())
    network = OverlappingEqualClassifier if like in PAIRS else EqualClassifier
    count, layers = reader.num_parameters, CAPSULES[like]
    return network(image_shape, classes, whole, layers, count), other.training
