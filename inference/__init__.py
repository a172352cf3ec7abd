"""Inference: train, evaluate and compare any model with any guide under any objective.

>>> run = fit(model, guide, dataset, epochs=10, seed=0)                  # -> Run
>>> idata = evaluate(model, guide, dataset.test, num_particles=50)       # -> arviz InferenceData
>>> wide = widen(model, guide, dataset.train[:1000])                     # points become a bound
>>> compare({"points": (model, guide), "wide": (model, wide)}, dataset.test[:1000]).draw()

An objective is a `pyro.infer.ELBO` that also works with torch optimizers; see `Objective`.
Everything is in nats per image.
"""

from capsule_zoo.inference.callbacks import Check
from capsule_zoo.inference.check import IncompatibleGuide, check_pair
from capsule_zoo.inference.checkpoint import CheckpointError
from capsule_zoo.inference.compare import Comparison, compare
from capsule_zoo.inference.contrastive_divergence import ContrastiveDivergence
from capsule_zoo.inference.evaluate import evaluate
from capsule_zoo.inference.fill_in import FilledIn, fill_in
from capsule_zoo.inference.functions import as_module
from capsule_zoo.inference.history import Run
from capsule_zoo.inference.importance_weighted import ImportanceWeightedELBO
from capsule_zoo.inference.log_partition import LogPartition, log_partition
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.inference.non_finite import NonFiniteLoss
from capsule_zoo.inference.objective import Objective, is_bound, loss_per_image
from capsule_zoo.inference.pretrain import pretrain
from capsule_zoo.inference.refine import Refinement, SemiAmortized, refine
from capsule_zoo.inference.score_function import ScoreFunctionELBO
from capsule_zoo.inference.summary import summarize
from capsule_zoo.inference.train import fit
from capsule_zoo.inference.transformations import (
    Requested,
    Transformations,
    infer_transformation,
)
from capsule_zoo.inference.verbs import (
    classify,
    encode,
    posterior_predictive,
    reconstruct,
    sample,
)
from capsule_zoo.inference.wake_sleep import ReweightedWakeSleep, WakeSleep
from capsule_zoo.inference.widen import Widened, widen

__all__ = [
    "Check",
    "CheckpointError",
    "Comparison",
    "ContrastiveDivergence",
    "FilledIn",
    "ImportanceWeightedELBO",
    "IncompatibleGuide",
    "LogPartition",
    "NonFiniteLoss",
    "Objective",
    "Refinement",
    "Requested",
    "ReweightedWakeSleep",
    "Run",
    "ScoreFunctionELBO",
    "SemiAmortized",
    "Transformations",
    "WakeSleep",
    "Widened",
    "as_module",
    "check_pair",
    "classify",
    "compare",
    "encode",
    "evaluate",
    "fill_in",
    "fit",
    "infer_transformation",
    "is_bound",
    "log_partition",
    "log_weights",
    "loss_per_image",
    "posterior_predictive",
    "pretrain",
    "reconstruct",
    "refine",
    "sample",
    "summarize",
    "widen",
]
