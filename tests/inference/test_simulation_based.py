"""Calibration accepts the exact guide of any model, and refuses wrong ones."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from machines import calibrated

from capsule_zoo.guides import ExactMatching, Guide
from capsule_zoo.inference.calibration import check_calibration
from capsule_zoo.models import Constellations, ImageSpace, Model, Site

SCALE = 0.5  # of the noise on pixels


class Linear(Model):
    """z ~ Normal(0, I), image ~ Normal(A z, SCALE^2 I), with pixels that leave [0, 1]."""

    sites = (Site("z", ("images",), event_dim=1),)

    def __init__(self):
        super().__init__()
        self.space = ImageSpace((1, 1, 3))
        matrix = [[1.0, 0.5], [-0.4, 1.0], [0.3, 0.2]]
        self.matrix = torch.nn.Parameter(torch.tensor(matrix, dtype=torch.float64))

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            z = pyro.sample("z", dist.Normal(self.matrix.new_zeros(2), 1.0).to_event(1))
            distribution = dist.Normal((z @ self.matrix.T)[:, None, None, :], SCALE).to_event(3)
            return pyro.sample("image", distribution, obs=images)


class Posterior(Guide[Linear]):
    """The exact posterior with another width, shift or weight of the image."""

    covers = ("z",)

    def __init__(self, model, width=1.0, shift=0.0, heed=1.0):
        super().__init__(model)
        self.width, self.shift, self.heed = width, shift, heed

    def forward(self, images, labels=None):
        A = self.model.matrix.detach()
        precision = torch.eye(2).double() + self.heed * A.T @ A / SCALE**2
        mean = self.heed * images.flatten(1) @ A @ torch.linalg.inv(precision) / SCALE**2
        root = self.width * torch.linalg.cholesky(torch.linalg.inv(precision))
        with pyro.plate("images", len(images), dim=-1):
            distribution = dist.MultivariateNormal(mean + self.shift, scale_tril=root)
            return pyro.sample("z", distribution)


def test_the_exact_guide_is_calibrated():
    model = Linear()
    calibration = check_calibration(model, Posterior(model), number=2000)
    assert calibration.p > 0.01
    assert calibration.quantities == ("z[0]", "z[1]", "log joint")
    assert calibration.ranks.shape == (2000, 3) and calibration.draws == 31
    assert calibration.ranks.min() == 0 and calibration.ranks.max() == 31
    assert calibration.p == pytest.approx(min(1.0, 3 * calibration.p_values.min().item()))


@pytest.mark.parametrize(
    "wrong", [dict(width=0.5), dict(width=2.0), dict(shift=0.3), dict(heed=0.0)]
)
def test_a_wrong_guide_is_refused(wrong):
    """Also one that ignores the image: its ranks of z alone are uniform."""
    model = Linear()
    calibration = check_calibration(model, Posterior(model, **wrong), number=2000)
    assert calibration.p < 1e-6
    ends = (calibration.ranks[:, :2] % 31 == 0).double().mean()
    if wrong.get("width") == 0.5:
        assert ends > 3 * 2 / 32
    if wrong == dict(heed=0.0):
        assert calibration.p_values[:2].min() > 1e-3 and calibration.p_values[2] < 1e-6
    assert calibration.quantities[calibration.p_values.argmin()] in str(calibration).splitlines()[1]


def test_p_values_of_an_exact_guide_are_not_too_small():
    model = Linear()
    p = [check_calibration(model, Posterior(model), number=200, seed=seed).p for seed in range(60)]
    assert sum(p_value < 0.1 for p_value in p) < 0.1 * 60 + 4 * math.sqrt(60 * 0.09)


def test_batches_do_not_matter():
    model = Linear()
    whole = check_calibration(model, Posterior(model), number=200)
    small = check_calibration(model, Posterior(model), number=200, batch_size=37)
    assert small.p > 0.01 and small.ranks.shape == whole.ranks.shape


def test_given_simulations_are_ranked_as_selfcheck_ranks_them():
    model = Linear()
    z = torch.randn(1000, 2).double()
    images = (z @ model.matrix.T.detach() + SCALE * torch.randn(1000, 3).double())[:, None, None, :]
    narrow = Posterior(model, width=0.8)
    calibration = check_calibration(model, narrow, simulated=({"z": z}, images), seed=5)
    torch.manual_seed(5)
    with pyro.validation_enabled(False):
        assert calibrated(model, narrow, {"z": z}, images) == calibration.outcome
    assert calibration.p < 1e-6
    shuffled = check_calibration(model, Posterior(model), simulated=({"z": z.flip(0)}, images))
    assert shuffled.p < 1e-6  # these latents did not make these images


def test_scenes_that_the_model_does_not_take_are_left_out():
    triangle = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [0.0, 1.0]])
    model = Constellations([triangle], sigma=0.2, sigma_floor=0.15, clutter=1).double()
    calibration = check_calibration(model, ExactMatching(model), number=500, draws=15)
    assert (
        200 < len(calibration.ranks) < 300
    )  # half of the scenes have no object, and one point at most
    assert calibration.p > 1e-3


class Switched(Model):
    """Like `Linear` in one dimension, with a switch of the sign that the model sums out."""

    sites = (Site("z", ("images",)), Site("sign", ("images",), discrete=True, enumerated=True))

    def __init__(self):
        super().__init__()
        self.space = ImageSpace((1, 1, 1))
        self.one = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            z = pyro.sample("z", dist.Normal(0 * self.one, 1.0))
            summed = {"enumerate": "parallel"}
            sign = pyro.sample("sign", dist.Bernoulli(0.5 * self.one), infer=summed)
            mean = (z * (2 * sign - 1))[..., None, None, None]
            return pyro.sample("image", dist.Normal(mean, SCALE).to_event(3), obs=images)


class TwoSided(Guide[Switched]):
    covers = ("z",)

    def forward(self, images, labels=None):
        shrink = 1 / (1 + SCALE**2)
        mean = shrink * images.flatten(1) * torch.tensor([1.0, -1.0]).double()
        distribution = dist.Normal(mean, (shrink * SCALE**2) ** 0.5)
        choice = dist.Categorical(logits=torch.zeros_like(mean))
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("z", dist.MixtureSameFamily(choice, distribution))


def test_sites_that_the_model_sums_out_are_left_out():
    model = Switched()
    calibration = check_calibration(model, TwoSided(model), number=1000)
    assert calibration.quantities == ("z", "log joint") and calibration.p > 1e-3
