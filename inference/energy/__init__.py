"""Inference for energy models: contrastive divergence, tempering, partition functions."""
