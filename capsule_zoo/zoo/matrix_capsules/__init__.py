"""The entry of matrix capsules, its figures and its view."""
