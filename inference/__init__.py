"""Inference: train, evaluate and compare any model with any guide under any objective.

>>> run = fit(model, guide, dataset, epochs=10, seed=0)                  # -> Run
>>> idata = evaluate(model, guide, dataset.test, num_particles=50)       # -> arviz InferenceData
>>> wide = widen(model, guide, dataset.train[:1000])                     # points become a bound
>>> compare({"points": (model, guide), "wide": (model, wide)}, dataset.test[:1000]).draw()

An objective is a `pyro.infer.ELBO` that also works with torch optimizers; see `Objective`.
Everything is in nats per image.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from capsule_zoo.inference.check import IncompatibleGuide, check_pair
from capsule_zoo.inference.energy.contrastive_divergence import ContrastiveDivergence
from capsule_zoo.inference.energy.log_partition import LogPartition, log_partition
from capsule_zoo.inference.energy.pretrain import pretrain
from capsule_zoo.inference.evaluation.ancestral import (
    image_log_likelihood,
    infer,
    log_prior,
    mean_images,
)
from capsule_zoo.inference.evaluation.classification import classify, error_rate, fgsm
from capsule_zoo.inference.evaluation.evaluate import evaluate
from capsule_zoo.inference.evaluation.objects import (
    FoundObjects,
    boxes,
    count,
    find_objects,
    segment,
)
from capsule_zoo.inference.evaluation.probe import Accuracy, cluster_accuracy, latents, linear_probe
from capsule_zoo.inference.evaluation.references.problems import list_references, load_reference
from capsule_zoo.inference.evaluation.references.reference import Reference, Score
from capsule_zoo.inference.evaluation.sample_quality import (
    frechet,
    frechet_distance,
    train_classifier,
)
from capsule_zoo.inference.evaluation.segmentation import relabeled, segmentation_accuracy
from capsule_zoo.inference.evaluation.simulation_based import (
    Calibration,
    check_calibration,
    rank_uniformity,
    sbc_ranks,
)
from capsule_zoo.inference.evaluation.summary import summarize
from capsule_zoo.inference.evaluation.verbs import encode, posterior_predictive, reconstruct, sample
from capsule_zoo.inference.evaluation.vote_history import VoteHistory, vote_history
from capsule_zoo.inference.functions import as_module
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.inference.objectives.base import Objective, is_bound, loss_per_image
from capsule_zoo.inference.objectives.importance_weighted import ImportanceWeightedELBO
from capsule_zoo.inference.objectives.score_function import ScoreFunctionELBO
from capsule_zoo.inference.objectives.sleep_phase import SleepPhase
from capsule_zoo.inference.objectives.spread_loss import SpreadLoss
from capsule_zoo.inference.objectives.stacked_capsules import StackedCapsuleObjective, TermHistory
from capsule_zoo.inference.objectives.summed_presences import SummedPresences
from capsule_zoo.inference.objectives.thermodynamic import ThermodynamicObjective
from capsule_zoo.inference.objectives.wake_sleep import ReweightedWakeSleep, WakeSleep
from capsule_zoo.inference.posterior.annealing.annealed import (
    annealed_bounds,
    annealed_gaps,
    annealed_log_likelihood,
)
from capsule_zoo.inference.posterior.fill_in import FilledIn, fill_in
from capsule_zoo.inference.posterior.gauss_newton import gauss_newton
from capsule_zoo.inference.posterior.intervene import Counterfactual, intervene
from capsule_zoo.inference.posterior.refine import Refinement, SemiAmortized, refine
from capsule_zoo.inference.posterior.top_prior import TopPrior, fit_top_prior
from capsule_zoo.inference.posterior.transformations import (
    Requested,
    Transformations,
    infer_transformation,
)
from capsule_zoo.inference.posterior.widen import Widened, widen
from capsule_zoo.inference.training.checkpoint import CheckpointError
from capsule_zoo.inference.training.fit import fit
from capsule_zoo.inference.training.non_finite import NonFiniteLoss
from capsule_zoo.inference.training.progress import Run
from capsule_zoo.inference.training.settings import Check, Checks, Inputs, Pace
from capsule_zoo.inference.training.starts.template_learning import learn_templates

if TYPE_CHECKING:  # at run time these are imported when used, and with them pandas
    from capsule_zoo.inference.evaluation.compare import Comparison, compare

__all__ = [
    "Accuracy",
    "Calibration",
    "Check",
    "CheckpointError",
    "Checks",
    "Comparison",
    "ContrastiveDivergence",
    "Counterfactual",
    "FilledIn",
    "FoundObjects",
    "ImportanceWeightedELBO",
    "IncompatibleGuide",
    "Inputs",
    "LogPartition",
    "NonFiniteLoss",
    "Objective",
    "Pace",
    "Reference",
    "Refinement",
    "Requested",
    "ReweightedWakeSleep",
    "Run",
    "Score",
    "ScoreFunctionELBO",
    "SemiAmortized",
    "SleepPhase",
    "SpreadLoss",
    "StackedCapsuleObjective",
    "SummedPresences",
    "TermHistory",
    "ThermodynamicObjective",
    "TopPrior",
    "Transformations",
    "VoteHistory",
    "WakeSleep",
    "Widened",
    "annealed_bounds",
    "annealed_gaps",
    "annealed_log_likelihood",
    "as_module",
    "boxes",
    "check_calibration",
    "check_pair",
    "classify",
    "cluster_accuracy",
    "compare",
    "count",
    "encode",
    "error_rate",
    "evaluate",
    "fgsm",
    "fill_in",
    "find_objects",
    "fit",
    "fit_top_prior",
    "frechet",
    "frechet_distance",
    "gauss_newton",
    "image_log_likelihood",
    "infer",
    "infer_transformation",
    "intervene",
    "is_bound",
    "latents",
    "learn_templates",
    "linear_probe",
    "list_references",
    "load_reference",
    "log_partition",
    "log_prior",
    "log_weights",
    "loss_per_image",
    "mean_images",
    "posterior_predictive",
    "pretrain",
    "rank_uniformity",
    "reconstruct",
    "refine",
    "relabeled",
    "sample",
    "sbc_ranks",
    "segment",
    "segmentation_accuracy",
    "summarize",
    "train_classifier",
    "vote_history",
    "widen",
]


def __getattr__(name: str) -> Any:
    """Import tables, and with them pandas, only when they are used."""
    if name in ("Comparison", "compare"):
        return getattr(import_module("capsule_zoo.inference.evaluation.compare"), name)
    raise AttributeError(f"module 'capsule_zoo.inference' has no attribute {name!r}")
