"""Generative models, one file for each paper.

The folders hold what several of them are built of; `baselines` has models without capsules.
"""

from capsule_zoo.data.registration import Settings
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.baselines.cnn import ConvolutionalClassifier
from capsule_zoo.models.baselines.conditional_autoencoder import ConditionalAutoencoder
from capsule_zoo.models.baselines.vae import VariationalAutoencoder
from capsule_zoo.models.capsule_helmholtz import CapsuleHelmholtzMachine
from capsule_zoo.models.capsule_network import CapsuleNetwork
from capsule_zoo.models.capsule_rbm import RBM, CapsuleRBM
from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive
from capsule_zoo.models.common.remembering import Submodule
from capsule_zoo.models.common.spaces import ImageSpace, ObservationSpace
from capsule_zoo.models.constellations import Constellations
from capsule_zoo.models.generative_capsnet import ContinuousCapsNet, GenerativeCapsNet, splat
from capsule_zoo.models.matrix_capsules import MatrixCapsules
from capsule_zoo.models.networks.classifier import Classifier
from capsule_zoo.models.networks.leading import over_leading
from capsule_zoo.models.networks.on_request import OnRequest
from capsule_zoo.models.part_whole import PartWholeCapsules
from capsule_zoo.models.parts import poses, templates
from capsule_zoo.models.parts.object_votes import VoteSizes
from capsule_zoo.models.parts.painted_parts import ObjectPose, Painting
from capsule_zoo.models.parts.parent_selection import Belonging, Capsules
from capsule_zoo.models.parts.part_sets import PartSets
from capsule_zoo.models.recurrent_capsules import Canvas, RecurrentCapsules
from capsule_zoo.models.routing.parent_distribution import free_energy
from capsule_zoo.models.routing.votes import Votes
from capsule_zoo.models.scenes import Scenes
from capsule_zoo.models.shape_codes import ShapeCodes
from capsule_zoo.models.stacked_capsule_autoencoder import Clutter, StackedCapsuleAutoencoder
from capsule_zoo.models.switchable_gaussians import SwitchableGaussians

__all__ = [
    "RBM",
    "Belonging",
    "Canvas",
    "CapsuleHelmholtzMachine",
    "CapsuleNetwork",
    "CapsuleRBM",
    "Capsules",
    "Classifier",
    "Clutter",
    "ConditionalAutoencoder",
    "Constellations",
    "ContinuousCapsNet",
    "ConvolutionalClassifier",
    "GenerativeCapsNet",
    "ImageSpace",
    "MatrixCapsules",
    "Model",
    "ObjectPose",
    "ObservationSpace",
    "OnRequest",
    "Painting",
    "PartSets",
    "PartWholeCapsules",
    "RecurrentCapsules",
    "Scenes",
    "Settings",
    "ShapeCodes",
    "Site",
    "StackedCapsuleAutoencoder",
    "Submodule",
    "SwitchableGaussians",
    "VariationalAutoencoder",
    "VoteSizes",
    "Votes",
    "check_at_least",
    "check_one_of",
    "check_positive",
    "free_energy",
    "over_leading",
    "poses",
    "splat",
    "templates",
]
