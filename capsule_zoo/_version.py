"""The version of the package, which every folder may read."""

__version__ = "0.3.0"
