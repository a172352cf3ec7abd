"""Starts of training: clusters, factor analyzers, templates."""
