"""Guides to scenes: an object is proposed for every slot, and presences are summed out."""
