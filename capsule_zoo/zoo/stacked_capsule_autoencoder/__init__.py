"""The entry of stacked capsule autoencoders, and its figures."""
