"""Pictures of how accuracy changes along one axis, each curve with its standard error."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from capsule_zoo.inference.probe import Accuracy


def accuracy_curves(
    curves: Mapping[str, Mapping[float, Accuracy]], axis_label: str, chance: float
) -> Figure:
    """One curve for each name, in a band of one standard error; single points get error bars.

    Args:
        curves: by name, the accuracy at each place on the axis.
        chance: the accuracy of guessing, drawn as a dotted line.
    """
    figure, axis = plt.subplots(figsize=(6, 3.5))
    for name, curve in curves.items():
        places = np.array(list(curve))
        values, errors = (
            np.array([getattr(a, k) for a in curve.values()]) for k in ("value", "se")
        )
        if len(curve) == 1:
            axis.errorbar(places, values, errors, fmt="o", capsize=3, label=name)
            continue
        (line,) = axis.plot(places, values, ".-", label=name)
        axis.fill_between(
            places, values - errors, values + errors, color=line.get_color(), alpha=0.25, lw=0
        )
    axis.axhline(chance, color="gray", linestyle=":", label="chance")
    axis.set_ylim(0, 1)
    axis.set_xlabel(axis_label)
    axis.set_ylabel("accuracy")
    axis.legend(fontsize=8)
    figure.set_layout_engine("constrained")
    return figure
