"""Guides with parameters of their own for every image, and the distributions of their sites."""
