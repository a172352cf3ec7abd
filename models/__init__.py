"""Generative models, one file for each paper: the contents of an image and how it is drawn.

The folders hold what several of them are built of; `baselines` has models without capsules.
"""

from capsule_zoo.models.base import Model as Model
from capsule_zoo.models.base import Site as Site
from capsule_zoo.models.baselines.cnn import ConvolutionalClassifier as ConvolutionalClassifier
from capsule_zoo.models.baselines.conditional_autoencoder import (
    ConditionalAutoencoder as ConditionalAutoencoder,
)
from capsule_zoo.models.baselines.vae import VariationalAutoencoder as VariationalAutoencoder
from capsule_zoo.models.capsule_helmholtz import CapsuleHelmholtzMachine as CapsuleHelmholtzMachine
from capsule_zoo.models.capsule_network import CapsuleNetwork as CapsuleNetwork
from capsule_zoo.models.capsule_rbm import RBM as RBM
from capsule_zoo.models.capsule_rbm import CapsuleRBM as CapsuleRBM
from capsule_zoo.models.checks import check_at_least as check_at_least
from capsule_zoo.models.checks import check_one_of as check_one_of
from capsule_zoo.models.checks import check_positive as check_positive
from capsule_zoo.models.common.spaces import ImageSpace as ImageSpace
from capsule_zoo.models.common.spaces import ObservationSpace as ObservationSpace
from capsule_zoo.models.constellations import Constellations as Constellations
from capsule_zoo.models.generative_capsnet import ContinuousCapsNet as ContinuousCapsNet
from capsule_zoo.models.generative_capsnet import GenerativeCapsNet as GenerativeCapsNet
from capsule_zoo.models.generative_capsnet import splat as splat
from capsule_zoo.models.matrix_capsules import MatrixCapsules as MatrixCapsules
from capsule_zoo.models.networks.classifier import Classifier as Classifier
from capsule_zoo.models.networks.leading import over_leading as over_leading
from capsule_zoo.models.networks.on_request import OnRequest as OnRequest
from capsule_zoo.models.part_whole import PartWholeCapsules as PartWholeCapsules
from capsule_zoo.models.parts import poses as poses
from capsule_zoo.models.parts import templates as templates
from capsule_zoo.models.parts.object_votes import VoteSizes as VoteSizes
from capsule_zoo.models.parts.painted_parts import ObjectPose as ObjectPose
from capsule_zoo.models.parts.painted_parts import Painting as Painting
from capsule_zoo.models.parts.parent_selection import Belonging as Belonging
from capsule_zoo.models.parts.parent_selection import Capsules as Capsules
from capsule_zoo.models.parts.part_sets import PartSets as PartSets
from capsule_zoo.models.recurrent_capsules import Canvas as Canvas
from capsule_zoo.models.recurrent_capsules import RecurrentCapsules as RecurrentCapsules
from capsule_zoo.models.routing.parent_law import free_energy as free_energy
from capsule_zoo.models.routing.votes import Votes as Votes
from capsule_zoo.models.scenes import Scenes as Scenes
from capsule_zoo.models.shape_codes import ShapeCodes as ShapeCodes
from capsule_zoo.models.stacked_capsule_autoencoder import Clutter as Clutter
from capsule_zoo.models.stacked_capsule_autoencoder import (
    StackedCapsuleAutoencoder as StackedCapsuleAutoencoder,
)
from capsule_zoo.models.switchable_gaussians import SwitchableGaussians as SwitchableGaussians

__all__ = ["poses", "templates"]
__all__ += sorted(
    name
    for name, each in globals().items()
    if str(getattr(each, "__module__", "")).startswith("capsule_zoo.")
)
