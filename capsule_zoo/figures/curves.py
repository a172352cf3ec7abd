"""Curves of accuracy or error along a line of transformations, with standard errors."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from capsule_zoo.figures.grids import panels
from capsule_zoo.records import metric_title

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from capsule_zoo.records import Numbers

MAX_LABEL = 36  # letters of a label in a legend of two columns


def accuracy_curves(curves: "Mapping[str, Numbers]", axis_label: str, chance: float) -> "Figure":
    """Draw one curve per name, with error bars of one standard error; see `number_curves`.

    Args:
        curves: by name, the accuracy at each position on the x axis.
        axis_label: label of the x axis.
        chance: the accuracy of guessing, drawn as a dotted line.
    """
    figure = _number_curves({"accuracy": curves}, axis_label)
    axis = figure.axes[0]
    axis.axhline(chance, color="gray", linestyle=":", label="chance")
    axis.set(ylim=(0, 1))
    return legend_below(figure)


def number_curves(grids: "Mapping[str, Mapping[str, Numbers]]", axis_label: str) -> "Figure":
    """Draw a panel per quantity and a curve per name, with error bars where errors are known.

    Args:
        grids: by quantity and name, the number at each position on the x axis, such as "2" or
            "0.1". A name has one color in all panels, for any order of names.
        axis_label: label of the x axis.
    """
    return legend_below(_number_curves(grids, axis_label))


def _number_curves(grids: "Mapping[str, Mapping[str, Numbers]]", axis_label: str) -> "Figure":
    figure, (axes,) = panels(len(grids), size=(5, 3.4))
    order = list(next(iter(grids.values())))
    for axis, (quantity, curves) in zip(axes, grids.items(), strict=True):
        ticks: set[float] = set()
        for name in order:
            places = [float(place) for place in curves[name]]
            ticks.update(places)
            values, errors, _ = zip(*curves[name].values(), strict=True)
            style = dict(fmt=".-", capsize=3, label=metric_title(name))
            axis.errorbar(places, values, [error or 0 for error in errors], **style)
        named = sorted(ticks)[:: 1 + len(ticks) // 9]  # more would overlap
        axis.set(xlabel=axis_label, ylabel=quantity, xticks=named)
    return figure


def legend_below(figure: "Figure") -> "Figure":
    """Add the legend of the last panel below all panels, because curves may run anywhere in them.

    It has two columns, or one where long labels would not fit on a page.
    """
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) <= MAX_LABEL else 1
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(labels) // columns))
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=columns)
    return figure


def error_curves(
    kinds: Mapping[str, Mapping[str, np.ndarray]],
    places: Sequence[float],
    trained: tuple[float, float],
    blank: Mapping[str, np.ndarray],
    axis_label: str,
) -> "Figure":
    """Draw a panel per class of images and a curve per decoder, in a band of one standard error.

    Args:
        kinds: by title and decoder, squared errors (seeds, points).
        places: parameters of the requests along the x axis.
        trained: smallest and largest request in training; the range between them is shaded.
        blank: by title, the errors (points,) of a blank image, drawn as a dotted line.
        axis_label: label of the x axis.
    """
    figure, (axes,) = panels(len(kinds), size=(4.2, 3.4), sharey=True)
    for axis, (title, curves) in zip(axes, kinds.items(), strict=True):
        low, high = trained
        width = 0.01 * (max(places) - min(places))
        axis.axvspan(low - width, high + width, color="0.9", label="range of training")
        for name, errors in curves.items():
            count = len(errors)
            error = errors.std(0, ddof=1) / count**0.5 if count > 1 else 0 * errors[0]
            mean = errors.mean(0)
            (line,) = axis.plot(places, mean, label=metric_title(name))
            band = dict(color=line.get_color(), alpha=0.25, lw=0)
            axis.fill_between(places, mean - error, mean + error, **band)
        axis.plot(places, blank[title], "k:", label="blank image")
        axis.set_yscale("log")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(axis_label)
    axes[0].set_ylabel("mean squared error, pixels in [-1, 1]")
    return legend_below(figure)


def plain_numbers(*sides: "Axis") -> None:
    """Label the major ticks of logarithmic axes with plain numbers, such as 0.1."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    for side in sides:
        side.set_major_formatter(ScalarFormatter())
        side.set_minor_formatter(NullFormatter())


def curves_on_log_scale(
    curves: Mapping[str, tuple],
    xlabel: str,
    ylabel: str,
    marks: Mapping[str, tuple] = MappingProxyType({}),
) -> "Figure":
    """Draw curves over a logarithmic x axis.

    Args:
        curves: curves (x, y) by name.
        xlabel, ylabel: labels of both axes.
        marks: points (x, y) by name, such as published ones, drawn as crosses.
    """
    figure, ((axis,),) = panels()
    for name, (x, y) in curves.items():
        axis.plot(x, y, marker=".", label=metric_title(name))
    for name, (x, y) in marks.items():
        axis.plot(x, y, "kx", label=name)
    axis.set(xscale="log", xlabel=xlabel, ylabel=ylabel)
    return legend_below(figure)
