"""Pairs of a model and a guide side by side, on the same images with the same seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from capsule_zoo.data import Split
from capsule_zoo.inference.evaluate import evaluate, per_image_elbo, standard_error, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = (
    "elbo",
    "elbo_se",
    "iwae",
    "iwae_se",
    "elbo_difference",
    "elbo_difference_se",
    "map_objective",
    "ess",
    "pareto_k",
    "seconds_per_image",
    "is_bound",
)


class Comparison(pd.DataFrame):
    """One row for each pair; a pandas DataFrame that can draw itself.

    Columns are those of `summarize`, in nats per image, and elbo_difference with its standard
    error: the mean over images of the paired difference to the first row that is a bound. A row
    that is no bound has its value under map_objective and NaN under every bound.
    """

    @property
    def _constructor(self) -> type[Comparison]:
        return Comparison

    def plot(self, figure: Figure | None = None) -> Figure:
        """Draw ELBO and IWAE of each row with two standard errors; MAP objectives apart."""
        import matplotlib.pyplot as plt

        bounds, points = self[self["is_bound"]], self[~self["is_bound"]]
        rows = [max(len(part), 0.6) for part in (bounds, points) if len(part)]
        figure = figure or plt.figure(figsize=(7, 1.1 + 0.55 * sum(rows) + 0.6 * len(rows)))
        axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
        panels = iter(axes)
        if len(bounds):
            _draw_bounds(next(panels), bounds)
        if len(points):
            _draw_points(next(panels), points)
        figure.set_layout_engine("constrained")
        return figure


def compare(
    pairs: Mapping[str, tuple[nn.Module, nn.Module]],
    images: Tensor | Split,
    *,
    num_particles: int = 50,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Evaluate every pair on the same images with the same seed.

    Args:
        pairs: (model, guide) by name; the first with a bound is what others are compared to.
        images: (N, C, H, W), or a `Split`.
        num_particles, seed, options: see `evaluate`.

    Raises:
        ValueError: there is no pair.
    """
    if not pairs:
        raise ValueError('pairs is empty; give at least one, as {"name": (model, guide)}')
    rows, reference = {}, None
    for name, (model, guide) in pairs.items():
        idata = evaluate(
            model, guide, images, num_particles=num_particles, seed=seed, **{"draws": 0, **options}
        )
        row = summarize(idata)
        elbo = per_image_elbo(idata)
        if row["is_bound"]:
            reference = elbo if reference is None else reference
            row["elbo_difference"] = float((elbo - reference).mean())
            row["elbo_difference_se"] = standard_error(elbo - reference)
        rows[name] = {column: row.get(column, np.nan) for column in _COLUMNS}
    table = Comparison.from_dict(rows, orient="index")
    table.attrs = {"num_particles": num_particles, "seed": seed, "num_images": len(elbo)}
    return table.astype({"is_bound": bool})


def _draw_bounds(axes: Axes, table: pd.DataFrame) -> None:
    height = np.arange(len(table))[::-1]
    particles = table.attrs.get("num_particles")
    labels = {"elbo": "ELBO", "iwae": f"IWAE-{particles}" if particles else "IWAE"}
    for (column, label), color in zip(labels.items(), ("C0", "C1"), strict=True):
        error = 2 * table[f"{column}_se"].fillna(0)
        axes.errorbar(
            table[column], height, xerr=error, fmt="o", color=color, capsize=3, label=label
        )
    axes.hlines(height, table["elbo"], table["iwae"], color="0.8", zorder=0)
    _finish(axes, table, height, "bound on log p(image), nats per image (± 2 s.e.)")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)


def _draw_points(axes: Axes, table: pd.DataFrame) -> None:
    height = np.arange(len(table))[::-1]
    axes.plot(table["map_objective"], height, "x", color="0.4")
    _finish(axes, table, height, "MAP objective, no bound: not comparable with the above")


def _finish(axes: Axes, table: pd.DataFrame, height: np.ndarray, label: str) -> None:
    axes.set_yticks(height, table.index)
    axes.set_ylim(-0.6, len(table) - 0.4)
    axes.set_xlabel(label)
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
