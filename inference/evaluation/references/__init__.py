"""Posteriors with known draws, to which inference is compared."""
