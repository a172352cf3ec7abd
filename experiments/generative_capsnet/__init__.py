"""Experiments on generative capsnet."""
