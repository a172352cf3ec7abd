"""Pictures of models that paint on request: their error along a line of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure


def error_curves(
    panels: Mapping[str, Mapping[str, np.ndarray]],
    places: Sequence[float],
    trained: tuple[float, float],
    blank: Mapping[str, np.ndarray],
    axis_label: str,
) -> Figure:
    """One panel for each kind of image, one curve for each decoder in a band of one standard error.

    Args:
        panels: by title and decoder, squared errors (seeds, places).
        places: of the requests along the line.
        trained: smallest and largest request in training, which is shaded.
        blank: by title, the errors (places,) of a blank image, dotted.
        axis_label: what the places are.
    """
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.3), squeeze=False, sharey=True
    )
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        low, high = trained
        width = 0.01 * (max(places) - min(places))
        axis.axvspan(low - width, high + width, color="0.9", label="seen in training")
        for name, errors in curves.items():
            mean = errors.mean(0)
            (line,) = axis.plot(places, mean, label=name)
            if len(errors) > 1:
                error = errors.std(0, ddof=1) / len(errors) ** 0.5
                band = mean - error, mean + error
                axis.fill_between(places, *band, color=line.get_color(), alpha=0.25, lw=0)
        axis.plot(places, blank[title], "k:", label="blank image")
        axis.set_yscale("log")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(axis_label)
    axes[0, 0].set_ylabel("mean squared error, pixels in [-1, 1]")
    axes[0, -1].legend(fontsize=7)
    figure.set_layout_engine("constrained")
    return figure
