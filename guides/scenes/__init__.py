"""Guides to scenes: objects are proposed for slots; all guides but AIR's sum presences out."""
