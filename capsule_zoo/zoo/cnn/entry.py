"""A convolutional network, the baseline of matrix capsules (Hinton, Sabour and Frosst 2018)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from capsule_zoo.guides import ExactLabel
from capsule_zoo.inference import Inputs, Pace
from capsule_zoo.models import ConvolutionalClassifier
from capsule_zoo.models.baselines.cnn import EqualClassifier, OverlappingEqualClassifier
from capsule_zoo.models.networks.leading import PairsOfImages
from capsule_zoo.registry import create, register
from capsule_zoo.zoo.capsule_network.entry import TRAINING as OF_VECTORS
from capsule_zoo.zoo.matrix_capsules.entry import TRAINING as OF_MATRICES
from capsule_zoo.zoo.recurrent_capsules.entry import TRAINING as OF_DRAWINGS


def equal(
    like: str,
    image_shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    capsules: Mapping[str, Any] = {},  # never changed
) -> EqualClassifier:
    """Return the network without capsules that is the equal baseline of a capsule classifier.

    It has the stem of the classifier, and as many parameters as the classifier uses for images.

    Args:
        like: the entry of the classifier.
        image_shape: (channels, height, width).
        classes: number of classes.
        capsules: settings of the entry `like`, such as its `preset`.
    """
    other = create(like, image_shape=image_shape, classes=classes, **capsules)
    of_pairs = isinstance(other.model, PairsOfImages)
    network = OverlappingEqualClassifier if of_pairs else EqualClassifier
    reads_in_guide = like == "capsule-network"
    return network(image_shape, classes, other.guide if reads_in_guide else other.model)


register(
    "cnn",
    model=ConvolutionalClassifier,
    guides={"exact": ExactLabel},
    training=dict(lr=1e-3, pace=Pace("linear"), batch_size=64, inputs=Inputs(labels=True)),
    presets={
        like: dict(model=partial(equal, like), training=training)
        for like, training in {
            "capsule-network": OF_VECTORS,
            "recurrent-capsules": OF_DRAWINGS | dict(inputs=Inputs(labels=True)),
            "matrix-capsules": OF_MATRICES,
        }.items()
    },
    summary="A convolutional network without capsules.",
    small=dict(image_shape=(1, 8, 8), classes=2, channels=(4, 4), hidden=16),
)
