"""Generative stories: what exists in an image, and how it paints it."""

from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.part_whole import Capsules, PartWholeCapsules

__all__ = ["Capsules", "Model", "PartWholeCapsules", "Site"]
