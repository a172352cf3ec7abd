"""Approximate posteriors: every routing, encoder and fitting procedure as a Pyro guide."""

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.class_pose import ClassPose
from capsule_zoo.guides.conditional import ConditionalEncoder
from capsule_zoo.guides.constellations import (
    ExactMatching,
    MixtureMatching,
    RansacMatching,
    SinkhornMatching,
)
from capsule_zoo.guides.energy import ExactSwitches, MeanFieldSwitches
from capsule_zoo.guides.free_form import FreeForm
from capsule_zoo.guides.free_form_normal import FreeFormNormal
from capsule_zoo.guides.label import ExactLabel
from capsule_zoo.guides.part_whole import AmortizedPartWhole
from capsule_zoo.guides.recognition import RecognitionMachine
from capsule_zoo.guides.recurrent import RecurrentEncoder
from capsule_zoo.guides.routing import DynamicRouting, EMRouting, RoutedParents, VBRouting
from capsule_zoo.guides.routing_part_whole import RoutingPartWhole
from capsule_zoo.guides.vae import ConvolutionalEncoder

__all__ = [
    "AmortizedPartWhole",
    "ClassPose",
    "ConditionalEncoder",
    "ConvolutionalEncoder",
    "DynamicRouting",
    "EMRouting",
    "ExactLabel",
    "ExactMatching",
    "ExactSwitches",
    "FreeForm",
    "FreeFormNormal",
    "Guide",
    "MeanFieldSwitches",
    "MixtureMatching",
    "RansacMatching",
    "RecognitionMachine",
    "RecurrentEncoder",
    "RoutedParents",
    "RoutingPartWhole",
    "SinkhornMatching",
    "VBRouting",
]
