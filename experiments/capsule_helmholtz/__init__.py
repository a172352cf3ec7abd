"""Experiments on capsule helmholtz."""
