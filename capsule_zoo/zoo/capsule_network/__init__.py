"""The entry of the capsule network of 2017, and its figures."""
