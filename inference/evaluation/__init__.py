"""Evaluation: bounds in nats, comparisons, probes, sample quality, calibration."""
