"""Experiments on constellations."""
