"""Pictures of entries and of experiments; matplotlib is imported when a picture is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from capsule_zoo.figures.curves import accuracy_curves, climbs, error_curves, learning_curves
from capsule_zoo.figures.energy import fields, gibbs, spectra, sums
from capsule_zoo.figures.generic import on_scale_of, reconstructions, samples
from capsule_zoo.figures.grids import image_rows, in_rows, part_colors, signed_colors

if TYPE_CHECKING:
    from capsule_zoo.zoo.constellations.figures import scene_rows, template_rows
    from capsule_zoo.zoo.matrix_capsules.figures import by_iterations, mistakes, nudges, votes
    from capsule_zoo.zoo.part_whole.figures import (
        colored_parts,
        infer_parts,
        learned_templates,
        parses,
        prior_samples,
        seen_of_parts,
    )
    from capsule_zoo.zoo.recurrent_capsules.figures import animation, drawings_of, frames, strokes
    from capsule_zoo.zoo.scenes.figures import colored_objects, found_objects

__all__ = [
    "accuracy_curves",
    "animation",
    "by_iterations",
    "climbs",
    "colored_objects",
    "colored_parts",
    "drawings_of",
    "error_curves",
    "fields",
    "found_objects",
    "frames",
    "gibbs",
    "image_rows",
    "in_rows",
    "infer_parts",
    "learned_templates",
    "learning_curves",
    "mistakes",
    "nudges",
    "on_scale_of",
    "parses",
    "part_colors",
    "prior_samples",
    "reconstructions",
    "samples",
    "scene_rows",
    "seen_of_parts",
    "signed_colors",
    "spectra",
    "strokes",
    "sums",
    "template_rows",
    "votes",
]


def __getattr__(name: str) -> Callable[..., Any]:
    """Return a family's figure; families use the figures of this package, which come first."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from capsule_zoo.zoo.constellations import figures as constellations
    from capsule_zoo.zoo.matrix_capsules import figures as matrix_capsules
    from capsule_zoo.zoo.part_whole import figures as part_whole
    from capsule_zoo.zoo.recurrent_capsules import figures as recurrent_capsules
    from capsule_zoo.zoo.scenes import figures as scenes

    families = (constellations, matrix_capsules, part_whole, recurrent_capsules, scenes)
    return next(getattr(family, name) for family in families if hasattr(family, name))
