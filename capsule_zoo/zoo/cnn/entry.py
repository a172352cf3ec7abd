"""A convolutional network, the baseline of matrix capsules (Hinton, Sabour and Frosst 2018)."""

from __future__ import annotations

from typing import Any

from pyro.infer import Trace_ELBO

from capsule_zoo.guides import ExactLabel
from capsule_zoo.inference import Inputs, Pace
from capsule_zoo.models import ConvolutionalClassifier
from capsule_zoo.registry import Entry, register
from capsule_zoo.sizes import Takes

SMALL = dict(image_shape=(1, 8, 8), classes=2, channels=(4, 4), hidden=16)


@register("cnn", small=SMALL, takes={"sizes": Takes(ConvolutionalClassifier)})
def cnn(image_shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10, **sizes: Any) -> Entry:
    """A convolutional classifier, without capsules.

    Args:
        image_shape, classes, sizes: arguments of `ConvolutionalClassifier`.
    """
    model = ConvolutionalClassifier(image_shape, classes, **sizes)
    return Entry(
        model=model,
        guides={"exact": lambda entry: ExactLabel(entry.model)},
        objective=Trace_ELBO(),
        training=dict(lr=1e-3, pace=Pace("linear"), batch_size=64, inputs=Inputs(labels=True)),
    )
