"""Experiments on capsule rbm."""
