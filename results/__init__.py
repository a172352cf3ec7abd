"""Records of experiments, and published numbers, as data: `<model>/<name>.json`, `published.csv`.

The folder is `importlib.resources.files("capsule_zoo.results")`, in a checkout and installed.
"""
