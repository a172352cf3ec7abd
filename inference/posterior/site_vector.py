"""Continuous sites of a model, concatenated to one unconstrained vector for each row."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributions.transforms import Transform, identity_transform


@dataclass(frozen=True)
class Place:
    """The columns of one site in the vectors, its shape and its transform.

    Attributes:
        columns: the site's columns.
        shape: shape of one row of the site in unconstrained space.
        transform: the map from the reals to the support.
    """

    columns: slice
    shape: torch.Size
    transform: Transform


@dataclass
class SiteVector:
    """The layout of sites in vectors (rows, D); sites are appended one by one.

    Attributes:
        places: the columns of each site, by name.
    """

    places: dict[str, Place] = field(default_factory=dict)

    @property
    def dimension(self) -> int:
        """The length D of a vector."""
        return max((place.columns.stop for place in self.places.values()), default=0)

    def add(self, name: str, value: Tensor, transform: Transform = identity_transform) -> None:
        """Append a site; `value` (rows, ...) is an example of its values."""
        free = transform.inv(value)
        columns = slice(self.dimension, self.dimension + free[0].numel())
        self.places[name] = Place(columns, free.shape[1:], transform)

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the values (rows, ...) of the sites to unconstrained vectors (rows, D)."""
        first = next(iter(values.values()))
        parts = [torch.zeros(len(first), 0, device=first.device)]
        for name, place in self.places.items():
            free = place.transform.inv(values[name])
            parts.append(free.reshape(len(free), -1))
        return torch.cat(parts, 1)

    def split(self, vectors: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the sites' values (rows, ...) in vectors, and the maps' log Jacobian, (rows,)."""
        values: dict[str, Tensor] = {}
        log_jacobian = vectors.new_zeros(len(vectors))
        for name, place in self.places.items():
            free = vectors[:, place.columns].reshape(-1, *place.shape)
            values[name] = place.transform(free)
            term = place.transform.log_abs_det_jacobian(free, values[name])
            log_jacobian = log_jacobian + term.reshape(len(free), -1).sum(1)
        return values, log_jacobian
