"""The entry of stacked capsule autoencoder, its figures and its view."""
