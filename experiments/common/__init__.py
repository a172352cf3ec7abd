"""Code that experiments of several families share."""
