"""Pictures of matrix capsules: mistakes, how routing gathers votes, poses decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Split
from capsule_zoo.figures import image_rows
from capsule_zoo.guides.base import in_eval_mode
from capsule_zoo.inference.classification import predictions
from capsule_zoo.models import Classifier, MatrixCapsules
from capsule_zoo.registry import Entry


class VoteHistory(NamedTuple):
    """The votes for the class capsules of some images, as seen after each iteration of the routing.

    Attributes:
        distance: of each vote to the mean of the class, (iterations, N, classes, children).
        weight: what the class has of the child, presence included, of the same shape.
        winner: the likeliest class, (N,).
    """

    distance: Tensor
    weight: Tensor
    winner: Tensor

    def of_winner(self, values: Tensor) -> Tensor:
        """`distance` or `weight` of the winning class, (iterations, N, children)."""
        return values[:, torch.arange(len(self.winner)), self.winner]

    def of_others(self, values: Tensor) -> Tensor:
        """`distance` or `weight` of all other classes, (iterations, N, classes - 1, children)."""
        lost = torch.ones(values.shape[1:3], dtype=torch.bool)
        lost[torch.arange(len(self.winner)), self.winner] = False
        return values[:, lost].unflatten(1, (values.shape[1], -1))


@torch.no_grad()
def vote_history(model: MatrixCapsules, images: Tensor) -> VoteHistory:
    """What the last routing makes of images (N, C, H, W)."""
    with in_eval_mode(model):
        votes = model.class_votes(images)
    distances, weights = [], []
    for belief in model.classes.routing.beliefs(votes, model.classes.law()):
        square = votes.distance(belief.mean, torch.ones_like(belief.mean))
        distances.append(square.clamp_min(0).sqrt()[:, 0])
        weights.append((votes.presence * belief.share)[:, 0])
    winner = belief.logits[:, 0].argmax(1)
    return VoteHistory(torch.stack(distances), torch.stack(weights), winner)


def votes(entry: Entry, images: Tensor) -> Figure:
    """How far votes lie from the class capsules, after each iteration, weighted by assignment.

    Votes for the class that wins come together; those for the others lose their children.
    """
    history = vote_history(entry.model, images[:100])
    iterations, number = history.distance.shape[:2]
    columns = {"the class that wins": history.of_winner, "the others": history.of_others}
    figure, axes = plt.subplots(
        iterations, 2, figsize=(6, 1.4 * iterations + 0.6), sharex=True, sharey=True, squeeze=False
    )
    most = history.distance.max().item()
    for row, axis_row in enumerate(axes):
        for axis, (name, part) in zip(axis_row, columns.items(), strict=True):
            distance, weight = (part(values)[row].flatten() for values in history[:2])
            axis.hist(distance.numpy(), 40, range=(0, most), weights=(weight / number).numpy())
            axis.set_title(f"{name}, iteration {row + 1}", fontsize=8)
        axis_row[0].set_ylabel("children")
    for axis in axes[-1]:
        axis.set_xlabel("distance of the vote")
    figure.set_layout_engine("constrained")
    return figure


def mistakes(model: Classifier, split: Split, most: int = 36) -> Figure:
    """The first images whose label the model gets wrong: the label, and what the model says."""
    found = predictions(model, split.images)
    wrong = (found != split.labels).nonzero()[:most, 0].tolist()
    figure, axes = plt.subplots(3, 12, figsize=(9, 3))
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, n in zip(axes.flat, wrong, strict=False):
        axis.imshow(split.images[n].movedim(0, -1).numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set_title(f"{split.labels[n]}, not {found[n]}", fontsize=7)
    figure.set_layout_engine("constrained")
    return figure


def nudges(rows: Mapping[str, Tensor]) -> Figure:
    """Decoded images, a row for each element of the pose that is nudged."""
    return image_rows(rows, "A class pose nudged by -2 to 2 deviations, one element at a time")


def by_iterations(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """A panel for each table; columns are routings, rows the number of iterations."""
    figure, axes = plt.subplots(1, len(tables), figsize=(3.6 * len(tables), 3.2), squeeze=False)
    for axis, (name, table) in zip(axes[0], tables.items(), strict=True):
        for routing, values in table.items():
            axis.plot(table.index, values, ".-", label=str(routing))
        axis.set_xlabel("iterations")
        axis.set_ylabel(name)
        axis.set_xticks(table.index)
    axes[0, 0].legend(fontsize=8)
    figure.set_layout_engine("constrained")
    return figure
