"""The history of votes in a capsule network's last routing, iteration by iteration.

The history has the quantities of Hinton, Sabour & Frosst 2018, figure 2: distances of votes to the
mean of each class capsule, weighted by assignment.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from capsule_zoo.inference.evaluation.prepare import Images, prepare_images
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.models.matrix_capsules import MatrixCapsules


class VoteHistory(NamedTuple):
    """The votes for the class capsules after each iteration.

    Attributes:
        distance: distance of each vote to the class mean, (iterations, N, classes, children).
        weight: fraction of the child assigned to the class, times its presence, of the same shape.
        wins: True for the likeliest class, (N, classes).
    """

    distance: Tensor
    weight: Tensor
    wins: Tensor


@torch.no_grad()
def vote_history(model: MatrixCapsules, images: Images, batch_size: int = 100) -> VoteHistory:
    """Return the vote history of the last routing for images (N, C, H, W)."""
    images = prepare_images(model, images)
    with eval_mode(model):
        parts = [_history(model, batch) for batch in images.split(batch_size)]
    distances, weights, wins = zip(*parts, strict=True)
    return VoteHistory(torch.cat(distances, 1), torch.cat(weights, 1), torch.cat(wins))


def _history(model: MatrixCapsules, images: Tensor) -> VoteHistory:
    (votes, distribution), distances, weights = model.class_votes(images), [], []
    for belief in model.classes.routing.beliefs(votes, distribution):
        square = votes.distance(belief.mean, torch.ones_like(belief.mean))
        distances.append(square.clamp_min(0).sqrt()[:, 0])
        weights.append((votes.presence * belief.responsibility)[:, 0])
    surest = belief.logits[:, 0]
    wins = surest == surest.amax(1, keepdim=True)
    return VoteHistory(torch.stack(distances), torch.stack(weights), wins)
