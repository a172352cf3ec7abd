"""Blocks that the models are built of: tensor functions, layers and laws without a story."""
