"""Initializations for training: clusters, factor analyzers, templates."""
