"""Objectives: the losses that training minimizes."""
