"""The entry of capsule rbm, its figures and its view."""
