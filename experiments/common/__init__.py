"""Common code of experiments of several families."""
