"""Experiments on recurrent capsules."""
