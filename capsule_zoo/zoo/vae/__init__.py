"""The entry of the VAE."""
