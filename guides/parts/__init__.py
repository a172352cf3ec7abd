"""Guides to part-whole capsules, shape codes and stacked capsules."""
