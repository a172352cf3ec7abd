"""Test-time inference: repair a guide's answer image by image, with the model frozen.

>>> better = refine(model, guide, images, steps=100)      # -> Refinement
>>> evaluate(model, better.guide, images)                 # a FreeForm guide to these images
>>> better.path                                           # mean objective after each step, nats

The paper optimises for hundreds to thousands of steps and calls that a defect. Three things remove
most of it: Adam with a short memory of squared gradients and a step that falls to zero, ten times
longer steps for presence logits than for poses, and all images at once. For images that an encoder
has never seen, such as rotated ones, several turned starts matter more than the optimiser.

Reference: Smith, Schut, Gal & van der Wilk 2020 (arXiv 2004.03553).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.data import transforms
from capsule_zoo.guides import FreeForm, Guide
from capsule_zoo.inference.check import frozen, isolated_parameters
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.models import Capsules, PartWholeCapsules, poses
from capsule_zoo.models.base import check_at_least, check_positive


@dataclass
class Refinement:
    """What `refine` found.

    Attributes:
        guide: the FreeForm guide that holds the best answer seen for each image.
        path: mean over images of the best objective so far, before the first step and after each,
            (steps + 1,), in nats per image.
        start, end: each image's objective before and after, (B,); `end >= start`.
    """

    guide: FreeForm
    path: Tensor
    start: Tensor
    end: Tensor


def refine(
    model: PartWholeCapsules,
    guide: Guide | None,
    images: Tensor,
    *,
    steps: int = 100,
    method: str = "scheduled",
    lr: float | None = None,
    starts: int = 1,
    pose: str = "delta",
    seed: int = 0,
) -> Refinement:
    """Optimise free-form variational parameters of every image, all images at once.

    Every step scores the same draws of the presences' noise (common random numbers), so that an
    image's objective moves only with its parameters; a step that lowers it is not kept.

    Args:
        model: stays as it is.
        guide: where to start; None starts at a draw from the prior.
        images: (B, C, H, W).
        steps: of the optimiser; each renders every image once, forward and backward.
        method: "scheduled" (Adam, beta_2 = .99, linear decay to zero, presence logits ten times
            faster) or "adam" (plain Adam at a constant rate, the paper's way).
        lr: of the poses; default .01 for "scheduled", .003 for "adam".
        starts: how many turns of the image, spread over the circle, the guide is tried on first;
            each image goes on from the best.
        pose: "delta" or "normal", see `FreeForm`.
        seed: of the noise.

    Raises:
        ValueError: an unknown method, a number out of range, or images the model does not take.
    """
    if method not in ("scheduled", "adam"):
        raise ValueError(f"method must be 'scheduled' or 'adam', not {method!r}")
    check_at_least(0, steps=steps)
    check_at_least(1, starts=starts)
    scheduled = method == "scheduled"
    rate = (0.01 if scheduled else 0.003) if lr is None else lr
    check_positive(lr=rate)
    with isolated_parameters(model), frozen(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        free = _best_start(model, guide, images, starts, pose, seed)
        optimizer = torch.optim.Adam(
            [
                {"params": list(free.presence_logits.parameters()), "lr": rate},
                {"params": [*free.poses.parameters(), *free.log_scales.parameters()], "lr": rate},
            ],
            betas=(0.9, 0.99 if scheduled else 0.999),
        )
        best = _Best(free)
        for step in range(steps):
            objective = _objective(model, free, images, seed)
            best.keep(objective)
            optimizer.zero_grad()
            (-objective.sum()).backward()
            left = 1 - step / steps if scheduled else 1.0
            for group, speed in zip(
                optimizer.param_groups, (10 if scheduled else 1, 1), strict=True
            ):
                group["lr"] = rate * speed * left
            optimizer.step()
        with torch.no_grad():
            best.keep(_objective(model, free, images, seed))
        return best.refinement()


class SemiAmortized(Guide):
    """A guide's answer followed by free-form steps on the images at hand; for use at test time.

    It draws as `refine(...).guide` does, for whatever images it is called on, and has no parameters
    of its own. An image that stands in the batch several times is refined once, and a batch that
    comes again, as evaluation asks for particle after particle, is not refined again.

    Args:
        guide: where each refinement starts.
        steps: of each refinement.
        options: further arguments of `refine`.
    """

    def __init__(self, guide: Guide, steps: int = 20, **options: Any) -> None:
        check_at_least(0, steps=steps)
        super().__init__(guide.model)
        self._start = (guide,)  # in a tuple: it is not this guide's to train
        self.options = {"steps": steps, **options}
        self.discrete = False
        self._last: list[tuple[Tensor, list[int], FreeForm]] = []  # a list: twins share it

    @property
    def covers(self) -> tuple[str, ...]:
        return self._start[0].covers

    def with_discrete_presences(self) -> SemiAmortized:
        return self.sharing_parameters(discrete=True)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Capsules:
        """Refines, draws every level and returns the objects' choices."""
        rows, places = torch.unique(images.flatten(1), dim=0, return_inverse=True)
        free = self._refined(rows.view(-1, *images.shape[1:])).select(places)
        return (free.with_discrete_presences() if self.discrete else free)(images)

    def _refined(self, images: Tensor) -> FreeForm:
        start = self._start[0]
        # torch counts the writes to a tensor: an answer is stale once anything was trained
        writes = [t._version for m in (self.model, start) for t in m.state_dict().values()]
        for seen, then, free in self._last:
            if then == writes and torch.equal(seen, images):
                return free
        with poutine.block(), torch.enable_grad():
            found = refine(self.model, start, images, **self.options).guide
        self._last[:] = [(images, writes, found)]
        return found


class _Best:
    """The best parameters seen for each image, and how the mean objective rose."""

    def __init__(self, free: FreeForm) -> None:
        self.free = free
        self.values: Tensor | None = None
        self.parameters = [p.detach().clone() for p in free.parameters()]
        self.path: list[Tensor] = []

    def keep(self, objective: Tensor) -> None:
        """Record the parameters of every image whose objective is the highest so far."""
        objective = objective.detach()
        if self.values is None:
            self.start = self.values = objective.clone()
        better = objective > self.values  # False for NaN: such a step is not kept either
        self.values = torch.where(better, objective, self.values)
        for kept, now in zip(self.parameters, self.free.parameters(), strict=True):
            kept[better] = now.detach()[better]
        self.path.append(self.values.mean())

    def refinement(self) -> Refinement:
        with torch.no_grad():
            for kept, now in zip(self.parameters, self.free.parameters(), strict=True):
                now.copy_(kept)
        assert self.values is not None
        return Refinement(self.free, torch.stack(self.path), self.start, self.values)


def _objective(model: PartWholeCapsules, free: FreeForm, images: Tensor, seed: int) -> Tensor:
    """log p(image, z) - log q(z) of each image under the same noise every time, (B,)."""
    torch.manual_seed(seed)
    return log_weights(model, free, images)[0]


def _best_start(
    model: PartWholeCapsules,
    guide: Guide | None,
    images: Tensor,
    starts: int,
    pose: str,
    seed: int,
) -> FreeForm:
    """A free-form guide that begins at the best of several turned parses, image by image."""
    free = FreeForm(model, images, guide, pose)
    if guide is None or starts == 1:
        return free
    best = _Best(free)
    with torch.no_grad():
        best.keep(_objective(model, free, images, seed))
        for turn in range(1, starts):
            degrees = 360 * turn / starts
            turned = transforms.warp(images, transforms.motion(degrees).to(images)).clamp(0, 1)
            other = FreeForm(model, turned, guide, pose)
            back = poses.rotation(images.new_tensor(math.radians(degrees)))
            for name, parameter in free.named_parameters():
                value = other.get_parameter(name)
                parameter.copy_(poses.compose(back, value) if name.startswith("poses") else value)
            best.keep(_objective(model, free, images, seed))
    return best.refinement().guide
