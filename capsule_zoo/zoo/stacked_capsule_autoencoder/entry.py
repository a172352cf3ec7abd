"""Stacked capsule autoencoders (Kosiorek, Sabour, Teh and Hinton 2019)."""

from collections.abc import Mapping
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
from capsule_zoo.guides.parts.guide import Above
from capsule_zoo.inference import Pace, StackedCapsuleObjective
from capsule_zoo.inference.training.stages import Stage, check_enough
from capsule_zoo.models import StackedCapsuleAutoencoder, check_one_of
from capsule_zoo.registry import Entry, check_known, register
from capsule_zoo.sizes import Takes, sized
from capsule_zoo.zoo.stacked_capsule_autoencoder.clustered_objects import start_objects
from capsule_zoo.zoo.stacked_capsule_autoencoder.figures import learned_templates, reconstructions

MODELS: dict[str, dict[str, Any]] = {
    "small": dict(objects=24, parts=16, hidden=64),
    "paper": dict(objects=24, parts=24, hidden=128, sigma_image=1.0),
    "paper-40": dict(objects=24, parts=40, hidden=128, sigma_image=1.0),
}
READERS: dict[str, dict[str, Any]] = {
    "small": dict(channels=64),
    "paper": dict(channels=128, max_scale=1.01, anisotropy=None),
    "paper-40": dict(channels=128, max_scale=1.01, anisotropy=None),
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "small": dict(width=48, heads=2, blocks=2, inducing=8),
    "paper": dict(width=128, heads=4, blocks=3, inducing=16),
    "paper-40": dict(width=128, heads=4, blocks=3, inducing=16),
}
ENCODERS = {"small": "perceptron", "paper": "set_transformer", "paper-40": "set_transformer"}
TRAINING = {"small": "stages", "paper": "joint", "paper-40": "joint"}
STEPS = {"parts": 1350, "objects": 450, "all": 1200}  # as in the record of its ablations
JOINT: dict[str, Any] = dict(
    lr={"model": 7.5e-3, "guide": 1.5e-3}, pace=Pace("linear", warmup=50, clip=1e4), batch_size=64
)
ALONE: dict[str, Any] = dict(lr={"model": 1e-2, "guide": 2e-3}, pace=Pace("linear", warmup=50))
ON_READS: dict[str, Any] = dict(lr=1e-4, pace=Pace("linear", warmup=50))
TOGETHER: dict[str, Any] = dict(lr=2e-4, pace=Pace("linear", warmup=50))
SMALL: dict[str, Any] = dict(
    image_shape=(1, 12, 12),
    objects=2,
    parts=3,
    template_size=5,
    object_features=4,
    part_features=3,
    hidden=6,
    # a gradient that is stopped is not the slope of the loss, which the contract compares it with
    loss=dict(stop_inputs=False, stop_targets=False),
    reader=dict(channels=6),
    transformer=dict(width=8, heads=2, blocks=1, inducing=3),
    perceptron=dict(width=8, hidden=1),
)


def reads(guide: StackedCapsuleGuide, split: Split) -> Split:
    """Return what a guide reads of the parts in every image, as data of the scope "objects"."""
    return Split(guide.reads(split.images), split.labels, f"parts of {split.name}")


def started(data: Dataset, seed: int, *, guide: StackedCapsuleGuide, start: bool) -> Dataset:
    """Return reads in place of images, and start the objects from them where `start`."""
    seen = data.validation
    train, test = reads(guide, data.train), reads(guide, data.test[:1])
    validation = reads(guide, seen) if len(seen) else test[:0]
    if start:
        start_objects(guide, train.images, seed)
    return Dataset(data.name, train, validation, test, data.class_names)


def stages(entry: Entry, start: bool = True) -> list[Stage]:
    """Return the stages of training: parts, objects on what was read of parts, all together.

    Args:
        start: whether objects start as clusters of the parsed images; otherwise at random.
    """
    model, guide = entry.model, entry.guide_of(StackedCapsuleGuide)
    lower = model.with_scope("parts"), guide.with_scope("parts")
    upper = model.with_scope("objects"), guide.with_scope("objects")
    prepare = partial(started, guide=guide, start=start)
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


@register(
    "stacked-capsule-autoencoder",
    small=SMALL,
    takes={
        "sizes": Takes(StackedCapsuleAutoencoder),
        "loss": Takes(StackedCapsuleObjective),
        "reader": Takes(PartReader),
        "transformer": Takes(SetTransformerObjects),
        "perceptron": Takes(PerceptronObjects),
    },
)
def stacked_capsule_autoencoder(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    preset: str = "small",
    loss: Mapping[str, Any] = {},  # read only
    reader: Mapping[str, Any] = {},
    transformer: Mapping[str, Any] = {},
    perceptron: Mapping[str, Any] = {},
    encoder: str | None = None,
    training: str | None = None,
    **sizes: Any,
) -> Entry[StackedCapsuleAutoencoder, StackedCapsuleGuide]:
    """Objects vote for parts, parts share out the pixels (Kosiorek et al. 2019).

    Args:
        image_shape: (channels, height, width); the paper's MNIST has 40x40 pixels.
        preset: "small" (two cores), "paper" (24 objects, 24 parts) or "paper-40" (40 parts).
        loss: arguments of `StackedCapsuleObjective`.
        reader: arguments of `PartReader` that replace values of the preset.
        transformer: arguments of `SetTransformerObjects` that replace values of the preset.
        perceptron: arguments of `PerceptronObjects`.
        encoder: what infers the objects, "perceptron" (by default of the preset "small") or
            "set_transformer" (of the others, as in the paper).
        training: "stages" (by default of the preset "small"): parts, then objects that start as
            clusters of parsed images, then all together; or "joint", from the start, as in the
            paper.
        sizes: arguments of `StackedCapsuleAutoencoder` that replace values of the preset.

    Guides:
        delta: networks give parts and objects; poses are point estimates.
        normal: networks give parts and objects; poses are normal distributions.
        em: a network gives the parts, expectation maximization the objects.
    """
    check_known("preset", preset, MODELS)
    model = sized(StackedCapsuleAutoencoder, image_shape, **{**MODELS[preset], **sizes})
    parts = PartReader(**{**READERS[preset], **reader})
    encoders: dict[str, Above] = {
        "perceptron": PerceptronObjects(**perceptron),
        "set_transformer": SetTransformerObjects(**{**TRANSFORMERS[preset], **transformer}),
    }
    encoder = ENCODERS[preset] if encoder is None else encoder
    check_one_of("encoder", encoder, tuple(encoders))
    training = TRAINING[preset] if training is None else training
    check_one_of("training", training, ("stages", "joint"))
    return Entry(
        model=model,
        guides={
            "delta": lambda entry: StackedCapsuleGuide(
                entry.model, "delta", reader=parts, above=encoders[encoder]
            ),
            "normal": lambda entry: entry.guide_of(StackedCapsuleGuide).with_poses("normal"),
            "em": lambda entry: entry.guide_of(StackedCapsuleGuide).with_above(EMConstellations()),
        },
        objective=StackedCapsuleObjective(**loss),
        training=JOINT if training == "joint" else dict(batch_size=32),
        stages=None if training == "joint" else stages,
        figures={
            "reconstructions": reconstructions,
            "templates": learned_templates,
            "samples": samples,
        },
    )
