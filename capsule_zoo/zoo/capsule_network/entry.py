"""The capsule network (Sabour, Frosst and Hinton 2017)."""

from collections.abc import Callable
from typing import Any

from pyro.infer import Trace_ELBO

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
from capsule_zoo.registry import Entry, check_known, register
from capsule_zoo.sizes import Takes
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
TRAINING: dict[str, Any] = dict(
    lr=2e-3, pace=Pace("linear", warmup=100), batch_size=64, inputs=Inputs(labels=True)
)
# Two primary capsules: one alone would give all classes equal presences under EM.
SMALL: dict[str, Any] = dict(image_shape=(1, 17, 17), classes=2, hidden=(12, 12), channels=4)


def _with(routing: Routing) -> Callable[[Entry], RoutedCapsules]:
    """Return a maker of the entry's guide with another routing of the same votes."""
    return lambda entry: entry.guide.with_routing(routing)


@register("capsule-network", small=SMALL, takes={"sizes": Takes(CapsuleNetwork)})
def capsule_network(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    preset: str = "small",
    routing: str | Routing = "dynamic",
    channels: int | None = None,
    **sizes: Any,
) -> Entry:
    """Class capsules by dynamic routing, and a decoder that draws from them.

    Args:
        image_shape: (channels, height, width), 17x17 pixels or more.
        preset: "small" (two cores) or "paper", the networks of the guide.
        routing: "dynamic", "uniform" (one iteration), "em", "vb", the learned ones "attention",
            "self" and "uncertain", or a `Routing`, such as one of your own, which is then "own".
        channels: maps of the guide's first convolution, over those of the preset.
        sizes: arguments of `CapsuleNetwork`.

    Guides:
        dynamic: class capsules by dynamic routing, as in the paper.
        uniform: class capsules without routing: all votes count alike.
        em: class capsules by expectation maximization, on the same votes.
        vb: class capsules by variational Bayes, on the same votes.
        attention: class capsules by self-attention, and a learned number for each coupling.
        self: every primary capsule chooses its class by itself, by learned weights.
        uncertain: couplings that all images share, with a learned posterior.
        own: the routing that was given as an object.
        normal: the default routing, with normal poses around its class capsules.
    """
    name, known = (routing, ROUTINGS) if isinstance(routing, str) else ("own", {"own": routing})
    check_known("routing", name, known)
    model = CapsuleNetwork(image_shape, **sizes)
    network: dict[str, Any] = {"network": preset, "channels": channels}
    others = {other: _with(ROUTINGS[other]) for other in ROUTINGS if other != name}
    return Entry(
        model=model,
        guides={
            name: lambda entry: RoutedCapsules(entry.model, known[name], **network),
            **others,
            "normal": lambda entry: entry.guide.with_poses("normal"),
        },
        objective=Trace_ELBO(),
        training=TRAINING,
        figures={"reconstructions": reconstructions, "dimensions": dimensions, "samples": samples},
    )


@register(
    "overlapping-capsule-network", small=SMALL, takes={"sizes": Takes(OverlappingCapsuleNetwork)}
)
def overlapping_capsule_network(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    preset: str = "small",
    channels: int | None = None,
    **sizes: Any,
) -> Entry:
    """Class capsules that separate two images, each overlaid with another of its batch.

    Args:
        image_shape, preset, channels: as for `capsule-network`.
        sizes: arguments of `OverlappingCapsuleNetwork`.
    """
    model = OverlappingCapsuleNetwork(image_shape, **sizes)
    network: dict[str, Any] = {"network": preset, "channels": channels}
    return Entry(
        model=model,
        guides={
            "dynamic": lambda entry: OverlappingRoutedCapsules(
                entry.model, ROUTINGS["dynamic"], **network
            )
        },
        objective=Trace_ELBO(),
        training=TRAINING,
        figures={"samples": samples},
    )
