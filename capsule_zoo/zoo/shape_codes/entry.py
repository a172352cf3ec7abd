"""Shape codes: objects of several kinds, whose codes say which parts they have, and where."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pyro.infer import Trace_ELBO

from capsule_zoo.data import Dataset, Split
from capsule_zoo.guides import RidgeKinds, ShapeCodesGuide
from capsule_zoo.guides.parts.guide import copy_matching
from capsule_zoo.inference import Pace, infer
from capsule_zoo.inference.training.stages import Stage, check_enough
from capsule_zoo.inference.training.starts.kinds import start_kinds
from capsule_zoo.models import Capsules, ShapeCodes
from capsule_zoo.models.parts.part_sets import as_part_sets
from capsule_zoo.registry import Entry, create, register
from capsule_zoo.sizes import Takes, sized
from capsule_zoo.zoo.part_whole.figures import PAINTED
from capsule_zoo.zoo.shape_codes.figures import bent_kinds, morphs

SMALL = dict(
    image_shape=(1, 12, 12),
    kinds=2,
    parts=3,
    codes=2,
    template_size=5,
    guide=dict(channels=6, width=8, hidden=1),
)
STEPS = {"parts": 3000, "objects": 120, "all": 800, "anew": 80}  # see `shape-codes/letters`
# Objects start at the best that closed forms can do: updates only have to keep and to adapt it.
# At a rate of .002 all ten kinds collapsed into one within 300 updates; at .0001 19 of 64 were left
# after 8,000. While parts learn too, kinds die as well: 28 of 64 were left after 3,000 updates on
# MNIST, and classes were found at .954. After a new start all 64 are in use, and classes at .969.
FEW = 250
TOGETHER = 2e-4  # rate while parts and objects learn
ON_PART_SETS: dict[str, Any] = dict(objective=Trace_ELBO(), lr=1e-4, pace=Pace("linear", warmup=0))


def part_sets(guide: ShapeCodesGuide, split: Split, seed: int = 0) -> Split:
    """Return the parts that a guide draws for every image, as data of the scope "objects"."""
    drawn = infer(guide, split.images, ["part_presence", "part_pose"], seed)
    sets = as_part_sets(Capsules(drawn["part_presence"], drawn["part_pose"]))
    return Split(sets, split.labels, f"parts of {split.name}")


def parsed(data: Dataset, seed: int, *, guide: ShapeCodesGuide, tested: int | None = 1) -> Dataset:
    """Return a data set of part sets in place of images, of `tested` test images; None for all."""
    reader = guide.with_scope("parts")
    train = part_sets(reader, data.train, seed)
    test = part_sets(reader, data.test[:tested], seed)
    seen = data.validation
    validation = part_sets(reader, seen, seed) if len(seen) else test[:0]
    return Dataset(data.name, train, validation, test, data.class_names)


def start_objects(guide: ShapeCodesGuide, sets: Split, seed: int) -> None:
    """Start the kinds of a guide's model, and the guide, from part sets, in place."""
    start_kinds(guide.model, sets.images, seed)
    guide.infer_objects.start_at_posterior(guide.model)


def started(data: Dataset, seed: int, *, guide: ShapeCodesGuide) -> Dataset:
    """Return part sets in place of images, and start the kinds and the guide from them."""
    sets = parsed(data, seed, guide=guide)
    start_objects(guide, sets.train, seed)
    return sets


def stages(entry: Entry) -> list[Stage]:
    """Return the stages of training: parts, objects on parsed parts, all together, objects anew.

    The objects start as a mixture of factor analyzers of parsed images, twice: while parts and
    objects learn together, parts adapt to the objects, but kinds die.
    """
    model, guide = entry.model, entry.guide
    on_part_sets: dict[str, Any] = dict(
        model=model.with_scope("objects"),
        guide=guide.with_scope("objects"),
        prepare=partial(started, guide=guide),
        settings=ON_PART_SETS,
        batches=4,
        most=FEW,
        check=partial(check_enough, size="kinds", number=model.kinds),
    )
    return [
        Stage(
            "parts",
            STEPS["parts"],
            model.with_scope("parts"),
            guide.with_scope("parts"),
            settings=dict(objective=Trace_ELBO()),
        ),
        Stage("objects", STEPS["objects"], **on_part_sets),
        Stage(
            "parts and objects together",
            STEPS["all"],
            model,
            guide,
            settings=dict(objective=Trace_ELBO(), lr=TOGETHER, pace=Pace(warmup=50)),
        ),
        Stage("objects anew", STEPS["anew"], **on_part_sets),
    ]


def on_parts_of(source: Entry, **sizes: Any) -> Entry:
    """Return an untrained entry that reads and paints parts as a trained part-whole entry does.

    Args:
        source: the entry whose templates and reader of parts are copied.
        sizes: arguments of `shape_codes`.
    """
    model = source.model
    entry = create(
        "shape-codes",
        image_shape=model.image_shape,
        parts=model.levels[-1].size,
        temperature=model.temperature,
        guide=vars(source.guide.reader),
        **{**vars(model.painting), **sizes},
    )
    entry.model.template_logits.data.copy_(model.template_logits)
    copy_matching(source.guide, entry.guide)
    return entry


# Guides with the trained weights of the entry's own: other laws of poses and codes, or regressions
GUIDES: dict[str, Callable[[Entry], ShapeCodesGuide]] = {
    "delta": lambda entry: entry.guide.with_laws("delta", "normal"),
    "normal": lambda entry: entry.guide.with_laws("normal", "normal"),
    "points": lambda entry: entry.guide.with_laws("delta", "delta"),
    "routing": lambda entry: (
        entry.guide_of(ShapeCodesGuide).with_poses("delta").with_above(RidgeKinds())
    ),
}


@register(
    "shape-codes",
    small=SMALL,
    takes={"sizes": Takes(ShapeCodes), "guide": Takes(ShapeCodesGuide, without=("pose",))},
)
def shape_codes(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    guide: Mapping[str, Any] = {},  # read only
    kinds: int = 64,
    parts: int = 16,
    codes: int = 16,
    sigma_min: float = 0.025,
    sigma_top: float = 0.005,
    **sizes: Any,
) -> Entry[ShapeCodes, ShapeCodesGuide]:
    """An object of some kind, with a code that shapes its parts.

    Args:
        image_shape: (channels, height, width).
        guide: arguments of `ShapeCodesGuide`, `PartReader` and `KindNetwork`.
        kinds, parts, codes, sigma_min, sigma_top, sizes: arguments of `ShapeCodes`.

    Guides:
        delta: a network proposes an object of every kind; its pose and code are normal
            distributions, parts are point estimates.
        normal: a network proposes an object of every kind; pose, code and parts are normal
            distributions.
        points: a network proposes an object of every kind; pose, code and parts are point
            estimates.
        routing: a network gives the parts, ridge regressions pose and code of every kind.
    """
    sizes |= dict(sigma_min=sigma_min, sigma_top=sigma_top)
    model = sized(ShapeCodes, image_shape, kinds, parts, codes, **sizes)
    return Entry(
        model=model,
        guide=sized(ShapeCodesGuide, model, **guide),
        guides=GUIDES,
        objective=Trace_ELBO(),
        training={"batch_size": 32},  # learns parts nearly three times as fast as 128 (one seed)
        figures=PICTURES,
        stages=stages,
    )


PICTURES = {
    **PAINTED,
    "kinds": lambda entry, images: bent_kinds(entry.model),
    "morphs": lambda entry, images: morphs(entry.model, entry.guide, images),
}
