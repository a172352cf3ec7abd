"""The entry of recurrent capsules, its figures and its view."""
