"""Training by one loop for every model, guide and objective."""
