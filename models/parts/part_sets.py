"""The observation space of part sets: encoded parts as the data of models of objects."""

from dataclasses import dataclass

import torch
from torch import Tensor

from capsule_zoo.models.common.spaces import ObservationSpace
from capsule_zoo.models.parts.parent_selection import Capsules


@dataclass(frozen=True)
class PartSets(ObservationSpace):
    """The space of sets of encoded parts, (B, 1, parts, numbers).

    Attributes:
        parts: number of parts.
        numbers: number of values of each part, such as its presence and pose.
    """

    parts: int
    numbers: int

    site = "part"
    variable = "parts"
    dims = ("set", "part", "number")

    def check(self, batch: Tensor) -> None:
        """Raise ValueError, with a remedy, unless `batch` holds part sets of finite numbers."""
        shape = (1, self.parts, self.numbers)
        if not isinstance(batch, Tensor) or batch.shape[1:] != shape or not len(batch):
            actual_shape = tuple(batch.shape) if isinstance(batch, Tensor) else type(batch).__name__
            raise ValueError(
                f"part sets must be (B, {', '.join(map(str, shape))}), not {actual_shape}; read "
                "them off images with the same guide in the scope 'parts'"
            )
        if not batch.isfinite().all():
            raise ValueError("part sets hold NaN or infinite numbers; leave such sets out")

    def example(self, number: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """Sample part sets of present parts, with uniform numbers in [0, 1]."""
        shape = number, 1, self.parts, self.numbers
        sets = torch.rand(shape, generator=generator, dtype=dtype)
        sets[..., 0] = 1
        return sets

    def as_batch(self, values: Tensor) -> Tensor:
        """Flatten values of the observed site, (*batch, parts, numbers), to one batch."""
        return values.reshape(-1, 1, self.parts, self.numbers)


def as_part_sets(parts: Capsules) -> Tensor:
    """Convert parts with discrete presences to part sets, (N, 1, P, 7)."""
    return torch.cat([parts.presence[..., None], parts.pose], dim=-1).unsqueeze(-3)


def from_part_sets(sets: Tensor) -> Capsules:
    """Convert part sets (N, 1, P, 7) to parts."""
    return Capsules(sets[..., 0].squeeze(-2), sets[..., 1:].squeeze(-3))
