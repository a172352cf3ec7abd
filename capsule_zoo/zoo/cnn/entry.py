"""A convolutional network, the baseline of matrix capsules (Hinton, Sabour and Frosst 2018)."""

from pyro.infer import Trace_ELBO

from capsule_zoo.guides import ExactLabel
from capsule_zoo.inference import Inputs, Pace
from capsule_zoo.models import ConvolutionalClassifier
from capsule_zoo.registry import register

register(
    "cnn",
    small=dict(image_shape=(1, 8, 8), classes=2, channels=(4, 4), hidden=16),
    guides={"exact": ExactLabel},
    objective=Trace_ELBO(),
    training=dict(lr=1e-3, pace=Pace("linear"), batch_size=64, inputs=Inputs(labels=True)),
)(ConvolutionalClassifier)
