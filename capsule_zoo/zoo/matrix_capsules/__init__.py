"""The entry of matrix capsules, and its figures."""
