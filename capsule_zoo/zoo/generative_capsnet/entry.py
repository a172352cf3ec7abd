"""Generative CapsNets (Potapov 2018), and the baseline decoders without capsules.

All entries take the same guides: "variational" (with densities, so the loss is a bound) and
"deterministic" (the article's autoencoder).
"""

from collections.abc import Callable, Mapping
from typing import Any

from pyro.infer import Trace_ELBO

from capsule_zoo.data import Rotations, Shifts
from capsule_zoo.figures.generic import reconstructions, samples
from capsule_zoo.guides import ConditionalEncoder
from capsule_zoo.inference import Pace
from capsule_zoo.models import (
    ConditionalAutoencoder,
    ContinuousCapsNet,
    GenerativeCapsNet,
    OnRequest,
    check_one_of,
)
from capsule_zoo.registry import Entry, register
from capsule_zoo.sizes import Takes

IDENTITY = {"rotations": Rotations.identity, "shifts": Shifts.identity}
PICTURES = {"samples": samples, "reconstructions": reconstructions}
SMALL: dict[str, Any] = dict(
    image_shape=(1, 5, 6), window=(4, 5), guide=dict(channels=3, hidden=6), channels=3
)
SMALL_CAPSULES: dict[str, Any] = {**SMALL, "parts": 3, "maps": 2, "hidden": 4, "jitter": 0.1}


ARGUMENTS = """

    Args:
        image_shape: (channels, height, width).
        requests: transformations that the model can render, "rotations" or "shifts".
        window: (height, width) of the middle part that the guide reads; default: the whole image.
        guide: further arguments of `ConditionalEncoder`.
        sizes: arguments of `{kind}`.

    Guides:
        variational: the code of an image is a normal distribution, as in a VAE.
        deterministic: the code of an image is a point, as in an autoencoder.
    """


def _register(
    name: str, kind: type[OnRequest], summary: str, small: Mapping[str, Any], **fixed: Any
) -> Callable[..., Entry]:
    """Register an entry for a class of models and return its factory.

    Args:
        summary: the first line of the factory's docstring, which lists show.
        fixed: defaults of arguments of `kind` that replace its own.
    """

    def factory(
        image_shape: tuple[int, int, int] = (1, 28, 28),
        requests: str = "rotations",
        window: tuple[int, int] | None = None,
        guide: Mapping[str, Any] = {},
        **sizes: Any,
    ) -> Entry:
        check_one_of("requests", requests, tuple(IDENTITY))
        model = kind(image_shape, identity=IDENTITY[requests], **{**fixed, **sizes})
        options = {"window": window, **guide}
        points = {**options, "deterministic": True}
        return Entry(
            model=model,
            guides={
                "variational": lambda entry: ConditionalEncoder(entry.model, **options),
                "deterministic": lambda entry: ConditionalEncoder(entry.model, **points),
            },
            objective=Trace_ELBO(),
            training=dict(lr=1e-3, pace=Pace("linear"), batch_size=64),
            figures=PICTURES,
        )

    factory.__name__ = factory.__qualname__ = name.replace("-", "_")
    factory.__doc__ = summary + ARGUMENTS.format(kind=kind.__name__)
    takes = {
        "sizes": Takes(kind, without=("identity",), defaults=fixed),
        "guide": Takes(ConditionalEncoder, without=("deterministic",)),
    }
    return register(name, small=small, takes=takes)(factory)


generative_capsnet = _register(
    "generative-capsnet",
    GenerativeCapsNet,
    "Kinds of objects route parts by address, and parts draw themselves there.",
    {**SMALL_CAPSULES, "kinds": 2, "pose": 2, "length": 3},
)
generative_capsnet_continuous = _register(
    "generative-capsnet-continuous",
    ContinuousCapsNet,
    "A code without kinds routes parts by address, and parts draw themselves there.",
    {**SMALL_CAPSULES, "latent": 2},
)
conditional_autoencoder = _register(
    "conditional-autoencoder",
    ConditionalAutoencoder,
    "A convolutional decoder that gets a code and the requested change, without capsules.",
    {**SMALL, "latent": 2, "hidden": 4},
)
broadcast_autoencoder = _register(
    "broadcast-autoencoder",
    ConditionalAutoencoder,
    "A decoder that gets a code and the requested change at every cell of a grid.",
    {**SMALL, "latent": 2, "hidden": 4},
    decoder="broadcast",
    hidden=64,
)
