"""Experiments on part whole."""
