"""The space of part sets: what models of objects observe where parts were read before."""

from dataclasses import dataclass

import torch
from torch import Tensor

from capsule_zoo.models.common.spaces import ObservationSpace
from capsule_zoo.models.parts.parent_selection import Capsules


@dataclass(frozen=True)
class PartSets(ObservationSpace):
    """Sets of parts that were read off images, (B, 1, parts, numbers).

    Attributes:
        parts: number of parts.
        numbers: what is known of each part, such as its presence and pose.
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
        """Draw sets of parts that are all present, with numbers that are uniform in [0, 1]."""
        shape = number, 1, self.parts, self.numbers
        sets = torch.rand(shape, generator=generator, dtype=dtype)
        sets[..., 0] = 1
        return sets

    def as_batch(self, values: Tensor) -> Tensor:
        """Return values of the observed site, (*batch, parts, numbers), as one batch."""
        return values.reshape(-1, 1, self.parts, self.numbers)


def as_part_sets(parts: Capsules) -> Tensor:
    """Return parts with discrete presences as part sets, (N, 1, P, 7)."""
    return torch.cat([parts.presence[..., None], parts.pose], dim=-1).unsqueeze(-3)


def from_part_sets(sets: Tensor) -> Capsules:
    """Return the parts of part sets (N, 1, P, 7)."""
    return Capsules(sets[..., 0].squeeze(-2), sets[..., 1:].squeeze(-3))
