"""Neural networks used by several models."""
