"""Approximate posteriors: every routing, encoder and fitting procedure as a Pyro guide."""

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.capsule_network import RoutedCapsules
from capsule_zoo.guides.conditional import ConditionalEncoder
from capsule_zoo.guides.constellations.amortized import AmortizedMatching
from capsule_zoo.guides.constellations.exact import groups
from capsule_zoo.guides.constellations.matching import (
    ExactMatching,
    MixtureMatching,
    RansacMatching,
    SinkhornMatching,
)
from capsule_zoo.guides.energy import ExactSwitches, MeanFieldSwitches
from capsule_zoo.guides.label import ClassPose, ExactLabel
from capsule_zoo.guides.learned_routing import (
    LearnedRouting,
    SelfAttentionRouting,
    SelfRouting,
    UncertainRouting,
)
from capsule_zoo.guides.parts.em import EMObjects
from capsule_zoo.guides.parts.kind_network import KindNetwork
from capsule_zoo.guides.parts.part_reader import PartReader
from capsule_zoo.guides.parts.part_whole import PartWholeGuide
from capsule_zoo.guides.parts.ridge import RidgeKinds
from capsule_zoo.guides.parts.routing_slots import RoutingSlots
from capsule_zoo.guides.parts.set_transformers import SetTransformers
from capsule_zoo.guides.parts.shape_codes import ShapeCodesGuide
from capsule_zoo.guides.parts.stacked_capsule_autoencoder import StackedCapsuleGuide
from capsule_zoo.guides.parts.stacked_objects import (
    EMConstellations,
    PerceptronObjects,
    SetTransformerObjects,
)
from capsule_zoo.guides.per_image.corrected import Corrected
from capsule_zoo.guides.per_image.free_form import FreeForm
from capsule_zoo.guides.per_image.gauss_newton import GaussNewton
from capsule_zoo.guides.per_image.known_latents import KnownLatents
from capsule_zoo.guides.recognition import RecognitionMachine
from capsule_zoo.guides.recurrent import RecurrentEncoder
from capsule_zoo.guides.routing import (
    AnnealedRouting,
    DynamicRouting,
    EMRouting,
    LengthRouting,
    RoutedParents,
    VBRouting,
)
from capsule_zoo.guides.scenes.peeling import Peeling
from capsule_zoo.guides.scenes.proposals import SceneGuide
from capsule_zoo.guides.scenes.recurrent import AttendInferRepeat
from capsule_zoo.guides.scenes.slot_attention import SlotAttention
from capsule_zoo.guides.vae import ConvolutionalEncoder
from capsule_zoo.models.routing.parent_distribution import (
    Belief,
    ParentDistribution,
    Routing,
    best_belief,
    free_energy,
    vote_log_density,
)
from capsule_zoo.models.routing.votes import Votes

__all__ = [
    "AmortizedMatching",
    "AnnealedRouting",
    "AttendInferRepeat",
    "Belief",
    "ClassPose",
    "ConditionalEncoder",
    "ConvolutionalEncoder",
    "Corrected",
    "DynamicRouting",
    "EMConstellations",
    "EMObjects",
    "EMRouting",
    "ExactLabel",
    "ExactMatching",
    "ExactSwitches",
    "FreeForm",
    "GaussNewton",
    "Guide",
    "KindNetwork",
    "KnownLatents",
    "LearnedRouting",
    "LengthRouting",
    "MeanFieldSwitches",
    "MixtureMatching",
    "ParentDistribution",
    "PartReader",
    "PartWholeGuide",
    "Peeling",
    "PerceptronObjects",
    "RansacMatching",
    "RecognitionMachine",
    "RecurrentEncoder",
    "RidgeKinds",
    "RoutedCapsules",
    "RoutedParents",
    "Routing",
    "RoutingSlots",
    "SceneGuide",
    "SelfAttentionRouting",
    "SelfRouting",
    "SetTransformerObjects",
    "SetTransformers",
    "ShapeCodesGuide",
    "SinkhornMatching",
    "SlotAttention",
    "StackedCapsuleGuide",
    "UncertainRouting",
    "VBRouting",
    "Votes",
    "best_belief",
    "free_energy",
    "groups",
    "vote_log_density",
]
