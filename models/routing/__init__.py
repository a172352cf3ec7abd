"""Building blocks of networks with routing: votes, parent distributions, capsule layers."""
