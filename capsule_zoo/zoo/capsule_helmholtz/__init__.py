"""The entry of capsule helmholtz, its figures and its view."""
