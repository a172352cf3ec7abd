"""The capsule network (Sabour, Frosst and Hinton 2017)."""

from functools import partial
from typing import Any

from capsule_zoo.figures.generic import samples
from capsule_zoo.guides import (
    DynamicRouting,
    EMRouting,
    RoutedCapsules,
    Routing,
    SelfAttentionRouting,
    SelfRouting,
    UncertainRouting,
    VBRouting,
)
from capsule_zoo.guides.capsule_network import OverlappingRoutedCapsules
from capsule_zoo.inference import Inputs, Pace
from capsule_zoo.models import CapsuleNetwork
from capsule_zoo.models.capsule_network import OverlappingCapsuleNetwork
from capsule_zoo.registry import Entry, register
from capsule_zoo.zoo.capsule_network.figures import dimensions, reconstructions

ROUTINGS: dict[str, Routing] = {
    "dynamic": DynamicRouting(3, fair=False),
    "uniform": DynamicRouting(1, fair=False),
    "em": EMRouting(3),
    "vb": VBRouting(3),
    "attention": SelfAttentionRouting(fair=False),
    "self": SelfRouting(),
    "uncertain": UncertainRouting(),
}
OVERLAPPING: dict[str, Any] = dict(
    model=OverlappingCapsuleNetwork,
    guides={"dynamic": partial(OverlappingRoutedCapsules, routing=ROUTINGS["dynamic"])},
    figures={"samples": samples},
    summary="Class capsules that separate two images, each overlaid with another of its batch.",
)
TRAINING: dict[str, Any] = dict(
    lr=2e-3, pace=Pace("linear", warmup=100), batch_size=64, inputs=Inputs(labels=True)
)


def uniform(entry: Entry) -> RoutedCapsules:
    """Class capsules without routing: all votes have equal weights."""
    return entry.guide.with_routing(ROUTINGS["uniform"])


def em(entry: Entry) -> RoutedCapsules:
    """Class capsules by expectation maximization on the votes."""
    return entry.guide.with_routing(ROUTINGS["em"])


def vb(entry: Entry) -> RoutedCapsules:
    """Class capsules by variational Bayes on the votes."""
    return entry.guide.with_routing(ROUTINGS["vb"])


def attention(entry: Entry) -> RoutedCapsules:
    """Class capsules by self-attention, with a learned number for each coupling."""
    return entry.guide.with_routing(ROUTINGS["attention"])


def self_routing(entry: Entry) -> RoutedCapsules:
    """Every primary capsule chooses its class by learned weights, without agreement."""
    return entry.guide.with_routing(ROUTINGS["self"])


def uncertain(entry: Entry) -> RoutedCapsules:
    """Couplings common to all images, with a learned posterior."""
    return entry.guide.with_routing(ROUTINGS["uncertain"])


def normal(entry: Entry) -> RoutedCapsules:
    """The default routing, with normal distributions of poses around its class capsules."""
    return entry.guide.with_poses("normal")


register(
    "capsule-network",
    model=CapsuleNetwork,
    guides={
        "dynamic": partial(RoutedCapsules, routing=ROUTINGS["dynamic"]),
        "uniform": uniform,
        "em": em,
        "vb": vb,
        "attention": attention,
        "self": self_routing,
        "uncertain": uncertain,
        "normal": normal,
    },
    training=TRAINING,
    figures={"reconstructions": reconstructions, "dimensions": dimensions, "samples": samples},
    presets={"overlapping": OVERLAPPING},
    summary="Class capsules by dynamic routing, and a decoder that draws from them.",
    # Two primary capsules: one alone would give all classes equal presences under EM.
    small=dict(image_shape=(1, 17, 17), classes=2, hidden=(12, 12), guide=dict(channels=4)),
)
