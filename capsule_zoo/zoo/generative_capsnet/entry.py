"""Generative CapsNets (Potapov 2018), and the baseline decoders without capsules.

Both entries have two guides: "variational" (with densities, so the loss is a bound) and
"deterministic" (the article's autoencoder).
"""

from functools import partial
from typing import Any

from capsule_zoo.data import Rotations, Shifts
from capsule_zoo.figures.generic import reconstructions, samples
from capsule_zoo.guides import ConditionalEncoder
from capsule_zoo.inference import Pace
from capsule_zoo.models import ConditionalAutoencoder, ContinuousCapsNet, GenerativeCapsNet
from capsule_zoo.registry import Entry, register


def make_encoder(entry: Entry, deterministic: bool) -> ConditionalEncoder:
    """Return a new encoder of a variant, with the arguments of the entry's guide."""
    arguments = entry.guide_of(ConditionalEncoder).arguments
    changes = {"model": entry.model, "deterministic": deterministic}
    return ConditionalEncoder(**{**arguments, **changes})


def deterministic(entry: Entry) -> ConditionalEncoder:
    """The code of an image is a point estimate, as in an autoencoder."""
    return make_encoder(entry, deterministic=True)


def variational(entry: Entry) -> ConditionalEncoder:
    """The posterior of an image's code is a normal distribution, as in a VAE."""
    return make_encoder(entry, deterministic=False)


def presets_of(base: Any, preset: str, **changes: Any) -> dict[str, dict[str, Any]]:
    """Return the presets for shifts, for another model, and for shifts of the other model.

    Args:
        base: the class of the entry's model.
        preset: the name of the preset that has the other model.
        changes: the fields of that preset.
    """
    other = changes["model"]
    shifts = Shifts.identity
    return {
        "shifts": dict(model=partial(base, identity=shifts)),
        preset: {**changes, "model": partial(other, identity=Rotations.identity)},
        f"{preset}-shifts": {**changes, "model": partial(other, identity=shifts)},
    }


SHARED: dict[str, Any] = dict(
    guide=ConditionalEncoder,
    guides={"variational": variational, "deterministic": deterministic},
    training=dict(lr=1e-3, pace=Pace("linear"), batch_size=64),
    figures={"samples": samples, "reconstructions": reconstructions},
)
SMALL: dict[str, Any] = dict(
    image_shape=(1, 5, 6), channels=3, guide=dict(window=(4, 5), channels=3, hidden=6)
)
SMALL_CAPSULES: dict[str, Any] = {**SMALL, "parts": 3, "maps": 2, "hidden": 4, "jitter": 0.1}
register(
    "generative-capsnet",
    model=partial(GenerativeCapsNet, identity=Rotations.identity),
    presets=presets_of(
        GenerativeCapsNet,
        "continuous",
        model=ContinuousCapsNet,
        summary="A code without kinds routes parts by address, and parts draw themselves there.",
        small={**SMALL_CAPSULES, "latent": 2},
    ),
    summary="Kinds of objects route parts by address, and parts draw themselves there.",
    small={**SMALL_CAPSULES, "kinds": 2, "pose": 2, "length": 3},
    **SHARED,
)
register(
    "conditional-autoencoder",
    model=partial(ConditionalAutoencoder, identity=Rotations.identity),
    presets=presets_of(
        ConditionalAutoencoder,
        "broadcast",
        model=partial(ConditionalAutoencoder, decoder="broadcast", hidden=64),
        summary="A decoder that gets a code and the requested change at every cell of a grid.",
    ),
    summary="A convolutional decoder that gets a code and the requested change, without capsules.",
    small={**SMALL, "latent": 2, "hidden": 4},
    **SHARED,
)
