"""Building blocks of routing classifiers: votes, distributions of parents, capsule layers."""
