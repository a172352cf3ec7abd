"""What programs of all families need: spaces of observations, modes, plates, shared values."""
