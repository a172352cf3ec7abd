"""Experiments on shape codes."""
