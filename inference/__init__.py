"""Inference: objectives, training, evaluation and comparison of any model with any guide.

>>> run = fit(model, guide, dataset, epochs=10, seed=0)          # -> Run
"""

from capsule_zoo.inference.check import IncompatibleGuide, check_pair
from capsule_zoo.inference.checkpoint import CheckpointError
from capsule_zoo.inference.history import Run
from capsule_zoo.inference.objective import Objective, is_bound, loss_per_image
from capsule_zoo.inference.train import fit
from capsule_zoo.inference.trouble import NonFiniteLoss

__all__ = [
    "CheckpointError",
    "IncompatibleGuide",
    "NonFiniteLoss",
    "Objective",
    "Run",
    "check_pair",
    "fit",
    "is_bound",
    "loss_per_image",
]
