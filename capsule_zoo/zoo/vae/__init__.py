"""The entry of vae, its figures and its view."""
