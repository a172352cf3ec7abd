"""Stacked capsule autoencoders (Kosiorek, Sabour, Teh and Hinton 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capsule_zoo.figures.generic import samples
from capsule_zoo.figures.stacked_capsule_autoencoder import learned_templates, reconstructions
from capsule_zoo.guides import (
    EMConstellations,
    PartReader,
    SetTransformerObjects,
    StackedCapsuleGuide,
)
from capsule_zoo.inference import StackedCapsuleObjective
from capsule_zoo.models import StackedCapsuleAutoencoder
from capsule_zoo.registry import Entry, register, unknown
from capsule_zoo.sizes import Takes

MODELS: dict[str, dict[str, Any]] = {
    "small": dict(objects=16, parts=16, hidden=64),
    "paper": dict(objects=24, parts=24, hidden=128, sigma_image=1.0),
    "paper-40": dict(objects=24, parts=40, hidden=128, sigma_image=1.0),
}
READERS: dict[str, dict[str, Any]] = {
    "small": dict(channels=32),
    "paper": dict(channels=128, max_scale=1.01, anisotropy=None),
    "paper-40": dict(channels=128, max_scale=1.01, anisotropy=None),
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "small": dict(width=48, heads=2, blocks=2, inducing=8),
    "paper": dict(width=128, heads=4, blocks=3, inducing=16),
    "paper-40": dict(width=128, heads=4, blocks=3, inducing=16),
}
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
)


@register(
    "stacked-capsule-autoencoder",
    small=SMALL,
    takes={
        "sizes": Takes(StackedCapsuleAutoencoder),
        "loss": Takes(StackedCapsuleObjective),
        "reader": Takes(PartReader),
        "transformer": Takes(SetTransformerObjects),
    },
)
def stacked_capsule_autoencoder(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    preset: str = "small",
    loss: Mapping[str, Any] = {},  # read only
    reader: Mapping[str, Any] = {},
    transformer: Mapping[str, Any] = {},
    **sizes: Any,
) -> Entry:
    """Objects vote for parts, parts share out the pixels (Kosiorek et al. 2019).

    Args:
        image_shape: (channels, height, width); the paper's MNIST has 40x40 pixels.
        preset: "small" (two cores), "paper" (24 objects, 24 parts) or "paper-40" (40 parts).
        loss: arguments of `StackedCapsuleObjective`.
        reader: arguments of `PartReader` that replace values of the preset.
        transformer: arguments of `SetTransformerObjects` that replace values of the preset.
        sizes: arguments of `StackedCapsuleAutoencoder` that replace values of the preset.
    """
    if preset not in MODELS:
        raise ValueError(unknown("preset", preset, list(MODELS)))
    model = StackedCapsuleAutoencoder(image_shape=image_shape, **{**MODELS[preset], **sizes})
    parts = PartReader(**{**READERS[preset], **reader})
    objects = SetTransformerObjects(**{**TRANSFORMERS[preset], **transformer})
    return Entry(
        model=model,
        guides={
            "delta": lambda entry: StackedCapsuleGuide(
                entry.model, "delta", reader=parts, objects=objects
            ),
            "normal": lambda entry: entry.guide_of(StackedCapsuleGuide).with_poses("normal"),
            "em": lambda entry: entry.guide_of(StackedCapsuleGuide).with_objects(
                EMConstellations()
            ),
        },
        objective=StackedCapsuleObjective(**loss),
        training=dict(
            lr={"model": 7.5e-3, "guide": 1.5e-3},  # templates learn slowly at the guide's rate
            schedule="linear",
            batch_size=64,
            warmup=50,
            clip=1e4,
        ),
        figures={
            "reconstructions": reconstructions,
            "templates": learned_templates,
            "samples": samples,
        },
    )
