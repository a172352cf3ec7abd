"""Units of energy-based models: exponential families and switched groups."""
