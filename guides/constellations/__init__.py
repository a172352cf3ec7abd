"""Guides to constellations: exact, by EM, RANSAC, Sinkhorn, or amortized."""
