"""Run folders and the cards of trained weights."""
