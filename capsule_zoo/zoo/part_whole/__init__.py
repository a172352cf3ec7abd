"""The entry of part whole, its figures and its view."""
