"""Stacked capsule autoencoders (Kosiorek, Sabour, Teh and Hinton 2019)."""

from functools import partial
from typing import Any

from capsule_zoo.data import Dataset, Split
from capsule_zoo.figures.generic import samples
from capsule_zoo.guides import (
    EMConstellations,
    PartReader,
    PerceptronObjects,
    SetTransformerObjects,
    StackedCapsuleGuide,
)
from capsule_zoo.inference import Pace, StackedCapsuleObjective
from capsule_zoo.inference.training.stages import Stage, check_enough
from capsule_zoo.models import StackedCapsuleAutoencoder
from capsule_zoo.models.parts.object_votes import VoteSizes
from capsule_zoo.registry import Entry, register
from capsule_zoo.zoo.stacked_capsule_autoencoder.clustered_objects import start_objects
from capsule_zoo.zoo.stacked_capsule_autoencoder.figures import learned_templates, reconstructions

STEPS = {"parts": 1350, "objects": 450, "all": 1200}  # updates of each stage of training
JOINT: dict[str, Any] = dict(
    lr={"model": 7.5e-3, "guide": 1.5e-3}, pace=Pace("linear", warmup=50, clip=1e4), batch_size=64
)
ALONE: dict[str, Any] = dict(lr={"model": 1e-2, "guide": 2e-3}, pace=Pace("linear", warmup=50))
ON_READS: dict[str, Any] = dict(lr=1e-4, pace=Pace("linear", warmup=50))
TOGETHER: dict[str, Any] = dict(lr=2e-4, pace=Pace("linear", warmup=50))


def reads(guide: StackedCapsuleGuide, split: Split) -> Split:
    """Return the parts that a guide infers from images, as data of the scope "objects"."""
    return Split(guide.reads(split.images), split.labels, f"parts of {split.name}")


def start_from_reads(
    data: Dataset, seed: int, *, guide: StackedCapsuleGuide, start: bool
) -> Dataset:
    """Return the inferred parts of images; if `start`, initialize the objects from them."""
    held_out = data.validation
    train, test = reads(guide, data.train), reads(guide, data.test[:1])
    validation = reads(guide, held_out) if len(held_out) else test[:0]
    if start:
        start_objects(guide, train.images, seed)
    return Dataset(data.name, train, validation, test, data.class_names)


def stages(entry: Entry, start: bool = True) -> list[Stage]:
    """Return the stages of training: parts, objects on inferred parts, all together.

    Args:
        start: whether clusters of parsed images initialize the objects, in place of random numbers.
    """
    model, guide = entry.model, entry.guide_of(StackedCapsuleGuide)
    lower = model.with_scope("parts"), guide.with_scope("parts")
    upper = model.with_scope("objects"), guide.with_scope("objects")
    prepare = partial(start_from_reads, guide=guide, start=start)
    losses, objects = dict(objective=entry.objective), model.levels[0].size
    return [
        Stage("parts", STEPS["parts"], *lower, settings={**losses, **ALONE}),
        Stage(
            "objects",
            STEPS["objects"],
            *upper,
            prepare=prepare,
            settings={**losses, **ON_READS},
            batches=2,
            check=partial(check_enough, size="objects", number=objects if start else 0),
        ),
        Stage(
            "parts and objects",
            STEPS["all"],
            model,
            guide,
            settings={**losses, **TOGETHER},
            batches=2,
        ),
    ]


def normal(entry: Entry) -> StackedCapsuleGuide:
    """Networks infer parts and objects; poses have normal distributions."""
    return entry.guide_of(StackedCapsuleGuide).with_poses("normal")


def em(entry: Entry) -> StackedCapsuleGuide:
    """A network infers the parts; expectation maximization infers the objects."""
    return entry.guide_of(StackedCapsuleGuide).with_above(EMConstellations)


def paper_preset(parts: int) -> dict[str, Any]:
    """Return the preset with the paper's arguments and joint training."""
    reader = partial(PartReader, channels=128, max_scale=1.01, anisotropy=None)
    above = partial(SetTransformerObjects, width=128, heads=4, blocks=3, inducing=16)
    model = partial(StackedCapsuleAutoencoder, objects=24, parts=parts, sigma_image=1.0)
    guide = partial(StackedCapsuleGuide, reader=reader, above=above)
    return dict(model=model, guide=guide, training=JOINT, stages=None)


MODEL = partial(StackedCapsuleAutoencoder, objects=24, votes=VoteSizes(hidden=64))
GUIDE = partial(StackedCapsuleGuide, above=PerceptronObjects)
register(
    "stacked-capsule-autoencoder",
    model=partial(MODEL, parts=16),
    guides={"delta": GUIDE, "normal": normal, "em": em},
    objective=StackedCapsuleObjective,
    training=dict(batch_size=32),
    stages=stages,
    presets={
        "joint": dict(training=JOINT, stages=None),
        "paper": paper_preset(24),
        "paper-40": paper_preset(40),
    },
    figures={
        "reconstructions": reconstructions,
        "templates": learned_templates,
        "samples": samples,
    },
    summary="Objects vote for parts, each pixel comes from one part (Kosiorek et al. 2019).",
    small=dict(
        image_shape=(1, 12, 12),
        objects=2,
        parts=3,
        template_size=5,
        part_features=3,
        votes=dict(object_features=4, hidden=6),
        # a gradient that is stopped is not the slope of the loss, which the contract compares
        objective=dict(stop_inputs=False, stop_targets=False),
        guide=dict(reader=dict(channels=6), above=dict(width=8, hidden=1)),
    ),
)
