"""The entry of scenes, with its figures."""
