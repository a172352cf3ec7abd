"""Experiments over many entries."""
