"""Trained entries of the zoo, as data: `<entry>.safetensors` with its card `<entry>.json`.

The folder is `importlib.resources.files("capsule_zoo.weights")`, in a checkout and installed.
"""
