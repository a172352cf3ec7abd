"""Matrix capsules with EM routing (Hinton, Sabour and Frosst 2018)."""

from functools import partial
from typing import Any

from pyro.infer import Trace_ELBO

from capsule_zoo.guides import DynamicRouting, EMRouting, ExactLabel, Routing, VBRouting
from capsule_zoo.guides.learned_routing import LEARNED
from capsule_zoo.inference import Inputs, Pace, SpreadLoss
from capsule_zoo.models import MatrixCapsules
from capsule_zoo.models.matrix_capsules import PRESETS
from capsule_zoo.registry import Entry, check_known, register
from capsule_zoo.sizes import Takes
from capsule_zoo.zoo.matrix_capsules.figures import votes

ITERATED: dict[str, Any] = {
    "em": EMRouting,
    "em-standardized": partial(EMRouting, anneal="linear", costs="standardized"),  # Hui's article
    "vb": VBRouting,
    "dynamic": DynamicRouting,
}
ROUTINGS = (*ITERATED, "uniform", *LEARNED)
SMALL = dict(image_shape=(1, 17, 17), classes=2, features=3, capsules=(2, 2, 2))


@register(
    "matrix-capsules",
    small=SMALL,
    takes={"sizes": Takes(MatrixCapsules, defaults=PRESETS["small"])},
)
def matrix_capsules(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    preset: str = "small",
    routing: str | Routing = "em",
    iterations: int = 2,
    power: float | None = None,
    **sizes: Any,
) -> Entry:
    """A classifier whose layers are inferred by routing.

    Args:
        image_shape: (channels, height, width), 17x17 pixels or more.
        preset: "small" (68 K parameters) or "full" (319 K).
        routing: "em", "em-standardized" (Hui's: costs standardized over the parents, and an inverse
            temperature that rises by 1), "vb", "dynamic", "uniform" (one iteration), the learned
            ones "attention", "self" and "uncertain", or a `Routing`, such as one of your own.
        iterations: iterations of a routing that iterates; the paper uses three, which learn more
            slowly here (see the page of results).
        power: exponent of the responsibilities of "em", "em-standardized" and "vb", by default 1;
            with three iterations a quarter is better. Other routings have none.
        sizes: arguments of `MatrixCapsules` that replace the preset's values.
    """
    check_known("preset", preset, PRESETS)
    how = routing_of(routing, iterations, power)
    model = MatrixCapsules(image_shape, routing=how, **{**PRESETS[preset], **sizes})
    return Entry(
        model=model,
        guides={"exact": ExactLabel},
        objective=SpreadLoss() if model.likelihood == "spread" else Trace_ELBO(),
        figures={"votes": votes},
        training=dict(lr=3e-3, pace=Pace("linear"), batch_size=32, inputs=Inputs(labels=True)),
    )


def routing_of(routing: str | Routing, iterations: int = 2, power: float | None = None) -> Routing:
    """Return the routing of a name; see `matrix_capsules` for the arguments."""
    if power is not None and routing not in ("em", "em-standardized", "vb"):
        raise ValueError(f"power must be left out for routing {routing!r}, not {power!r}")
    if isinstance(routing, Routing):
        return routing
    check_known("routing", routing, ROUTINGS)
    if routing in LEARNED:
        return LEARNED[routing]()
    if routing == "uniform":
        return DynamicRouting(1)
    return ITERATED[routing](iterations, **({} if power is None else {"power": power}))
