"""Experiments on capsule network."""
