"""The report: the whole zoo on one page, generated from records, cards and docstrings.

The page is one self-contained file. No number on it is typed by hand except the numbers published
in papers, which are in `results/published.csv`.
"""
