"""Training on random requested transformations, and inference of unknown ones.

>>> requested = Requested(model, Rotations(), [(-180, 180)] * 10)
>>> fit(requested, guide, data, inputs=Inputs(labels=True), epochs=5)
>>> angles = torch.arange(0, 360, 15.0)
>>> result = infer_transformation(model, guide, images, Rotations(), grid=angles)
>>> result.best                                           # (B, 1), degrees
>>> result.probabilities                                  # (B, 24), over the grid

A model that renders on request (`models.baselines.conditional_autoencoder`) takes the
transformation T as known. An unknown transformation can be inferred by importance weighting of the
guide's codes. For each request the evidence

    log p(image | T) = log mean_k p(image, z_k | T) / q(z_k | image, moved back by T)

is estimated with the same noise for all requests. The guide is only a proposal here, so the
estimate is valid even if the guide encodes an image badly that was moved back wrongly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from capsule_zoo.data import Requests
from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.guides import ConditionalEncoder
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.inference.objectives.importance_weighted import log_mean_exp
from capsule_zoo.models.base import NamedModule
from capsule_zoo.models.checks import check_positive, check_whole
from capsule_zoo.models.common.modes import eval_mode, frozen, use_seed
from capsule_zoo.models.common.spaces import tile_batch
from capsule_zoo.models.networks.on_request import OnRequest


class Requested(NamedModule):
    """A model for training that requests a random transformation of every image.

    The guide sees the plain image. The loss bounds the log density of the transformed image given
    the request, on average over requests. Call it with labels.

    Args:
        model: trained in place; its parameters are not copied.
        requests: the family of transformations.
        ranges: smallest and largest parameter for each class.
    """

    low: Tensor
    high: Tensor
    model: OnRequest

    def __init__(
        self, model: OnRequest, requests: Requests, ranges: Sequence[tuple[float, float]]
    ) -> None:
        super().__init__()
        self._modules["model"] = model  # no assignment, which would rename it in the store
        self.requests = requests
        low, high = torch.tensor(ranges).float().unbind(-1)
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        parameters = self.requests.draw(self.low[labels], self.high[labels])
        moved = self.requests.move(images, parameters)
        return self.model(moved, request=self.requests.numbers(parameters).to(images))


@dataclass(frozen=True)
class Transformations:
    """The result of `infer_transformation` for B images and G requests of n parameters.

    Attributes:
        grid: the requests that were tried, (G, n).
        log_evidence: log p(image | request), (B, G), in nats. For a guide of points it is the log
            density of the image at its points, in which codes are not integrated out.
        best: parameters after the gradient ascent, (B, n).
        best_log_evidence: evidence at `best`, (B,), at least the largest value on the grid.
    """

    grid: Tensor
    log_evidence: Tensor
    best: Tensor
    best_log_evidence: Tensor

    @property
    def probabilities(self) -> Tensor:
        """The posterior p(request | image), (B, G), under a uniform prior on the grid."""
        return self.log_evidence.softmax(-1)


@torch.inference_mode(False)
@accept_arrays("images", "grid", like="model")
def infer_transformation(
    model: OnRequest,
    guide: ConditionalEncoder,
    images: Tensor,
    requests: Requests,
    *,
    grid: Tensor,
    starts: int = 3,
    steps: int = 30,
    lr: float = 1.0,
    num_particles: int = 8,
    seed: int = 0,
) -> Transformations:
    """Infer the transformation of each image by a grid of requests and gradient ascent.

    Args:
        model, guide: the pair, which is not changed; pass both `discretize()` for the
            evidence of the discrete model.
        images: (B, C, H, W), transformed.
        requests: the family of transformations.
        grid: requests to try, (G, n), or (G,) where there is one parameter.
        starts: number of best requests on the grid from which each image's ascent starts.
        steps: Adam steps, each under new noise; 0 returns the best of the grid.
        lr: length of the first step, in the unit of the parameters; it falls to zero.
        num_particles: codes drawn for each image and request.
        seed: seed of the noise.

    Raises:
        ValueError: images that the model does not take, a grid of another shape, or a number out of
            range.
    """
    model.space.check(images)
    grid = grid[:, None] if grid.dim() == 1 else grid
    if grid.dim() != 2 or grid.shape[1] != requests.parameters:
        raise ValueError(f"grid must be (G, {requests.parameters}), not {tuple(grid.shape)}")
    check_whole(1, starts=starts, num_particles=num_particles)
    check_whole(0, steps=steps)
    check_positive(lr=lr)
    grid = grid.to(images)
    evidence = _Evidence(model, guide, tile_batch(images, num_particles), requests, num_particles)
    pair = model, guide
    with isolated_parameters(*pair), frozen(*pair), eval_mode(*pair), use_seed(seed):
        tried = torch.stack(
            [evidence.judge_requests(p.expand(len(images), -1), seed) for p in grid], -1
        )
        first = tried.topk(min(starts, len(grid)), -1).indices  # (B, starts)
        candidates = [(grid[first[:, 0]], tried.amax(-1))]
        torch.manual_seed(seed + 1)
        for start in first.unbind(-1):
            optimum = evidence.climb(grid[start], steps, lr)
            candidates.append((optimum, evidence.judge_requests(optimum, seed)))
    parameters, values = (torch.stack(tensors, 1) for tensors in zip(*candidates, strict=True))
    best = values.nan_to_num(-math.inf).argmax(1)
    row = torch.arange(len(images), device=images.device)
    return Transformations(grid, tried, parameters[row, best], values[row, best])


@dataclass(frozen=True)
class _Evidence:
    """The importance-weighted estimate of log p(image | request) of every image."""

    model: OnRequest
    guide: ConditionalEncoder
    images: Tensor  # every image is repeated for each particle
    requests: Requests
    particles: int

    def __call__(self, parameters: Tensor) -> Tensor:
        """Compute the evidence (B,), in nats, differentiable by the parameters (B, n)."""
        parameters = parameters.repeat(self.particles, 1)
        numbers = self.requests.numbers(parameters)
        upright = self.requests.move(self.images, -parameters)
        log_weight, _, _ = log_weights(
            lambda images: self.model(images, request=numbers),
            lambda images: self.guide(upright),
            self.images,
        )
        return log_mean_exp(log_weight.view(self.particles, -1))

    @torch.no_grad()
    def judge_requests(self, parameters: Tensor, seed: int) -> Tensor:
        """Compute the evidence with the noise of a seed, so that requests can be compared."""
        torch.manual_seed(seed)
        return self(parameters)

    def climb(self, parameters: Tensor, steps: int, lr: float) -> Tensor:
        """Optimize the parameters (B, n) of each image's request by gradient ascent."""
        parameters = parameters.clone().requires_grad_()
        optimizer = torch.optim.Adam([parameters], lr)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
            optimizer.zero_grad()
            (-self(parameters).sum()).backward()
            optimizer.step()
        return parameters.detach()
