"""The entry of part-whole capsules, its figures and its view."""
