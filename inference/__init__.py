"""Inference: train, evaluate and compare any model with any guide under any objective.

>>> run = fit(model, guide, dataset, epochs=10, seed=0)                  # -> Run
>>> idata = evaluate(model, guide, dataset.test, num_particles=50)       # -> arviz InferenceData
>>> wide = fit_guide("widened", model, guide, dataset.train[:1000])      # points become a bound
>>> compare({"points": (model, guide), "wide": (model, wide)}, dataset.test[:1000]).draw()
>>> print(examine(program, data))                         # what guides lose, for any Pyro program

An objective is a `pyro.infer.ELBO` that also works with torch optimizers; see `Objective`.
Everything is in nats per image. Further names lie in modules:

    annealing         log p(image) from both sides, and what a guide loses
    calibration       simulation-based calibration
    objects           how many objects are in a picture, and which pixels belong to each
    whole_pictures    the same for many objects on a picture of any size
    counting          intervals of numbers of objects, and scores of counted objects
    probes            classes from latents
    references        stored draws of exact posteriors
    sample_quality    the Frechet distance of samples
    segmentation      agreement of masks
    transformations   requested rotations and shifts, and their inference
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from capsule_zoo.inference.check import IncompatibleGuide, check_pair
from capsule_zoo.inference.energy.contrastive_divergence import ContrastiveDivergence
from capsule_zoo.inference.energy.log_partition import log_partition
from capsule_zoo.inference.evaluation.ancestral import infer, mean_images
from capsule_zoo.inference.evaluation.classification import classify, error_rate, fgsm
from capsule_zoo.inference.evaluation.evaluate import evaluate
from capsule_zoo.inference.evaluation.summary import summarize
from capsule_zoo.inference.evaluation.verbs import encode, posterior_predictive, reconstruct, sample
from capsule_zoo.inference.functions import as_module
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.inference.objectives.base import Objective, is_bound, loss_per_image
from capsule_zoo.inference.objectives.importance_weighted import ImportanceWeightedELBO
from capsule_zoo.inference.objectives.sleep_phase import SleepPhase
from capsule_zoo.inference.objectives.spread_loss import SpreadLoss
from capsule_zoo.inference.objectives.stacked_capsules import StackedCapsuleObjective
from capsule_zoo.inference.objectives.summed_presences import SummedPresences
from capsule_zoo.inference.objectives.wake_sleep import ReweightedWakeSleep, WakeSleep
from capsule_zoo.inference.posterior.fill_in import fill_in
from capsule_zoo.inference.posterior.fitted import SemiAmortized, fit_guide
from capsule_zoo.inference.posterior.intervene import intervene
from capsule_zoo.inference.training.checkpoint import CheckpointError
from capsule_zoo.inference.training.fit import fit
from capsule_zoo.inference.training.non_finite import NonFiniteLoss
from capsule_zoo.inference.training.progress import Run
from capsule_zoo.inference.training.settings import Check, Checks, Inputs, Pace
from capsule_zoo.inference.training.starts.template_learning import learn_templates

if TYPE_CHECKING:  # at run time these are imported when used, and with them pandas
    from capsule_zoo.inference.evaluation.compare import Comparison, compare
    from capsule_zoo.inference.examination.encoder import auto_encoder
    from capsule_zoo.inference.examination.examine import examine

__all__ = [
    "Check",
    "CheckpointError",
    "Checks",
    "Comparison",
    "ContrastiveDivergence",
    "ImportanceWeightedELBO",
    "IncompatibleGuide",
    "Inputs",
    "NonFiniteLoss",
    "Objective",
    "Pace",
    "ReweightedWakeSleep",
    "Run",
    "SemiAmortized",
    "SleepPhase",
    "SpreadLoss",
    "StackedCapsuleObjective",
    "SummedPresences",
    "WakeSleep",
    "as_module",
    "auto_encoder",
    "check_pair",
    "classify",
    "compare",
    "encode",
    "error_rate",
    "evaluate",
    "examine",
    "fgsm",
    "fill_in",
    "fit",
    "fit_guide",
    "infer",
    "intervene",
    "is_bound",
    "learn_templates",
    "log_partition",
    "log_weights",
    "loss_per_image",
    "mean_images",
    "posterior_predictive",
    "reconstruct",
    "sample",
    "summarize",
]

_LAZY = {
    "Comparison": "evaluation.compare",
    "compare": "evaluation.compare",
    "auto_encoder": "examination.encoder",
    "examine": "examination.examine",
}


def __getattr__(name: str) -> Any:
    """Import tables, and with them pandas, only when they are used."""
    if name in _LAZY:
        return getattr(import_module(f"capsule_zoo.inference.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'capsule_zoo.inference' has no attribute {name!r}")
