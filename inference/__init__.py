"""Inference: train, evaluate and compare any model with any guide under any objective.

>>> run = fit(model, guide, dataset, epochs=10, seed=0)                  # -> Run
>>> idata = evaluate(model, guide, dataset.test, num_particles=50)       # -> arviz InferenceData
>>> wide = widen(model, guide, dataset.train[:1000])                     # points become a bound
>>> compare({"points": (model, guide), "wide": (model, wide)}, dataset.test[:1000]).draw()

An objective is a `pyro.infer.ELBO` that also works with torch optimizers; see `Objective`.
Everything is in nats per image.
"""

from capsule_zoo.inference.check import IncompatibleGuide as IncompatibleGuide
from capsule_zoo.inference.check import check_pair as check_pair
from capsule_zoo.inference.energy.contrastive_divergence import (
    ContrastiveDivergence as ContrastiveDivergence,
)
from capsule_zoo.inference.energy.log_partition import LogPartition as LogPartition
from capsule_zoo.inference.energy.log_partition import log_partition as log_partition
from capsule_zoo.inference.energy.pretrain import pretrain as pretrain
from capsule_zoo.inference.evaluation.ancestral import image_log_likelihood as image_log_likelihood
from capsule_zoo.inference.evaluation.ancestral import infer as infer
from capsule_zoo.inference.evaluation.ancestral import log_prior as log_prior
from capsule_zoo.inference.evaluation.ancestral import mean_images as mean_images
from capsule_zoo.inference.evaluation.calibration import rank_uniformity as rank_uniformity
from capsule_zoo.inference.evaluation.calibration import sbc_ranks as sbc_ranks
from capsule_zoo.inference.evaluation.classification import classify as classify
from capsule_zoo.inference.evaluation.classification import error_rate as error_rate
from capsule_zoo.inference.evaluation.classification import fgsm as fgsm
from capsule_zoo.inference.evaluation.compare import Comparison as Comparison
from capsule_zoo.inference.evaluation.compare import compare as compare
from capsule_zoo.inference.evaluation.evaluate import evaluate as evaluate
from capsule_zoo.inference.evaluation.objects import FoundObjects as FoundObjects
from capsule_zoo.inference.evaluation.objects import boxes as boxes
from capsule_zoo.inference.evaluation.objects import count as count
from capsule_zoo.inference.evaluation.objects import find_objects as find_objects
from capsule_zoo.inference.evaluation.objects import segment as segment
from capsule_zoo.inference.evaluation.probe import Accuracy as Accuracy
from capsule_zoo.inference.evaluation.probe import cluster_accuracy as cluster_accuracy
from capsule_zoo.inference.evaluation.probe import latents as latents
from capsule_zoo.inference.evaluation.probe import linear_probe as linear_probe
from capsule_zoo.inference.evaluation.references.problems import list_references as list_references
from capsule_zoo.inference.evaluation.references.problems import load_reference as load_reference
from capsule_zoo.inference.evaluation.references.reference import Reference as Reference
from capsule_zoo.inference.evaluation.references.reference import Score as Score
from capsule_zoo.inference.evaluation.sample_quality import frechet as frechet
from capsule_zoo.inference.evaluation.sample_quality import frechet_distance as frechet_distance
from capsule_zoo.inference.evaluation.sample_quality import train_classifier as train_classifier
from capsule_zoo.inference.evaluation.segmentation import relabeled as relabeled
from capsule_zoo.inference.evaluation.segmentation import (
    segmentation_accuracy as segmentation_accuracy,
)
from capsule_zoo.inference.evaluation.simulation_based import Calibration as Calibration
from capsule_zoo.inference.evaluation.simulation_based import check_calibration as check_calibration
from capsule_zoo.inference.evaluation.summary import summarize as summarize
from capsule_zoo.inference.evaluation.verbs import encode as encode
from capsule_zoo.inference.evaluation.verbs import posterior_predictive as posterior_predictive
from capsule_zoo.inference.evaluation.verbs import reconstruct as reconstruct
from capsule_zoo.inference.evaluation.verbs import sample as sample
from capsule_zoo.inference.evaluation.vote_history import VoteHistory as VoteHistory
from capsule_zoo.inference.evaluation.vote_history import vote_history as vote_history
from capsule_zoo.inference.functions import as_module as as_module
from capsule_zoo.inference.log_weight import log_weights as log_weights
from capsule_zoo.inference.objectives.base import Objective as Objective
from capsule_zoo.inference.objectives.base import is_bound as is_bound
from capsule_zoo.inference.objectives.base import loss_per_image as loss_per_image
from capsule_zoo.inference.objectives.importance_weighted import (
    ImportanceWeightedELBO as ImportanceWeightedELBO,
)
from capsule_zoo.inference.objectives.score_function import ScoreFunctionELBO as ScoreFunctionELBO
from capsule_zoo.inference.objectives.sleep_phase import SleepPhase as SleepPhase
from capsule_zoo.inference.objectives.spread_loss import SpreadLoss as SpreadLoss
from capsule_zoo.inference.objectives.stacked_capsules import (
    StackedCapsuleObjective as StackedCapsuleObjective,
)
from capsule_zoo.inference.objectives.stacked_capsules import TermHistory as TermHistory
from capsule_zoo.inference.objectives.summed_presences import SummedPresences as SummedPresences
from capsule_zoo.inference.objectives.thermodynamic import (
    ThermodynamicObjective as ThermodynamicObjective,
)
from capsule_zoo.inference.objectives.wake_sleep import ReweightedWakeSleep as ReweightedWakeSleep
from capsule_zoo.inference.objectives.wake_sleep import WakeSleep as WakeSleep
from capsule_zoo.inference.posterior.annealing.annealed import annealed_bounds as annealed_bounds
from capsule_zoo.inference.posterior.annealing.annealed import (
    annealed_log_likelihood as annealed_log_likelihood,
)
from capsule_zoo.inference.posterior.fill_in import FilledIn as FilledIn
from capsule_zoo.inference.posterior.fill_in import fill_in as fill_in
from capsule_zoo.inference.posterior.gauss_newton import gauss_newton as gauss_newton
from capsule_zoo.inference.posterior.intervene import Counterfactual as Counterfactual
from capsule_zoo.inference.posterior.intervene import intervene as intervene
from capsule_zoo.inference.posterior.refine import Refinement as Refinement
from capsule_zoo.inference.posterior.refine import SemiAmortized as SemiAmortized
from capsule_zoo.inference.posterior.refine import refine as refine
from capsule_zoo.inference.posterior.top_prior import TopPrior as TopPrior
from capsule_zoo.inference.posterior.top_prior import fit_top_prior as fit_top_prior
from capsule_zoo.inference.posterior.transformations import Requested as Requested
from capsule_zoo.inference.posterior.transformations import Transformations as Transformations
from capsule_zoo.inference.posterior.transformations import (
    infer_transformation as infer_transformation,
)
from capsule_zoo.inference.posterior.widen import Widened as Widened
from capsule_zoo.inference.posterior.widen import widen as widen
from capsule_zoo.inference.training.callbacks import Check as Check
from capsule_zoo.inference.training.checkpoint import CheckpointError as CheckpointError
from capsule_zoo.inference.training.fit import fit as fit
from capsule_zoo.inference.training.history import Run as Run
from capsule_zoo.inference.training.non_finite import NonFiniteLoss as NonFiniteLoss
from capsule_zoo.inference.training.settings import Checks as Checks
from capsule_zoo.inference.training.settings import Inputs as Inputs
from capsule_zoo.inference.training.settings import Pace as Pace
from capsule_zoo.inference.training.starts.template_learning import (
    learn_templates as learn_templates,
)

__all__ = sorted(
    name
    for name, each in globals().items()
    if str(getattr(each, "__module__", "")).startswith("capsule_zoo.")
)
