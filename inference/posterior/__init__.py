"""A trained pair improved or used again: refining, widening, transformations, priors."""
