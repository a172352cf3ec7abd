"""Experiments on stacked capsule autoencoder."""
