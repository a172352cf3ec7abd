"""The entry of constellations, and its figures."""
