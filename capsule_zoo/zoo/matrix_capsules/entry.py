"""Matrix capsules with EM routing (Hinton, Sabour and Frosst 2018)."""

from functools import partial
from typing import Any

from pyro.infer import ELBO, Trace_ELBO

from capsule_zoo.guides import EMRouting, ExactLabel
from capsule_zoo.inference import Inputs, Pace, SpreadLoss
from capsule_zoo.models import MatrixCapsules
from capsule_zoo.models.matrix_capsules import PRESETS
from capsule_zoo.registry import register
from capsule_zoo.zoo.matrix_capsules.figures import poses, votes


def loss_of(model: MatrixCapsules) -> ELBO:
    """Return the entry's loss: the spread loss, or the negative log likelihood of the label."""
    return SpreadLoss() if model.likelihood == "spread" else Trace_ELBO()


TRAINING: dict[str, Any] = dict(
    lr=3e-3, pace=Pace("linear"), batch_size=32, inputs=Inputs(labels=True)
)
ROUTING = EMRouting(2)  # the paper has three iterations, which learn more slowly here
register(
    "matrix-capsules",
    model=partial(MatrixCapsules, routing=ROUTING),
    guides={"exact": ExactLabel},
    objective=loss_of,
    training=TRAINING,
    presets={
        "full": dict(model=partial(MatrixCapsules, routing=ROUTING, **PRESETS["full"])),
        "decoder": dict(
            model=partial(MatrixCapsules, routing=ROUTING, reconstruction=5e-4),
            figures={"votes": votes, "poses": poses},
            summary="A classifier, and a decoder that draws an image from the pose of its class.",
        ),
    },
    figures={"votes": votes},
    summary="A classifier whose layers are inferred by routing.",
    small=dict(image_shape=(1, 17, 17), classes=2, features=3, capsules=(2, 2, 2)),
)
