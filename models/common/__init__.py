"""Tools for models and guides: observation spaces, contexts, plates, shared values."""
