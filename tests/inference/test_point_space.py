"""What is observed need not be an image: sets of points, from one file, train and evaluate."""

import math
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, constraints
from toys import QUIET, fit

from capsule_zoo.data import Dataset, Split
from capsule_zoo.guides import Guide
from capsule_zoo.inference import (
    check_pair,
    compare,
    encode,
    evaluate,
    posterior_predictive,
    reconstruct,
    sample,
)
from capsule_zoo.models import Model, ObservationSpace, Site

POINTS, NOISE = 4, 0.3


@dataclass(frozen=True)
class PointSpace(ObservationSpace):
    """Sets of at most `most` points of the plane, (B, most, 2); an absent point is NaN."""

    most: int

    site = "points"
    variable = "points"
    dims = ("point", "axis")

    def check(self, batch: Tensor) -> None:
        if not isinstance(batch, Tensor) or batch.dim() != 3 or batch.shape[1:] != (self.most, 2):
            raise ValueError(f"points must be (B, {self.most}, 2), not of this kind")
        if not len(batch) or not batch.is_floating_point() or batch.isinf().any():
            raise ValueError("points must be finite numbers of one set or more")
        if (batch.isnan().any(-1) != batch.isnan().all(-1)).any():
            raise ValueError("points are NaN in one axis only; a point is absent in both")

    def example(self, number: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return torch.randn(number, self.most, 2, dtype=dtype, generator=generator)

    def squared_error(self, predicted: Tensor, observed: Tensor) -> Tensor:
        return (predicted - observed).square().nansum((1, 2))


class Swarm(Model):
    """place ~ Normal(0, 1)^2; each point that is present ~ Normal(place, noise)^2."""

    sites = (Site("place", ("images",), event_dim=1),)
    observes = "points"
    space = PointSpace(POINTS)

    def __init__(self) -> None:
        super().__init__()
        self.log_noise = nn.Parameter(torch.tensor(math.log(NOISE)).double())

    def forward(self, points=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if points is None else len(points), dim=-1):
            place = pyro.sample("place", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
            mean = place[..., None, :].expand(*place.shape[:-1], POINTS, 2)
            distribution = dist.Normal(mean, self.log_noise.exp())
            if points is not None:
                distribution = distribution.mask(~points.isnan())
                points = points.nan_to_num()
            return pyro.sample("points", distribution.to_event(2), obs=points)

    def log_evidence(self, points: Tensor) -> Tensor:
        """log p(points), (B,): of each axis, Normal with covariance noise^2 I + 1 1'."""
        total = []
        for scene in points:
            coordinates = scene[~scene[:, 0].isnan()]
            covariance = NOISE**2 * torch.eye(len(coordinates)).double() + 1.0
            distribution = MultivariateNormal(torch.zeros(len(coordinates)).double(), covariance)
            total.append(distribution.log_prob(coordinates.T).sum())
        return torch.stack(total)


class ExactPlace(Guide):
    """The posterior of the place."""

    model_class = Swarm
    observes = "points"

    def forward(self, points, labels=None):
        number = (~points[..., 0].isnan()).sum(-1, keepdim=True).to(points)
        variance = 1 / (1 + number / NOISE**2)
        mean = points.nansum(-2) / NOISE**2 * variance
        with pyro.plate("images", len(points), dim=-1):
            pyro.sample("place", dist.Normal(mean, variance.sqrt()).to_event(1))


class LearnedPlace(ExactPlace):
    """A normal distribution about a multiple of the mean point."""

    def __init__(self, model: Swarm) -> None:
        super().__init__(model)
        self.slope = nn.Parameter(torch.tensor(0.2).double())
        self.scale = PyroParam(torch.tensor(0.7).double(), constraint=constraints.positive)

    def forward(self, points, labels=None):
        with pyro.plate("images", len(points), dim=-1):
            distribution = dist.Normal(self.slope * points.nanmean(-2), self.scale)
            pyro.sample("place", distribution.to_event(1))


def scenes(number: int) -> Tensor:
    """Points of the model itself, of which the last is absent in every other set."""
    points = torch.randn(number, 1, 2).double() + NOISE * torch.randn(number, POINTS, 2).double()
    points[::2, -1] = math.nan
    return points


def test_the_exact_guide_has_the_evidence_of_every_set_of_points():
    points, model = scenes(5), Swarm()
    idata = evaluate(model, ExactPlace(model), points, num_particles=3, draws=2)
    evidence = torch.from_numpy(idata.sample_stats.log_weight.values[0])
    expected = model.log_evidence(points).detach()
    torch.testing.assert_close(evidence, expected.expand(3, -1))
    assert idata.observed_data.points.dims == ("image", "point", "axis")
    assert idata.posterior_predictive.points.dims == ("chain", "draw", "image", "point", "axis")
    assert idata.posterior_predictive.points.shape == (1, 2, 5, POINTS, 2)


def test_a_guide_learns_from_points_and_is_compared():
    points, model = scenes(60), Swarm()
    guide = LearnedPlace(model)
    check_pair(model, guide, points[:2])
    split = Split(points, torch.zeros(60, dtype=torch.int64), "scenes")
    data = Dataset("scenes", split[:40], split[40:50], split[50:])
    settings = QUIET | {"lr": 0.1}
    run = fit(model, guide, data, steps=60, freeze="model", every=20, **settings)
    table = compare({"exact": (model, ExactPlace(model)), "learned": (model, guide)}, data.test)
    evidence = model.log_evidence(data.test.images).mean().item()
    assert table.loc["exact", "elbo"] == pytest.approx(evidence)
    assert evidence - 1.0 < table.loc["learned", "elbo"] < evidence
    assert run.best_loss < -evidence + 2


def test_the_verbs_speak_of_points():
    points, model = scenes(6), Swarm()
    guide = ExactPlace(model)
    assert sample(model, 3).shape == (3, POINTS, 2)
    assert posterior_predictive(model, guide, points, 2).shape == (2, 6, POINTS, 2)
    place = encode(model, guide, points)["place"]
    torch.testing.assert_close(place, points.nanmean(-2), atol=0.2, rtol=0)
    painted = reconstruct(model, guide, points, num_samples=200)
    expected = place[:, None].expand_as(painted)
    torch.testing.assert_close(painted, expected, atol=0.1, rtol=0)
    error = model.space.squared_error(painted, points)
    assert error.shape == (6,) and torch.isfinite(error).all()


@pytest.mark.parametrize("validate", [True, False])
def test_wrong_points_are_refused_in_the_words_of_their_space(validate):
    model = Swarm()
    guide = ExactPlace(model)
    half = scenes(4)
    half[1, 0, 1] = math.nan
    uses = [
        lambda points: fit(model, guide, points, steps=1, **QUIET),
        lambda points: evaluate(model, guide, points, num_particles=1),
        lambda points: encode(model, guide, points),
    ]
    uses += [model, guide] if validate else []
    with pyro.validation_enabled(validate):
        for wrong in (scenes(4)[:, 1:], half, scenes(4)[:0], scenes(4) * math.inf):
            for use in uses:
                with pytest.raises(ValueError, match="points"):
                    use(wrong)
