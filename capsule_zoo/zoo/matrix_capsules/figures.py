"""Figures of matrix capsules: mistakes, the history of votes, and changes of a pose."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data import Split
from capsule_zoo.entry import Entry
from capsule_zoo.figures.grids import draw_changes, image_rows, panels
from capsule_zoo.guides.label import ExactLabel
from capsule_zoo.inference.evaluation.classification import classify
from capsule_zoo.models import Classifier
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.zoo.matrix_capsules.vote_history import vote_history

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


@torch.no_grad()
def poses(entry: Entry, images: Tensor, rows: int = 8) -> "Figure":
    """Draw the first image from the pose of its class with one number changed, as decoded.

    A number changes by up to two standard deviations of the poses of a hundred images' classes. The
    figure has a row for each of the numbers that change the image most.

    Raises:
        ValueError: the model has no decoder.
    """
    with eval_mode(entry.model):
        classes = entry.model.capsules(images[:100])[-1]
        labels = classes.logits[:, 0].argmax(-1)
        winners = classes.pose[:, 0].flatten(2)[torch.arange(len(labels)), labels]  # (B, 16)

        def draw(numbers: Tensor) -> Tensor:
            return entry.model.draw(numbers[:, None], labels[:1].expand(len(numbers)))

        changes = torch.linspace(-2, 2, 11).to(winners)[:, None] * winners.std(0)
        pictures = draw_changes(draw, winners[0], changes, rows)
    return image_rows(
        pictures, "One number of the pose, changed by -2 (left) to 2 (right) standard deviations"
    )


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
