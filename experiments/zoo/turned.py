"""Classifiers of upright digits on digits that are turned."""

from __future__ import annotations

from dataclasses import replace

from capsule_zoo.data import load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.inference.evaluation.classification import error_rate, predicts_labels
from capsule_zoo.records import Numbers
from capsule_zoo.registry import load

CLASSIFIERS = ("capsule-network-mnist", "matrix-capsules-mnist")


@experiment("zoo/turned", data="mnist", about="capsule-network")
def turned(
    options: Options,
    *,
    weights: tuple[str, ...] = CLASSIFIERS,
    degrees: tuple[float, ...] = (0, 15, 30, 45, 60, 90),
    images: int = 2000,
) -> Result:
    """Count errors of published classifiers on turned digits, unseen in training (3 minutes).

    Args:
        weights: names of trained weights that classify.
        degrees: angles by which the digits are turned, counterclockwise.
        images: number of test images, the same at every angle.
    """
    test = load_dataset("mnist", root=options.data_root).test[:images]
    found: dict[str, Numbers] = {}
    for angle in degrees:
        motion = transforms.motion(float(angle))
        split = replace(test, images=transforms.warp_images(test.images, motion).clamp(0, 1))
        options.say(f"Classifying digits turned by {angle:g} degrees")
        row = found.setdefault(f"error_{angle:g}_degrees", {})
        for name in weights:
            entry = load(name)
            if not predicts_labels(entry.model, entry.guide):
                raise ValueError(f"weights must name classifiers; {name} predicts no labels")
            row[name.replace("-", "_")] = error_rate(entry.model, entry.guide, split)
    return Result({quantity: numbers for quantity, numbers in found.items()})
