"""Methods for a trained pair: refinement, widening, counterfactuals, missing pixels."""
