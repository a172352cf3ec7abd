"""Generative CapsNets (Potapov 2018), and the baseline decoders without capsules.

All entries take the same guides: "variational" (with densities, so the loss is a bound) and
"deterministic" (the article's autoencoder).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pyro.infer import Trace_ELBO

from capsule_zoo.data import Rotations, Shifts
from capsule_zoo.figures.generic import reconstructions, samples
from capsule_zoo.guides import ConditionalEncoder
from capsule_zoo.models import ConditionalAutoencoder, ContinuousCapsNet, GenerativeCapsNet
from capsule_zoo.models.blocks.on_request import OnRequest
from capsule_zoo.models.checks import check_one_of
from capsule_zoo.registry import Entry, register
from capsule_zoo.sizes import Takes

IDENTITY = {"rotations": Rotations.identity, "shifts": Shifts.identity}
PICTURES = {"samples": samples, "reconstructions": reconstructions}
SMALL: dict[str, Any] = dict(
    image_shape=(1, 5, 6), window=(4, 5), guide_sizes=dict(channels=3, hidden=6), channels=3
)
SMALL_CAPSULES: dict[str, Any] = {**SMALL, "parts": 3, "maps": 2, "hidden": 4, "jitter": 0.1}


def _takes(kind: type[OnRequest], *without: str) -> dict[str, Takes]:
    """Return where further sizes go: to the model, or from `guide_sizes` to the guide."""
    return {
        "sizes": Takes(kind, without=("identity", *without)),
        "guide_sizes": Takes(ConditionalEncoder, without=("deterministic",)),
    }


def _entry(
    kind: type[OnRequest],
    image_shape: tuple[int, int, int],
    requests: str,
    window: tuple[int, int] | None,
    guide_sizes: Mapping[str, Any],
    **sizes: Any,
) -> Entry:
    check_one_of("requests", requests, tuple(IDENTITY))
    model = kind(image_shape, identity=IDENTITY[requests], **sizes)
    options = {"window": window, **guide_sizes}

    def guide(entry: Entry, deterministic: bool) -> ConditionalEncoder:
        return ConditionalEncoder(entry.model, deterministic=deterministic, **options)

    return Entry(
        model=model,
        guides={
            "variational": partial(guide, deterministic=False),
            "deterministic": partial(guide, deterministic=True),
        },
        objective=Trace_ELBO(),
        training=dict(lr=1e-3, schedule="linear", batch_size=64),
        figures=PICTURES,
    )


@register(
    "generative-capsnet",
    small={**SMALL_CAPSULES, "kinds": 2, "pose": 2, "length": 3},
    takes=_takes(GenerativeCapsNet),
)
def generative_capsnet(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    requests: str = "rotations",
    window: tuple[int, int] | None = None,
    guide_sizes: Mapping[str, Any] = {},
    **sizes: Any,
) -> Entry:
    """Kinds of objects route parts by address; see `capsule_zoo.models.generative_capsnet`.

    Args:
        image_shape: (channels, height, width).
        requests: transformations that the model can render, "rotations" or "shifts".
        window: (height, width) of the middle part that the guide reads; default: the whole image.
        guide_sizes: further arguments of `ConditionalEncoder`.
        sizes: arguments of `GenerativeCapsNet`.
    """
    return _entry(GenerativeCapsNet, image_shape, requests, window, guide_sizes, **sizes)


@register(
    "generative-capsnet-continuous",
    small={**SMALL_CAPSULES, "latent": 2},
    takes=_takes(ContinuousCapsNet),
)
def generative_capsnet_continuous(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    requests: str = "rotations",
    window: tuple[int, int] | None = None,
    guide_sizes: Mapping[str, Any] = {},
    **sizes: Any,
) -> Entry:
    """A code without kinds routes parts by address; see `models.generative_capsnet`.

    Args:
        image_shape: (channels, height, width).
        requests: transformations that the model can render, "rotations" or "shifts".
        window: (height, width) of the middle part that the guide reads; default: the whole image.
        guide_sizes: further arguments of `ConditionalEncoder`.
        sizes: arguments of `ContinuousCapsNet`.
    """
    return _entry(ContinuousCapsNet, image_shape, requests, window, guide_sizes, **sizes)


@register(
    "conditional-autoencoder",
    small={**SMALL, "latent": 2, "hidden": 4},
    takes=_takes(ConditionalAutoencoder),
)
def conditional_autoencoder(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    requests: str = "rotations",
    window: tuple[int, int] | None = None,
    guide_sizes: Mapping[str, Any] = {},
    **sizes: Any,
) -> Entry:
    """A convolutional decoder of code and request; see `models.baselines.conditional_autoencoder`.

    Args:
        image_shape: (channels, height, width).
        requests: transformations that the model can render, "rotations" or "shifts".
        window: (height, width) of the middle part that the guide reads; default: the whole image.
        guide_sizes: further arguments of `ConditionalEncoder`.
        sizes: arguments of `ConditionalAutoencoder`.
    """
    return _entry(ConditionalAutoencoder, image_shape, requests, window, guide_sizes, **sizes)


@register(
    "broadcast-autoencoder",
    small={**SMALL, "latent": 2, "hidden": 4},
    takes=_takes(ConditionalAutoencoder, "decoder"),
)
def broadcast_autoencoder(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    requests: str = "rotations",
    window: tuple[int, int] | None = None,
    guide_sizes: Mapping[str, Any] = {},
    hidden: int = 64,
    **sizes: Any,
) -> Entry:
    """Code and request at every cell of a grid; see `models.baselines.conditional_autoencoder`.

    Args:
        image_shape: (channels, height, width).
        requests: transformations that the model can render, "rotations" or "shifts".
        window: (height, width) of the middle part that the guide reads; default: the whole image.
        guide_sizes: further arguments of `ConditionalEncoder`.
        hidden, sizes: arguments of `ConditionalAutoencoder`.
    """
    sizes |= dict(decoder="broadcast", hidden=hidden)
    return _entry(ConditionalAutoencoder, image_shape, requests, window, guide_sizes, **sizes)
