"""Experiments on scenes."""
