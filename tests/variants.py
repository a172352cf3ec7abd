"""Entries, and the presets whose models are of other classes, for tests of every model.

A preset is named after its entry, as in "generative-capsnet:continuous".
"""

from typing import Any

from capsule_zoo import registry
from capsule_zoo.registry import Entry

PRESETS = (
    "capsule-network:overlapping",
    "conditional-autoencoder:broadcast",
    "generative-capsnet:continuous",
    "recurrent-capsules:overlapping",
)


def list_models() -> list[str]:
    """Return the names of all entries, and of `PRESETS`."""
    return sorted([*registry.list_models(), *PRESETS])


def small_settings(name: str) -> dict[str, Any]:
    entry, _, preset = name.partition(":")
    return registry.small_settings(entry, preset or None)


def create(name: str, **settings: Any) -> Entry:
    """Create an entry, with the settings of `small_settings` or others, a preset among them."""
    entry, _, preset = name.partition(":")
    return registry.create(entry, **({"preset": preset} if preset else {}) | settings)


def takes_images(name: str) -> bool:
    return registry.takes_images(name.partition(":")[0])
