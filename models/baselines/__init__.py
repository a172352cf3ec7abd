"""Models without capsules, to compare with."""
