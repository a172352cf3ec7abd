"""Tools for programs of all families: spaces of observations, modes, plates, shared values."""
