"""The entry of cnn, its figures and its view."""
