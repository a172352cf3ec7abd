"""Pictures of matrix capsules: mistakes, and the history of votes."""

from typing import TYPE_CHECKING

import torch
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
    figure, axes = panels(2, iterations, (3, 1.4), (0, 0.6), sharex=True, sharey=True)
    bins = torch.linspace(0, distance.max().item(), 41).numpy()
    for column, (name, chosen) in enumerate({"the class that wins": wins, "others": ~wins}.items()):
        for row, axis in enumerate(axes[:, column]):
            parts = (part[row][chosen].flatten() for part in (distance, weight / number))
            values, weights = (part.numpy() for part in parts)
            axis.hist(values, bins, weights=weights)
            axis.set_title(f"{name}, iteration {row + 1}", fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("children")
    for axis in axes[-1]:
        axis.set_xlabel("distance of the vote")
    return figure


def mistakes(model: Classifier, split: Split, most: int = 36) -> "Figure":
    """Draw the first misclassified images with their labels and the model's predictions."""
    found = classify(model, ExactLabel(model), split)
    wrong = (found != split.labels).nonzero()[:most, 0].tolist()
    figure, axes = panels(12, 3, (0.75, 1))
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, n in zip(axes.flat, wrong, strict=False):
        axis.imshow(split.images[n].movedim(0, -1).numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set_title(f"{split.labels[n]}, not {found[n]}", fontsize=7)
    return figure
