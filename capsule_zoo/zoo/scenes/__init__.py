"""The entry of scenes, its figures and its view."""
