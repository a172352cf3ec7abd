"""Part-whole capsules with their amortized guide (Smith et al. 2020)."""

from capsule_zoo.guides import EMObjects, PartWholeGuide
from capsule_zoo.inference.training.settings import pace_arguments
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.registry import Entry, register
from capsule_zoo.zoo.part_whole.figures import PAINTED

# Guides with the trained weights of the entry's guide, and another distribution of poses, or EM


def delta(entry: Entry) -> PartWholeGuide:
    """Networks infer parts and objects; poses are point estimates."""
    return entry.guide_of(PartWholeGuide).with_poses("delta")


def normal(entry: Entry) -> PartWholeGuide:
    """Networks infer parts and objects; poses have normal distributions, which gives a bound."""
    return entry.guide_of(PartWholeGuide).with_poses("normal")


def low_rank(entry: Entry) -> PartWholeGuide:
    """Networks infer parts and objects; the numbers of all poses are normal and correlated."""
    return entry.guide_of(PartWholeGuide).with_poses("low_rank")


def routing(entry: Entry) -> PartWholeGuide:
    """A network infers the parts; routing by agreement of their votes infers the objects."""
    return delta(entry).with_above(EMObjects)


register(
    "part-whole",
    model=PartWholeCapsules,
    guide=PartWholeGuide,
    guides={"delta": delta, "normal": normal, "low_rank": low_rank, "routing": routing},
    training=pace_arguments(PartWholeGuide.fit_settings),
    figures=PAINTED,
    summary="Objects choose and place their parts.",
    small=dict(
        image_shape=(1, 12, 12),
        objects=2,
        parts=3,
        painting=dict(template_size=5),
        guide=dict(reader=dict(channels=6), above=dict(width=8, heads=2, blocks=1, inducing=3)),
    ),
)
