"""Experiments on matrix capsules."""
