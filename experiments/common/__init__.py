"""What experiments of several families share."""
