"""Comparison of several pairs of a model and a guide, on shared images with shared seeds."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from capsule_zoo.data.progress import announce
from capsule_zoo.inference.evaluation.evaluate import evaluate
from capsule_zoo.inference.evaluation.prepare import Images, Labels, prepare
from capsule_zoo.inference.evaluation.summary import (
    per_image_elbo,
    remark,
    standard_error,
    summarize,
)
from capsule_zoo.models.checks import check_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BOUNDS = ("elbo", "elbo_se", "iwae", "iwae_se")
_OTHERS = ("map_objective", "ess", "pareto_k", "seconds_per_image", "is_bound", "remark")
_COLUMNS = (*_BOUNDS, "elbo_difference", "elbo_difference_se", *_OTHERS)
_DRAWN = (*_BOUNDS, "map_objective", "is_bound")


class Comparison(pd.DataFrame):
    """A pandas DataFrame with one row for each pair, and a plot of it (`draw`).

    The columns are the numbers that `summarize` returns, in nats per image, and elbo_difference
    with its standard error: the mean over images of the paired difference to the first row that is
    a bound. A row that is not a bound has its value under map_objective and NaN under every bound.
    `remark` is a warning where an IWAE is decided by a few draws; it is NaN elsewhere.
    The quantity that the bounds refer to is `attrs["bound_on"]`.
    """

    @property
    def _constructor(self) -> "type[Comparison]":
        return Comparison

    def __str__(self) -> str:
        """Return the whole table as text, one line a pair, not cut to 80 columns."""
        table = self.dropna(axis=1, how="all").drop(columns="is_bound", errors="ignore")
        return table.round(2).to_string(na_rep="")

    def draw(self, figure: "Figure | None" = None) -> "Figure":
        """Plot ELBO and IWAE of each row with two standard errors, and MAP objectives separately.

        Raises:
            ValueError: columns that are drawn were left out of the table.
        """
        import matplotlib.pyplot as plt

        if missing := [column for column in _DRAWN if column not in self.columns]:
            raise ValueError(
                f"columns are missing: {', '.join(missing)}; draw the table that compare "
                "returned, or rows of it, or use pandas' plot"
            )
        both = (_draw_bounds, self[self["is_bound"]]), (_draw_points, self[~self["is_bound"]])
        kinds = [kind for kind in both if len(kind[1])]
        rows = [max(len(part), 0.6) for _, part in kinds]
        figure = figure or plt.figure(figsize=(7, 1.1 + 0.55 * sum(rows) + 0.6 * len(rows)))
        axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
        for panel, (draw, part) in zip(axes, kinds, strict=True):
            draw(panel, part)
        figure.set_layout_engine("constrained")
        return figure


def compare(
    pairs: Mapping[str, tuple[Callable, Callable]],
    images: Images,
    *,
    labels: Labels = None,
    num_particles: int = 50,
    seed: int = 0,
    discrete: bool = True,
    **options: Any,
) -> Comparison:
    """Evaluate every pair on the same images with the same seed.

    Every pair is checked before the first is evaluated.

    Args:
        pairs: (model, guide) by name; the others are compared with the first pair that has a bound.
        images: (N, C, H, W), or all else that `evaluate` takes; a `DataLoader` is read for each.
        labels, num_particles, seed, discrete, options: see `evaluate`.

    Raises:
        ValueError: there is no pair, or the rows measure different things: relaxed presences
            next to others, or models of labels next to models of images.
        IncompatibleGuide: a guide does not fit its model.
    """
    if not isinstance(pairs, Mapping):
        raise ValueError(f'pairs must be {{"name": (model, guide)}}, not a {type(pairs).__name__}')
    if not pairs:
        raise ValueError('pairs is empty; give at least one, as {"name": (model, guide)}')
    for name, candidate in pairs.items():
        if not isinstance(candidate, tuple | list):
            raise ValueError(
                f"the pair {name!r} must be (model, guide), not a {type(candidate).__name__}; of "
                "an entry, pass (entry.model, entry.guide)"
            )
    _refuse_labels_next_to_images(pairs)
    shared: dict[str, Any] = dict(labels=labels, seed=check_seed(seed), discrete=discrete)
    presences = {
        name: prepare(*pair, images, **shared, streamed=True).presence
        for name, pair in pairs.items()
    }
    _refuse_relaxed_next_to_others(presences)
    rows, reference, measured = {}, None, {}
    for name, pair in pairs.items():
        options = {"draws": 0, **options}
        model, guide = pair
        announce(f"evaluating {name}")
        idata = evaluate(model, guide, images, num_particles=num_particles, **shared, **options)
        row: dict[str, Any] = summarize(idata)
        row["remark"] = remark(row) or np.nan
        elbo = per_image_elbo(idata)
        if row["is_bound"]:
            measured[name] = idata.attrs["bound_on"]
            _refuse_several(measured)
            reference = elbo if reference is None else reference
            row["elbo_difference"] = float((elbo - reference).mean())
            row["elbo_difference_se"] = standard_error(elbo - reference)
        rows[name] = {column: row.get(column, np.nan) for column in _COLUMNS}
    table = Comparison.from_dict(rows, orient="index")
    table.attrs = {
        "num_particles": row["num_particles"],
        "seed": seed,
        "num_images": len(elbo),
        "presence": presences[next(iter(pairs))],
        "bound_on": next(iter(measured.values()), ""),
    }
    return table.astype({"is_bound": bool})


def _refuse_labels_next_to_images(pairs: Mapping[str, tuple[Callable, Callable]]) -> None:
    kinds = {name: bool(getattr(pair[0], "supervised", False)) for name, pair in pairs.items()}
    if len(set(kinds.values())) > 1:
        labels = [name for name, supervised in kinds.items() if supervised]
        images = [name for name, supervised in kinds.items() if not supervised]
        raise ValueError(
            f"some models explain labels ({_list_names(labels)}), others images "
            f"({_list_names(images)}), "
            "and no number ranks both; compare models of labels among themselves, with labels=...,"
            " or measure capsule_zoo.inference.error_rate(model, guide, split)"
        )


def _refuse_relaxed_next_to_others(presences: Mapping[str, str]) -> None:
    relaxed = [name for name, presence in presences.items() if presence == "relaxed"]
    others = [name for name, presence in presences.items() if presence != "relaxed"]
    if relaxed and others:
        raise ValueError(
            f"presences are relaxed in {_list_names(relaxed)}, but not in {_list_names(others)}, "
            "and a relaxed bound may exceed log p(image) of the discrete model; leave out "
            "discrete=False, or compare the relaxed rows in a table of their own"
        )


def _refuse_several(measured: Mapping[str, str]) -> None:
    if len(set(measured.values())) > 1:
        listing = "; ".join(f"{name!r} bounds {quantity}" for name, quantity in measured.items())
        raise ValueError(f"rows measure different things: {listing}; compare them separately")


def _list_names(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _draw_bounds(axes: "Axes", table: pd.DataFrame) -> None:
    height = np.arange(len(table))[::-1]
    particles = table.attrs.get("num_particles")
    labels = {"elbo": "ELBO", "iwae": f"IWAE-{particles}" if particles else "IWAE"}
    for (column, label), color in zip(labels.items(), ("C0", "C1"), strict=True):
        error = 2 * table[f"{column}_se"].fillna(0)
        axes.errorbar(
            table[column], height, xerr=error, fmt="o", color=color, capsize=3, label=label
        )
    axes.hlines(height, table["elbo"], table["iwae"], color="0.8", zorder=0)
    bounded = table.attrs.get("bound_on") or "log p(image)"
    spread = "± 2 s.e." if table["elbo_se"].notna().any() else "one image"
    _finish(axes, table, height, f"bound on {bounded}, nats per image ({spread})")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)


def _draw_points(axes: "Axes", table: pd.DataFrame) -> None:
    height = np.arange(len(table))[::-1]
    axes.plot(table["map_objective"], height, "x", color="0.4")
    _finish(axes, table, height, "MAP objective, no bound: not comparable with the above")


def _finish(axes: "Axes", table: pd.DataFrame, height: np.ndarray, label: str) -> None:
    axes.set_yticks(height, [name.replace("_", " ") for name in table.index])
    axes.set_ylim(-0.6, len(table) - 0.4)
    axes.set_xlabel(label)
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
