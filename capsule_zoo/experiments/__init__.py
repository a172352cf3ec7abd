"""The papers' experiments, each run by `capsule-zoo reproduce <model>/<name>`."""
