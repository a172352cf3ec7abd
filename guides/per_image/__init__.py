"""Guides with separate parameters for every image, and the distributions of their sites."""
