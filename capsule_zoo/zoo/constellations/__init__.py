"""The entry of constellations, its figures and its view."""
