"""Generative stories: what exists in an image, and how it paints it."""

from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.baselines.cnn import ConvolutionalClassifier
from capsule_zoo.models.baselines.conditional_autoencoder import ConditionalAutoencoder
from capsule_zoo.models.baselines.vae import VariationalAutoencoder
from capsule_zoo.models.capsule_helmholtz import CapsuleHelmholtzMachine
from capsule_zoo.models.capsule_rbm import RBM, CapsuleRBM
from capsule_zoo.models.classifier import Classifier
from capsule_zoo.models.generative_capsnet import ContinuousCapsNet, GenerativeCapsNet
from capsule_zoo.models.matrix_capsules import MatrixCapsules
from capsule_zoo.models.part_whole import Capsules, PartWholeCapsules
from capsule_zoo.models.recurrent_capsules import RecurrentCapsules
from capsule_zoo.models.switchable_gaussians import SwitchableGaussians

__all__ = [
    "RBM",
    "CapsuleHelmholtzMachine",
    "CapsuleRBM",
    "Capsules",
    "Classifier",
    "ConditionalAutoencoder",
    "ContinuousCapsNet",
    "ConvolutionalClassifier",
    "GenerativeCapsNet",
    "MatrixCapsules",
    "Model",
    "PartWholeCapsules",
    "RecurrentCapsules",
    "Site",
    "SwitchableGaussians",
    "VariationalAutoencoder",
]
