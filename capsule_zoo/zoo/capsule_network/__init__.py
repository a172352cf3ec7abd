"""The entry of capsule network, its figures and its view."""
