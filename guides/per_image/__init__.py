"""Guides with parameters of their own for every image, and the laws of their sites."""
