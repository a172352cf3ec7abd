"""Annealing that could mislead: missed modes, heavy tails, and the words that tell of them."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from toys import Conjugate, ExactGuide, conjugate_images, pair

from capsule_zoo.guides import Guide
from capsule_zoo.inference import SemiAmortized, evaluate, summarize
from capsule_zoo.inference.annealing import annealed_bounds, annealed_gaps, annealed_log_likelihood
from capsule_zoo.inference.annealing.exceedance import (
    bound_of_guide,
    describe_exceedances,
    exceedances,
)
from capsule_zoo.inference.evaluation.summary import log_mean, log_mean_error
from capsule_zoo.inference.posterior.gauss_newton import gauss_newton
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.common.spaces import ImageSpace

CHAINS: dict = dict(chains=8, temperatures=25, leapfrogs=3, simulated=0, pilot_chains=2)
NODES = torch.linspace(-8, 8, 40_001).double()


class Folded(Conjugate):
    """Pixels ~ Normal(|code - .5|, .1): an image of brightness 1.5 has the modes 2 and -1."""

    space = ImageSpace((1, 2, 2), (-math.inf, math.inf))

    def code(self) -> Tensor:
        return (super().code() - 0.5).abs()

    def log_evidence(self, images: Tensor) -> Tensor:
        """Compute log p(image), (B,), by quadrature over codes."""
        prior = dist.Normal(self.mean, 1.0).log_prob(NODES)
        pixels = dist.Normal((NODES - 0.5).abs(), self.noise).log_prob(images.flatten(1)[..., None])
        return (prior + pixels.sum(1)).logsumexp(1) + (NODES[1] - NODES[0]).log()


class UpperMode(Guide[Folded]):
    """A guide that finds the upper mode of every image alone, as an encoder may."""

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        with pyro.plate("images", len(images), dim=-1):
            mode = 0.5 + images.mean((1, 2, 3))
            pyro.sample("code", dist.Normal(mode, self.model.noise / 2))


@pytest.fixture
def folded():
    """Return a model, a guide to one mode of two, one to both, and images, in float64."""
    torch.manual_seed(0)
    model = Folded(noise=0.1).double()
    poor = UpperMode(model)
    both = SemiAmortized(poor, 20, kind="mixture")
    return model, poor, both, 1.5 + 0.1 * torch.randn(3, 1, 2, 2).double()


def test_chains_of_a_poor_guide_miss_a_mode_and_those_of_the_best_do_not(folded):
    """The mode -1 holds e^1.5 times as much of the posterior as the mode 2."""
    model, poor, both, images = folded
    truth = model.log_evidence(images).mean().item()
    missed = annealed_bounds(annealed_log_likelihood(model, poor, images, **CHAINS))["lower"]
    assert missed == pytest.approx(truth - math.log1p(math.exp(1.5)), abs=0.2)
    idata = annealed_log_likelihood(model, {"poor": poor, "both": both}, images, **CHAINS)
    assert idata.attrs["start"] == "both" and idata.attrs["exceeded"] == ""
    assert idata.constant_data.guide_bound.dims == ("guide", "image")
    bounds = annealed_bounds(idata)
    assert bounds["lower"] == pytest.approx(truth, abs=0.05)
    assert bounds["images_exceeded"] == 0 and "warning" not in bounds


def test_a_missed_mode_is_told_in_words(folded):
    model, poor, both, images = folded
    idata = annealed_log_likelihood(model, poor, images, **CHAINS)
    assert "warning" not in annealed_bounds(idata)  # the guide itself misses the same mode
    better = evaluate(model, both, images, num_particles=200, draws=0)
    with pytest.warns(
        UserWarning, match=r"lower is too low.*'both' is 1\.[67]. ± .* on 3 of 3 images"
    ):
        bounds = annealed_bounds(idata, {"both": better})
    assert bounds["images_exceeded"] == 3 and "'both'" in bounds["warning"]


def test_chains_that_end_below_their_own_start_are_told_in_words(folded):
    """Here the weights of one image are made lower, as if its chains had lost their way."""
    model, _, both, images = folded
    idata = annealed_log_likelihood(model, both, images, **CHAINS)
    idata.sample_stats["log_weight"].values[..., 1] -= 5
    bounds = annealed_bounds(idata)
    assert bounds["images_exceeded"] == 1
    assert "on 1 of 3 images (most on image 1)" in bounds["warning"]


def test_a_warning_comes_with_the_annealing(folded):
    """Chains in three steps from the prior end far below a guide that knows the posterior."""
    model, _, both, images = folded
    model.noise = 0.002
    settings = CHAINS | dict(temperatures=2, chains=2, prior_fraction=0.99)
    with pytest.warns(UserWarning, match="lower is too low") as caught:
        idata = annealed_log_likelihood(model, {"both": both}, images, **settings)
    assert len(caught) == 1 and idata.attrs["exceeded"] == str(caught[0].message)


def weights(spread: float, *shape: int) -> np.ndarray:
    """Return logarithms of weights whose mean is 1."""
    return spread * np.random.default_rng(0).normal(size=shape) - spread**2 / 2


def bounds_of(log_weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return log_mean(log_weight), log_mean_error(log_weight)


def test_one_image_of_many_is_found_and_equal_bounds_are_not():
    """The mean over images has a spread of 2 nats then: it shows nothing."""
    chains, guide = weights(0.3, 8, 16), weights(0.5, 1000, 16)
    assert exceedances(bounds_of(chains), {"guide": bounds_of(guide)}) == []
    chains[:, 3] -= 35
    guide[:, [0, 5]] -= 2
    (exceedance,) = exceedances(bounds_of(chains), {"guide": bounds_of(guide)})
    assert exceedance.images == (3,) and exceedance.largest == pytest.approx(35, abs=0.5)
    assert exceedance.difference == pytest.approx(31 / 16, abs=0.1)
    spread = (log_mean(guide) - log_mean(chains)).std() / 4
    assert exceedance.difference < 2 * spread  # standard errors over images would have hidden it


def test_a_small_difference_on_every_image_exceeds_on_average_alone():
    chains, guide = weights(0.5, 4, 400) - 0.5, weights(0.3, 100, 400)
    (exceedance,) = exceedances(bounds_of(chains), {"guide": bounds_of(guide)})
    assert exceedance.difference == pytest.approx(0.53, abs=0.1) and len(exceedance.images) < 40
    assert exceedances(bounds_of(chains + 0.5), {"guide": bounds_of(guide)}) == []
    assert describe_exceedances([]) == ""


def test_one_lucky_draw_decides_nothing():
    model, _ = pair()
    images = conjugate_images(2)
    idata = evaluate(model, ExactGuide(model), images, num_particles=50, draws=0)
    plain = bound_of_guide(idata)[0]
    assert plain == pytest.approx(summarize(idata)["iwae"] + math.log(49 / 50), abs=1)
    idata.sample_stats["log_weight"].values[0, 7, 0] += 20  # a weight of e^20 times the others
    lucky, error = bound_of_guide(idata)
    assert lucky == pytest.approx(plain) and error[0] == pytest.approx(1, abs=0.01)


def test_the_error_of_a_mean_weight_is_its_relative_standard_error():
    weight = np.array([[1.0, 3], [2, 3], [3, 3]])
    expected = np.sqrt(1 / 3) / 2
    assert log_mean_error(np.log(weight)) == pytest.approx([expected, 0])
    assert log_mean_error(np.log(weight[:1])).tolist() == [1, 1]
    assert log_mean_error(np.full((4, 1), -np.inf)).tolist() == [1]


def test_the_median_gap_is_not_decided_by_one_image():
    """Gaps of .1, .3, .2 and 100 nats, written down by hand."""
    model, guide = pair()
    settings = dict(chains=1, temperatures=2, leapfrogs=1, simulated=4)
    idata = annealed_log_likelihood(model, guide, conjugate_images(1), **settings)
    idata.sample_stats["simulated_log_weight"].values[0, 0] = [1.0, 2.0, 3.0, 4.0]
    idata.sample_stats["reverse_log_weight"].values[0, 0] = [1.1, 2.3, 3.2, 104.0]
    bounds = annealed_bounds(idata)
    assert bounds["gap"] == pytest.approx(25.15) and bounds["gap_se"] > 24
    assert bounds["gap_median"] == pytest.approx(0.25)
    assert bounds["gap_largest"] == pytest.approx(100)


class EightSchools(Model):
    """Rubin's eight schools as one image: effects mean + scale z, a half-Cauchy scale."""

    sites = (
        Site("mean", ("images",)),
        Site("scale", ("images",)),
        Site("effects", ("images",), event_dim=1),
    )
    space = ImageSpace((1, 1, 8), (-math.inf, math.inf))
    noise = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18]).double()

    def __init__(self) -> None:
        super().__init__()
        self.five = torch.nn.Parameter(torch.tensor(5.0).double())

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        one = torch.ones(8).double()
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            mean = pyro.sample("mean", dist.Normal(0 * self.five, self.five))
            scale = pyro.sample("scale", dist.HalfCauchy(self.five))
            effects = pyro.sample("effects", dist.Normal(0 * one, one).to_event(1))
            effects = mean[..., None] + scale[..., None] * effects
            distribution = dist.Normal(effects[..., None, None, :], self.noise).to_event(3)
            return pyro.sample("image", distribution, obs=images)

    def log_evidence(self, images: Tensor) -> Tensor:
        """Compute log p(image), (B,), by quadrature over the logarithm of the scale."""
        log_scale = torch.linspace(-12, 12, 801).double()
        scale = log_scale.exp()
        diagonal = (scale[:, None] ** 2 + self.noise**2).diag_embed()
        distributions = dist.MultivariateNormal(torch.zeros(8).double(), diagonal + self.five**2)
        joint = distributions.log_prob(images.reshape(-1, 1, 8)) + log_scale
        joint = joint + dist.HalfCauchy(self.five).log_prob(scale)
        return joint.logsumexp(1) + (log_scale[1] - log_scale[0]).log()


RESULTS = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12]).double().view(1, 1, 1, 8)


@pytest.mark.parametrize("modes", [1, 3])
def test_a_half_cauchy_prior_has_a_finite_distribution(modes):
    """Its variance is infinite, its Fisher information is not. Draws overflowed before."""
    model = EightSchools()
    torch.manual_seed(0)
    with torch.no_grad():
        images = torch.cat([RESULTS, model(batch_size=7)])
    guide = gauss_newton(model, None, images, modes=modes)
    idata = evaluate(model, guide, images, num_particles=500, draws=0)
    log_weight = torch.from_numpy(idata.sample_stats["log_weight"].values[0])
    assert not log_weight.isnan().any()
    truth = model.log_evidence(images).detach()
    assert truth[0].item() == pytest.approx(-31.3113, abs=2e-4)
    iwae = log_weight.logsumexp(0) - math.log(500)
    # By Markov's inequality a bound exceeds log p by 9 once in 8,000 images.
    assert (iwae < truth + 9).all() and (iwae[0] - truth[0]).abs() < 0.5


class HeavyTails(Conjugate):
    """A model whose code has a Cauchy prior: one draw in eight is further out than 5."""

    space = ImageSpace((1, 2, 2), (-math.inf, math.inf))

    def code(self) -> Tensor:
        return pyro.sample("code", dist.Cauchy(self.mean, 1.0))

    def log_evidence(self, images: Tensor) -> Tensor:
        """Compute log p(image), (B,), by quadrature around the mean pixel."""
        near = images.mean((1, 2, 3))[:, None] + NODES / 4
        joint = dist.Normal(near[:, None], self.noise).log_prob(images.flatten(1)[..., None]).sum(1)
        joint = joint + dist.Cauchy(self.mean, 1.0).log_prob(near)
        return joint.logsumexp(1) + ((NODES[1] - NODES[0]) / 4).log()


class Clipped(Guide[HeavyTails]):
    """A guide that is right where most images are, and stays there."""

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("code", dist.Normal(images.mean((1, 2, 3)).clamp(-5, 5), 0.3))


def test_a_heavy_tail_decides_the_mean_gap_and_not_its_median():
    torch.manual_seed(0)
    model = HeavyTails().double()
    with torch.no_grad():
        images = model(batch_size=1).clamp(-5, 5)
    settings = dict(chains=8, temperatures=10, leapfrogs=2, simulated=16, pilot_chains=2)
    idata = annealed_log_likelihood(model, Clipped(model), images, **settings)
    bounds, truth = annealed_bounds(idata), model.log_evidence(images).item()
    assert bounds["lower"] == pytest.approx(truth, abs=0.05)
    pixels = torch.from_numpy(idata.observed_data["simulated_pixels"].values)
    gaps, far = annealed_gaps(idata), pixels.mean((1, 2, 3)).abs() > 5
    assert 1 <= far.sum() < 8 and gaps[far].max() > 1000 and (abs(gaps[~far]) < 0.3).all()
    assert bounds["gap"] == pytest.approx(gaps.mean()) and bounds["gap_se"] > bounds["gap"] / 4
    assert abs(bounds["gap_median"]) < 0.1 and bounds["gap_largest"] == gaps.max()


def test_a_cauchy_prior_counts_by_its_fisher_information():
    torch.manual_seed(0)
    model = HeavyTails().double()
    images = 3 * torch.randn(5, 1, 2, 2).double()
    guide = gauss_newton(model, None, images, steps=20, climb=5)
    precision = 4 / model.noise**2 + 1 / 2
    assert guide.factor().flatten().tolist() == pytest.approx([precision**-0.5] * 5)
    iwae = summarize(evaluate(model, guide, images, num_particles=500, draws=0))["iwae"]
    assert iwae == pytest.approx(model.log_evidence(images).mean().item(), abs=0.01)
