"""The entry of recurrent capsules, and its figures."""
