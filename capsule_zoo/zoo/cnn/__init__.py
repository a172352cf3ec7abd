"""The entry of the convolutional network."""
