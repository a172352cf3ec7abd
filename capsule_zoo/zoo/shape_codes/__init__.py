"""The entry of shape codes, its figures and its view."""
