"""Figures of entries and of experiments; matplotlib is imported when a figure is drawn."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from capsule_zoo.figures.curves import (
    accuracy_curves,
    curves_on_log_scale,
    error_curves,
    number_curves,
)
from capsule_zoo.figures.energy import fields, gibbs, spectra, sums
from capsule_zoo.figures.generic import pixel_scaling, reconstructions, samples
from capsule_zoo.figures.grids import image_rows, part_colors, signed_colors, split_into_rows

_OF_FAMILIES = {
    "constellations": ("scene_rows", "template_rows"),
    "matrix_capsules": ("mistakes", "votes"),
    "part_whole": (
        *("colored_parts", "infer_parts", "learned_templates", "parses", "prior_samples"),
        "seen_of_parts",
    ),
    "recurrent_capsules": ("animation", "drawings_of", "strokes"),
    "scenes": ("colored_objects", "found_objects", "outlined_objects"),
}
__all__ = [
    "accuracy_curves",
    "curves_on_log_scale",
    "error_curves",
    "fields",
    "gibbs",
    "image_rows",
    "number_curves",
    "part_colors",
    "pixel_scaling",
    "reconstructions",
    "samples",
    "signed_colors",
    "spectra",
    "split_into_rows",
    "sums",
]  # fmt: skip
__all__ += [name for names in _OF_FAMILIES.values() for name in names]


def __getattr__(name: str) -> Callable[..., Any]:
    """Import a family's figure on first use, after the figures that it builds on."""
    for family, names in _OF_FAMILIES.items():
        if name in names:
            return getattr(import_module(f"capsule_zoo.zoo.{family}.figures"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
