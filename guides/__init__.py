"""Approximate posteriors: every routing, encoder and fitting procedure as a Pyro guide."""

from capsule_zoo.guides.base import Guide as Guide
from capsule_zoo.guides.capsule_network import RoutedCapsules as RoutedCapsules
from capsule_zoo.guides.conditional import ConditionalEncoder as ConditionalEncoder
from capsule_zoo.guides.constellations.amortized import AmortizedMatching as AmortizedMatching
from capsule_zoo.guides.constellations.exact import groups as groups
from capsule_zoo.guides.constellations.matching import ExactMatching as ExactMatching
from capsule_zoo.guides.constellations.matching import MixtureMatching as MixtureMatching
from capsule_zoo.guides.constellations.matching import RansacMatching as RansacMatching
from capsule_zoo.guides.constellations.matching import SinkhornMatching as SinkhornMatching
from capsule_zoo.guides.energy import ExactSwitches as ExactSwitches
from capsule_zoo.guides.energy import MeanFieldSwitches as MeanFieldSwitches
from capsule_zoo.guides.label import ClassPose as ClassPose
from capsule_zoo.guides.label import ExactLabel as ExactLabel
from capsule_zoo.guides.learned_routing import LearnedRouting as LearnedRouting
from capsule_zoo.guides.learned_routing import SelfAttentionRouting as SelfAttentionRouting
from capsule_zoo.guides.learned_routing import SelfRouting as SelfRouting
from capsule_zoo.guides.learned_routing import UncertainRouting as UncertainRouting
from capsule_zoo.guides.parts.em import EMObjects as EMObjects
from capsule_zoo.guides.parts.kind_network import KindNetwork as KindNetwork
from capsule_zoo.guides.parts.part_reader import PartReader as PartReader
from capsule_zoo.guides.parts.part_whole import PartWholeGuide as PartWholeGuide
from capsule_zoo.guides.parts.ridge import RidgeKinds as RidgeKinds
from capsule_zoo.guides.parts.routing_slots import RoutingSlots as RoutingSlots
from capsule_zoo.guides.parts.set_transformers import SetTransformers as SetTransformers
from capsule_zoo.guides.parts.shape_codes import ShapeCodesGuide as ShapeCodesGuide
from capsule_zoo.guides.parts.stacked_capsule_autoencoder import (
    StackedCapsuleGuide as StackedCapsuleGuide,
)
from capsule_zoo.guides.parts.stacked_objects import EMConstellations as EMConstellations
from capsule_zoo.guides.parts.stacked_objects import PerceptronObjects as PerceptronObjects
from capsule_zoo.guides.parts.stacked_objects import SetTransformerObjects as SetTransformerObjects
from capsule_zoo.guides.per_image.corrected import Corrected as Corrected
from capsule_zoo.guides.per_image.free_form import FreeForm as FreeForm
from capsule_zoo.guides.per_image.gauss_newton import GaussNewton as GaussNewton
from capsule_zoo.guides.per_image.known_latents import KnownLatents as KnownLatents
from capsule_zoo.guides.recognition import RecognitionMachine as RecognitionMachine
from capsule_zoo.guides.recurrent import RecurrentEncoder as RecurrentEncoder
from capsule_zoo.guides.routing import AnnealedRouting as AnnealedRouting
from capsule_zoo.guides.routing import DynamicRouting as DynamicRouting
from capsule_zoo.guides.routing import EMRouting as EMRouting
from capsule_zoo.guides.routing import LengthRouting as LengthRouting
from capsule_zoo.guides.routing import RoutedParents as RoutedParents
from capsule_zoo.guides.routing import VBRouting as VBRouting
from capsule_zoo.guides.scenes.peeling import Peeling as Peeling
from capsule_zoo.guides.scenes.proposals import SceneGuide as SceneGuide
from capsule_zoo.guides.scenes.recurrent import AttendInferRepeat as AttendInferRepeat
from capsule_zoo.guides.scenes.slot_attention import SlotAttention as SlotAttention
from capsule_zoo.guides.vae import ConvolutionalEncoder as ConvolutionalEncoder
from capsule_zoo.models.routing.parent_law import Belief as Belief
from capsule_zoo.models.routing.parent_law import ParentLaw as ParentLaw
from capsule_zoo.models.routing.parent_law import Routing as Routing
from capsule_zoo.models.routing.parent_law import best_belief as best_belief
from capsule_zoo.models.routing.parent_law import free_energy as free_energy
from capsule_zoo.models.routing.parent_law import vote_log_density as vote_log_density
from capsule_zoo.models.routing.votes import Votes as Votes

__all__ = sorted(
    name
    for name, each in globals().items()
    if str(getattr(each, "__module__", "")).startswith("capsule_zoo.")
)
