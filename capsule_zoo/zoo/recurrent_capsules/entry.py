"""Recurrent capsules (Sastry), and the DRAW that they are compared with (Gregor et al. 2015)."""

from collections.abc import Mapping
from typing import Any

from pyro.infer import TraceMeanField_ELBO

from capsule_zoo.figures.generic import samples
from capsule_zoo.guides import DynamicRouting, RecurrentEncoder
from capsule_zoo.guides.recurrent import OverlappingEncoder
from capsule_zoo.inference import Pace
from capsule_zoo.models import RecurrentCapsules
from capsule_zoo.models.recurrent_capsules import PRESETS, OverlappingCapsules
from capsule_zoo.registry import Entry, check_known, register
from capsule_zoo.sizes import Takes, sized
from capsule_zoo.zoo.recurrent_capsules.figures import strokes

PICTURES = {"strokes": strokes, "samples": samples}
SMALL: dict[str, Any] = dict(image_shape=(1, 17, 17), steps=2, latent=2, units=4, window=3)


@register(
    "recurrent-capsules",
    small={**SMALL, "classes": 2, "channels": (3, 3), "types": 2},
    takes={"sizes": Takes(RecurrentCapsules, defaults=PRESETS["small"])},
)
def recurrent_capsules(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    preset: str = "small",
    iterations: int = 3,
    **sizes: Any,
) -> Entry:
    """A drawing in a few strokes, planned by capsules.

    Args:
        image_shape: (channels, height, width), 17x17 pixels or more.
        preset: "small" (CPU) or "paper".
        iterations: routing iterations; 0 replaces routing by linear layers.
        sizes: arguments of `RecurrentCapsules` that replace the preset's values.
    """
    check_known("preset", preset, PRESETS)
    sizes = {**PRESETS[preset], **sizes}
    return _entry(RecurrentCapsules, RecurrentEncoder, image_shape, iterations, sizes)


@register(
    "overlapping-capsules",
    small={**SMALL, "classes": 2, "channels": (3, 3), "types": 2},
    takes={"sizes": Takes(OverlappingCapsules, defaults=PRESETS["small"])},
)
def overlapping_capsules(
    image_shape: tuple[int, int, int] = (1, 28, 28), iterations: int = 3, **sizes: Any
) -> Entry:
    """Recurrent capsules that separate two images, each overlaid with another of its batch.

    Args:
        image_shape: (channels, height, width), 17x17 pixels or more.
        iterations: routing iterations; 0 replaces routing by linear layers.
        sizes: arguments of `OverlappingCapsules` that replace those of the small preset.
    """
    sizes = {**PRESETS["small"], **sizes}
    return _entry(OverlappingCapsules, OverlappingEncoder, image_shape, iterations, sizes)


@register("draw", small=SMALL, takes={"sizes": Takes(RecurrentCapsules, without=("capsules",))})
def draw(image_shape: tuple[int, int, int] = (1, 28, 28), **sizes: Any) -> Entry:
    """DRAW: recurrent capsules without the capsules, codes straight into the recurrent cell.

    Args:
        image_shape: (channels, height, width).
        sizes: arguments of `RecurrentCapsules`.
    """
    sizes = {"capsules": "none", **sizes}
    return _entry(RecurrentCapsules, RecurrentEncoder, image_shape, 0, sizes)


def _entry(
    kind: type[RecurrentCapsules],
    guide: type[RecurrentEncoder],
    image_shape: tuple[int, int, int],
    iterations: int,
    sizes: Mapping[str, Any],
) -> Entry:
    routing = DynamicRouting(iterations, fair=False) if iterations else None
    return Entry(
        model=sized(kind, image_shape, routing=routing, **sizes),
        guides={"recurrent": guide},
        objective=TraceMeanField_ELBO(),
        training=dict(lr=1e-3, pace=Pace("linear", clip=100.0), batch_size=64),
        figures=PICTURES,
    )
