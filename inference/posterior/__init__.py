"""Ways to improve or reuse a trained pair: refining, widening, transformations, priors."""
