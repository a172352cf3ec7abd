"""Guides to scenes: objects are proposed for slots; all but AIR's own sum presences out."""
