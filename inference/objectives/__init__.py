"""Objectives: what training minimizes."""
