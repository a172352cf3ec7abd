"""Part-whole capsules with their amortized guide (Smith et al. 2020)."""

from collections.abc import Callable, Mapping
from typing import Any

from pyro.infer import Trace_ELBO

from capsule_zoo.guides import EMObjects, PartWholeGuide
from capsule_zoo.inference.training.settings import paced
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.registry import Entry, register
from capsule_zoo.sizes import Takes, sized
from capsule_zoo.zoo.part_whole.figures import PAINTED

SMALL = dict(
    image_shape=(1, 12, 12),
    objects=2,
    parts=3,
    template_size=5,
    guide=dict(channels=6, width=8, heads=2, blocks=1, inducing=3),
)


# Guides with the trained weights of the entry's own, and another law of poses or EM routing
GUIDES: dict[str, Callable[[Entry], PartWholeGuide]] = {
    "delta": lambda entry: entry.guide_of(PartWholeGuide).with_poses("delta"),
    "normal": lambda entry: entry.guide_of(PartWholeGuide).with_poses("normal"),
    "low_rank": lambda entry: entry.guide_of(PartWholeGuide).with_poses("low_rank"),
    "routing": lambda entry: GUIDES["delta"](entry).with_above(EMObjects()),
}


@register(
    "part-whole",
    small=SMALL,
    takes={"sizes": Takes(PartWholeCapsules), "guide": Takes(PartWholeGuide, without=("pose",))},
)
def part_whole(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    guide: Mapping[str, Any] = {},  # read only
    **sizes: Any,
) -> Entry[PartWholeCapsules, PartWholeGuide]:
    """Objects choose and place their parts.

    A few large parts of bounded stretch become strokes; many parts without a bound on stretch
    become blobs.

    Args:
        image_shape: (channels, height, width).
        guide: arguments of `PartWholeGuide`, `PartReader` and `SetTransformers`.
        sizes: arguments of `PartWholeCapsules`.

    Guides:
        delta: networks give parts and objects; poses are point estimates.
        normal: networks give parts and objects; poses are normal distributions, which gives a
            bound.
        low_rank: networks give parts and objects; poses are normal distributions whose coordinates
            are correlated.
        routing: a network gives the parts, the agreement of their votes the objects.
    """
    model = sized(PartWholeCapsules, image_shape, **sizes)
    return Entry(
        model=model,
        guide=sized(PartWholeGuide, model, **guide),
        guides=GUIDES,
        objective=Trace_ELBO(),
        training=paced(PartWholeGuide.fit_settings),
        figures=PAINTED,
    )
