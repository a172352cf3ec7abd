"""Annealed importance sampling between a guide and the posterior."""
