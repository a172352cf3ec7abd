"""The zoo's entries, one file each; importing this package registers them all."""

from capsule_zoo.entries import part_whole

__all__ = ["part_whole"]
