"""The data of a Pyro program as rows of numbers, from which its arguments are restored.

A row holds, side by side, the numbers of every observed site, and of every argument that has one
entry for each row. NaN marks a missing value. So the data of any program are one tensor (B, F),
which can be split, shuffled and repeated as images can.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
from pyro.poutine import Trace
from torch import Tensor

from capsule_zoo.models.common.spaces import ObservationSpace

Key = int | str  # an argument: its position, or its name


class Part(NamedTuple):
    """The columns of one observed site or argument.

    Attributes:
        columns: the columns.
        dtype: precision of the values.
        fill: an observed value, which stands for missing ones.
        site: the observed site to which they belong; None for an argument alone.
        shape: shape of one row's value at the site.
        argument: the argument to which they belong; None for an observed site alone.
        argument_shape: shape of one row's value in the argument.
    """

    columns: slice
    dtype: torch.dtype
    fill: float
    site: str | None = None
    shape: tuple[int, ...] = ()
    argument: Key | None = None
    argument_shape: tuple[int, ...] = ()


class Rows(ObservationSpace):
    """The observation space of a program's rows.

    Args:
        parts: the site or argument of each group of columns.
        examples: rows (N, F), whose arguments and missing values simulated rows have.
    """

    site = ""  # no single site holds a whole row
    variable = "rows"
    dims = ("column",)

    def __init__(self, parts: list[Part], examples: Tensor) -> None:
        self.parts = parts
        self.examples = examples

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the observed sites."""
        return tuple(part.site for part in self.parts if part.site is not None)

    @property
    def width(self) -> int:
        """The number of columns, F."""
        return self.examples.shape[1]

    def check(self, batch: Tensor) -> None:
        """Raise ValueError unless `batch` is (B, F), and finite or NaN where it may be missing."""
        if not isinstance(batch, Tensor) or batch.dim() != 2 or batch.shape[1] != self.width:
            form = tuple(batch.shape) if isinstance(batch, Tensor) else type(batch).__name__
            raise ValueError(
                f"rows must be a tensor (B, {self.width}) for this program, not {form}; make them "
                "by model.rows_of(*args, observed=...)"
            )
        if not len(batch):
            raise ValueError("rows is empty; give at least one row of data")
        for part in self.parts:
            values = batch[:, part.columns]
            if values.isinf().any():
                where = f"argument {part.argument!r}" if part.site is None else repr(part.site)
                raise ValueError(
                    f"{where} holds values that are not finite; NaN may mark missing ones of an "
                    "observed site"
                )

    def example(self, number: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """Sample examples with replacement."""
        index = torch.randint(len(self.examples), (number,), generator=generator)
        return self.examples[index].to(dtype)

    def templates(self, number: int) -> Tensor:
        """Repeat the examples up to `number` rows, (number, F)."""
        return self.examples.repeat(math.ceil(number / len(self.examples)), 1)[:number]

    def arguments(self, rows: Tensor) -> dict[Key, Tensor]:
        """Return the arguments of rows by position or name, (B, 1, ...) each."""
        return {
            part.argument: _cast(rows[:, part.columns], part, (1, *part.argument_shape))
            for part in self.parts
            if part.argument is not None
        }

    def observed_values(self, rows: Tensor) -> dict[str, list[Tensor]]:
        """Return each observed site's values, filled in, and a mask if some are missing."""
        result = {}
        for part in self.parts:
            if part.site is not None:
                values = rows[:, part.columns]
                missing = values.isnan()
                result[part.site] = [
                    _cast(values.masked_fill(missing, part.fill), part, part.shape)
                ]
                if bool(missing.any()):
                    result[part.site].append(~missing.reshape(len(rows), *part.shape))
        return result

    def read(self, trace: Trace, of: Callable[[dict], Tensor] = itemgetter("value")) -> Tensor:
        """Return the rows of a run, with its arguments.

        Those of a run without data have the arguments of the templates, and miss what these miss.
        """
        values = {name: of(trace.nodes[name]) for name in self.sites}
        number = len(next(iter(values.values())))
        data = trace.nodes["_INPUT"]["args"] if "_INPUT" in trace.nodes else ()
        rows = (data[0] if data else self.templates(number)).clone()
        for part in self.parts:
            if part.site is not None:
                old = rows[:, part.columns]
                new = values[part.site].reshape(number, -1).to(rows)
                missing = old.isnan() & (not data)
                rows[:, part.columns] = new.masked_fill(missing, math.nan)
        return rows


def _cast(values: Tensor, part: Part, shape: tuple[int, ...]) -> Tensor:
    values = values.reshape(len(values), *shape)
    return values if part.dtype.is_floating_point else values.round().to(part.dtype)


@dataclass
class Columns:
    """A builder of rows: values of sites and arguments, concatenated column by column.

    Attributes:
        parts: the columns of each added value.
        values: the added values, (N, columns) each.
    """

    parts: list[Part]
    values: list[Tensor]

    def add(self, values: Tensor, **place: object) -> None:
        """Append values (N, ...) of a site, of an argument, or of both; see `Part`."""
        flat = values.reshape(len(values), -1)
        start = self.parts[-1].columns.stop if self.parts else 0
        mask = flat[~flat.isnan()]
        fill = float(mask.min()) if mask.numel() else 0.0
        columns = slice(start, start + flat.shape[1])
        self.parts.append(Part(columns, flat.dtype, fill, **place))  # type: ignore[arg-type]
        self.values.append(flat)

    def join(self) -> Tensor:
        """Return the rows (N, F), in double precision if any value has it."""
        double = any(element.dtype == torch.float64 for element in self.values)
        dtype = torch.float64 if double else torch.get_default_dtype()
        return torch.cat([element.to(dtype) for element in self.values], 1)


def same_data(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have one shape and are equal, NaN included."""
    if first.shape != second.shape:
        return False
    return bool(((first == second) | (first.isnan() & second.isnan())).all())
