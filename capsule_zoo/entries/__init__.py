"""The zoo's entries, one file each; importing this package registers them all."""

from capsule_zoo.entries import (
    capsule_helmholtz,
    capsule_rbm,
    cnn,
    generative_capsnet,
    matrix_capsules,
    part_whole,
    recurrent_capsules,
    vae,
)

__all__ = [
    "capsule_helmholtz",
    "capsule_rbm",
    "cnn",
    "generative_capsnet",
    "matrix_capsules",
    "part_whole",
    "recurrent_capsules",
    "vae",
]
