"""The ellipse world: no part alone tells its object, and all of its parts together do.

An object is one of K arrangements of n ellipses of one shape. A similarity y moves it, and m of its
ellipses are seen, in a random order. An ellipse has a center and half of its major axis:

    kind     ~ Uniform{1, ..., K}
    y        ~ Normal(0, I_4)
    visible  ~ an ordered choice of m of the n ellipses
    center_i ~ Normal([1 0 p_x p_y; 0 1 p_y -p_x] y, sigma^2 I)
    axis_i   ~ Normal([0 0 a_x a_y; 0 0 a_y -a_x] y, sigma^2 I)

Here p and a are the center and the axis of this ellipse in its arrangement. One ellipse has four
numbers, as a similarity has: it could be any ellipse of any object, and tells little more than a
size. Given the kind and the choice an image is normal, so that p(kind | ellipses) is a sum over at
most n! choices. No method can have a higher accuracy on average.

References:
    Culp, Sabour & Hinton 2022, "Testing GLOM's ability to infer wholes from ambiguous parts"
    (arXiv 2211.16564), where maps are affine, and the parts lie on a grid.
    Hinton 2021, "How to represent part-whole hierarchies in a neural network" (arXiv 2102.12627).
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capsule_zoo.experiments import Job, Options, Result, Study, experiment
from capsule_zoo.experiments.common.findings import mean_and_error, over_seeds
from capsule_zoo.figures.curves import number_curves
from capsule_zoo.records import Number, Table

AXIS = 0.5  # standard deviation of each coordinate of an axis, in units of that of a center
SIGMA = 0.2  # standard deviation of the noise; a center's coordinates have 1 in an arrangement
KINDS, ELLIPSES = 10, 5  # numbers of arrangements, and of ellipses of each
UPDATES = 10_000  # updates of the network
BATCH_SIZE = 128  # images of each update
TEST_IMAGES = 5000  # test images for each number of ellipses
CHUNK = 100  # images whose choices of ellipses are summed at once


@dataclass(frozen=True, eq=False)
class EllipseWorld:
    """The distribution of images of one object; see the top of this file.

    Attributes:
        arrangements: center and half axis of every ellipse of every kind, (K, n, 4).
        sigma: standard deviation of the noise.
    """

    arrangements: Tensor
    sigma: float

    @classmethod
    def random(cls, kinds: int, ellipses: int, sigma: float) -> "EllipseWorld":
        """Return a world of random arrangements, the same for every noise."""
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(kinds, ellipses, 4, generator=generator, dtype=torch.float64)
        centers = numbers[..., :2] - numbers[..., :2].mean(1, keepdim=True)
        return cls(torch.cat([centers, AXIS * numbers[..., 2:]], -1), sigma)

    @cached_property
    def maps(self) -> Tensor:
        """The matrices from y to the numbers of each ellipse, (K, n, 4, 4)."""
        p_x, p_y, a_x, a_y = self.arrangements.unbind(-1)
        one, zero = torch.ones_like(p_x), torch.zeros_like(p_x)
        rows = [one, zero, p_x, p_y, zero, one, p_y, -p_x]
        rows += [zero, zero, a_x, a_y, zero, zero, a_y, -a_x]
        return torch.stack(rows, -1).unflatten(-1, (4, 4))

    def draw(self, number: int, visible: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw images (number, visible, 4) and their kinds (number,)."""
        options: dict[str, Any] = dict(generator=generator, dtype=torch.float64)
        kinds = torch.randint(len(self.arrangements), (number,), generator=generator)
        places = torch.rand(number, self.arrangements.shape[1], **options).argsort(1)[:, :visible]
        pose = torch.randn(number, 4, **options)
        mean = (self.maps[kinds[:, None], places] @ pose[:, None, :, None])[..., 0]
        return mean + self.sigma * torch.randn(mean.shape, **options), kinds

    def log_posterior(self, images: Tensor) -> Tensor:
        """Compute log p(kind | ellipses) of images (S, m, 4), (S, K)."""
        visible = images.shape[1]
        choices = torch.tensor(
            [*itertools.permutations(range(self.arrangements.shape[1]), visible)]
        )
        factor = self.maps[:, choices].flatten(2, 3)  # (K, choices, 4 m, 4)
        noise = torch.full(factor.shape[:-1], self.sigma**2, dtype=factor.dtype)
        likelihood = dist.LowRankMultivariateNormal(torch.zeros_like(noise), factor, noise)
        rows = images.to(factor).flatten(1)[:, None, None].split(CHUNK)
        evidence = torch.cat([likelihood.log_prob(chunk).logsumexp(-1) for chunk in rows])
        return evidence.log_softmax(-1)


class Messages(nn.Module):
    """A network in which the ellipses of an image exchange messages by attention.

    Every round has the same weights, as in GLOM. Called on images (B, m, 4) it returns the logits
    of the kinds, (B, kinds).
    """

    def __init__(self, inputs: int, kinds: int, width: int = 96, rounds: int = 4) -> None:
        super().__init__()
        self.rounds = rounds
        self.embed, self.read = nn.Linear(inputs, width), nn.Linear(width, kinds)
        self.exchange = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        ellipses = self.embed(images)
        for _ in range(self.rounds):
            ellipses = self.exchange(ellipses)
        return self.read(ellipses.mean(1))


@experiment("constellations/ellipses", data="constellations", minutes=15)
def ellipses(options: Options, *, seeds: int = 3) -> Result:
    """Tell objects from one to five ambiguous ellipses, exactly and by messages (15 minutes).

    `accuracy_exact_...` is that of the exact posterior, the largest that is possible, and
    `accuracy_network_...` that of a network whose ellipses exchange messages by attention, trained
    on new images in every update. `lost_...` is how many nats of log p(kind | ellipses) the network
    loses. Names end in the number of ellipses that are seen, and in the noise.

    Args:
        seeds: number of seeds.
    """
    study = Study({"world": EllipseWorld.random(KINDS, ELLIPSES, SIGMA)}, seeds)
    outcomes = study.run(compare, options, updates=options.shorten_steps(UPDATES))["world"]
    row, numbers = over_seeds(outcomes), [str(visible) for visible in range(1, ELLIPSES + 1)]
    columns = {
        quantity: {visible: row[f"{quantity}_{visible}"] for visible in numbers}
        for quantity in ("accuracy_exact", "accuracy_network", "lost")
    }
    table = Table(columns, "{quantity}_{variant}_" + f"{SIGMA:g}".replace(".", ""))
    curves = {name: columns[f"accuracy_{name}"] for name in ("exact", "network")}
    panels = {f"accuracy, noise {SIGMA:g}": curves}
    figure = number_curves(panels, "ellipses that are seen")
    return Result({f"noise {SIGMA:g}": table}, {"": figure})


def compare(job: Job[EllipseWorld], *, updates: int) -> dict[str, Number]:
    """Train a network, and compare its accuracy on new images with that of the posterior."""
    world, generator = job.variant, torch.Generator().manual_seed(job.options.seed)
    pyro.set_rng_seed(job.options.seed)
    network = train_network(world, updates, generator)
    numbers = {}
    for visible in range(1, world.arrangements.shape[1] + 1):
        images, kinds = world.draw(TEST_IMAGES, visible, generator)
        exact = world.log_posterior(images)
        with torch.no_grad():
            learned = network(images.float()).log_softmax(-1)
        for name, logs in (("exact", exact), ("network", learned)):
            numbers[f"accuracy_{name}_{visible}"] = mean_and_error(
                (logs.argmax(-1) == kinds).double()
            )
        lost = (exact - learned).gather(1, kinds[:, None])[:, 0]
        numbers[f"lost_{visible}"] = mean_and_error(lost)
    return numbers


def train_network(world: EllipseWorld, updates: int, generator: torch.Generator) -> Messages:
    """Train a network to tell kinds from any number of ellipses, on new images."""
    kinds, parts, size = world.arrangements.shape
    network = Messages(size, kinds)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    for update in range(updates):
        images, labels = world.draw(BATCH_SIZE, 1 + update % parts, generator)
        optimizer.zero_grad()
        F.cross_entropy(network(images.float()), labels).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 10.0)
        optimizer.step()
        schedule.step()
    return network.eval()
