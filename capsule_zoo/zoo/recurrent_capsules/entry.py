"""Recurrent capsules (Sastry), and their baseline DRAW (Gregor et al. 2015)."""

from functools import partial
from typing import Any

from pyro.infer import TraceMeanField_ELBO

from capsule_zoo.figures.generic import samples
from capsule_zoo.guides import DynamicRouting, RecurrentEncoder
from capsule_zoo.guides.recurrent import OverlappingEncoder
from capsule_zoo.inference import Pace
from capsule_zoo.models import RecurrentCapsules
from capsule_zoo.models.recurrent_capsules import PAPER, OverlappingCapsules
from capsule_zoo.registry import register
from capsule_zoo.zoo.recurrent_capsules.figures import strokes

TRAINING: dict[str, Any] = dict(lr=1e-3, pace=Pace("linear", clip=100.0), batch_size=64)
ROUTING = DynamicRouting(3, fair=False)
SHARED: dict[str, Any] = dict(
    objective=TraceMeanField_ELBO,
    training=TRAINING,
    figures={"strokes": strokes, "samples": samples},
)
SMALL: dict[str, Any] = dict(
    image_shape=(1, 17, 17), steps=2, latent=2, units=4, canvas=dict(window=3)
)

register(
    "recurrent-capsules",
    model=partial(RecurrentCapsules, routing=ROUTING),
    guides={"recurrent": RecurrentEncoder},
    presets={
        "overlapping": dict(
            model=partial(OverlappingCapsules, routing=ROUTING),
            guides={"recurrent": OverlappingEncoder},
            summary="Recurrent capsules of overlaid images; they fail to separate the images.",
        ),
        "paper": dict(model=partial(RecurrentCapsules, routing=ROUTING, **PAPER)),
    },
    summary="A drawing in a few strokes, planned by capsules.",
    small={**SMALL, "classes": 2, "channels": (3, 3), "types": 2},
    **SHARED,
)
register(
    "draw",
    model=partial(RecurrentCapsules, capsules="none", routing=None),
    guides={"recurrent": RecurrentEncoder},
    summary="DRAW: recurrent capsules without capsules, whose codes enter the recurrent cell.",
    small=SMALL,
    **SHARED,
)
