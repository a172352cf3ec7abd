"""Figures of matrix capsules: mistakes, and the history of votes."""

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from capsule_zoo.data import Split
from capsule_zoo.entry import Entry
from capsule_zoo.figures.grids import panels
from capsule_zoo.guides.label import ExactLabel
from capsule_zoo.inference.evaluation.classification import classify
from capsule_zoo.inference.evaluation.vote_history import vote_history
from capsule_zoo.models import Classifier

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def votes(entry: Entry, images: Tensor) -> "Figure":
    """Draw the distances of votes to class capsules after each iteration, weighted by assignment.

    The votes for the winning class move together; the other classes lose their children.
    """
    distance, weight, wins = vote_history(entry.model, images[:100])
    iterations, number = distance.shape[:2]
    figure, axes = panels(2, iterations, (3.4, 1.5), (0, 0.6), sharex=True, sharey=True)
    farthest = np.quantile(distance.numpy(), 0.99)  # a few votes lie much farther away
    bins = np.linspace(0, farthest, 41)
    for column, (name, class_mask) in enumerate(
        {"winning class": wins, "other classes": ~wins}.items()
    ):
        for row, axis in enumerate(axes[:, column]):
            parts = (part[row][class_mask].flatten() for part in (distance, weight / number))
            values, weights = (part.numpy() for part in parts)
            axis.hist(values, bins, weights=weights)
            axis.set_title(f"{name}, iteration {row + 1}", fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("number of children")
    figure.supxlabel("distance of vote and class (pose units)", fontsize=9)
    return figure


def mistakes(model: Classifier, split: Split, most: int = 36) -> "Figure":
    """Draw the first misclassified images with their labels and the model's predictions."""
    predictions = classify(model, ExactLabel(model), split)
    wrong = (predictions != split.labels).nonzero()[:most, 0].tolist()
    figure, axes = panels(9, max(1, -(-len(wrong) // 9)), (0.8, 1), (0, 0.3))
    figure.suptitle(
        "Misclassified images: true class \N{RIGHTWARDS ARROW} predicted class", fontsize=10
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, n in zip(axes.flat, wrong, strict=False):
        axis.imshow(split.images[n].movedim(0, -1).numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set_title(f"{split.labels[n]} \N{RIGHTWARDS ARROW} {predictions[n]}", fontsize=9)
    return figure
