"""Models without capsules, as baselines for comparison."""
