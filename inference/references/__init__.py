"""Reference posteriors with exact or checked draws, for comparison with inference."""

from capsule_zoo.inference.references.problems import list_references, load_reference
from capsule_zoo.inference.references.reference import Reference, Score

__all__ = ["Reference", "Score", "list_references", "load_reference"]
