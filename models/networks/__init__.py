"""Networks that several models are built of."""
