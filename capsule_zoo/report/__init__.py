"""The report: the whole zoo on one page, made from records, cards and docstrings.

The page is one file without anything outside it. No number on it is typed by hand but those that
papers have published, which are in `published.py`.
"""
