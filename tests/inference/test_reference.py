"""Reference posteriors: densities by brute force, exact moments, worse scores of wrong guides."""

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import tensor

from capsule_zoo.guides import ExactMatching, FreeForm, Guide
from capsule_zoo.inference import log_weights
from capsule_zoo.inference.annealing.path import AnnealedPath
from capsule_zoo.inference.references import Reference, list_references, load_reference
from capsule_zoo.inference.references import problems as reference_problems
from capsule_zoo.models import ImageSpace, Model, Site
from tools import reference_draws
from tools.reference_draws import exact_posterior, write_reference

NAMES = list_references()


@pytest.fixture(params=NAMES)
def problem(request):
    return load_reference(request.param)


class Constrained(Model):
    """A positive size, a fraction, and a switch, seen through two noisy pixels."""

    sites = (
        Site("size", ("images",)),
        Site("shares", ("images",), event_dim=1),
        Site("switch", ("images",), discrete=True),
    )

    def __init__(self):
        super().__init__()
        self.space = ImageSpace((1, 1, 2), (-math.inf, math.inf))
        self.one = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            size = pyro.sample("size", dist.LogNormal(0.3 * self.one, 0.5))
            distribution = dist.Beta(2 * self.one.expand(2), 3 * self.one).to_event(1)
            fractions = pyro.sample("shares", distribution)
            switch = pyro.sample("switch", dist.Bernoulli(0.3 * self.one))
            mean = size[..., None] * fractions * (1 + switch[..., None])
            distribution = dist.Normal(mean[..., None, None, :], 0.4).to_event(3)
            return pyro.sample("image", distribution, obs=images)


def constrained() -> Reference:
    images = tensor([[[[0.3, 0.9]]]], dtype=torch.float64)
    settings = {"switch": tensor([0.0, 1.0], dtype=torch.float64)}
    unit = torch.ones(3, dtype=torch.float64)
    draws = torch.zeros(2, 3, dtype=torch.float64)
    moments = (0 * unit, unit, 0 * unit, unit)
    return Reference("of a test", Constrained(), images, settings, draws, *moments, None, {})


def test_the_density_is_the_joint_summed_over_switches_times_the_jacobian():
    """Everything by hand: exp for the positive size, the logistic function for the fractions."""
    problem, x = constrained(), torch.randn(4, 5, 3, dtype=torch.float64)
    size, fractions = x[..., 0].exp(), x[..., 1:].sigmoid()
    log = dist.LogNormal(0.3, 0.5).log_prob(size) + dist.Beta(2.0, 3.0).log_prob(fractions).sum(-1)
    log = log + x[..., 0] + (fractions * (1 - fractions)).log().sum(-1)
    joint = [
        dist.Bernoulli(tensor(0.3).double()).log_prob(tensor(on).double())
        + dist.Normal(size[..., None] * fractions * (1 + on), 0.4)
        .log_prob(problem.images[0, 0])
        .sum(-1)
        for on in (0.0, 1.0)
    ]
    wanted = log + torch.logaddexp(*joint)
    torch.testing.assert_close(problem.log_prob(x), wanted, atol=1e-6, rtol=1e-6)
    sites = problem.sites(x)
    assert sites["size"].shape == (4, 5) and sites["shares"].shape == (4, 5, 2)
    torch.testing.assert_close(sites["size"], size)
    flat = {name: value.flatten(0, 1) for name, value in sites.items()}
    torch.testing.assert_close(problem.vector(flat), x.flatten(0, 1))
    assert problem.dimension == 3 and problem.log_prob(x[0, 0]).shape == ()


def test_the_density_is_the_sum_over_all_settings_of_the_model_s_own(problem):
    """The settings of the discrete sites are scored by the path that annealing takes."""
    x = problem.draws[:2] + 0.1
    model = poutine.condition(problem.model, problem.settings)
    count = len(next(iter(problem.settings.values())))
    path = AnnealedPath(model, None, problem.images.expand(count, *problem.images.shape[1:]))
    for row, log in zip(x, problem.log_prob(x), strict=True):
        densities = path.terms(path.state(problem.sites(row.expand(count, -1))))
        torch.testing.assert_close(log, (densities.start + densities.gain).logsumexp(0))


def test_the_settings_are_all_that_have_any_probability(problem):
    """Draws from the model: of the presences and kinds, or of matchings of six points."""
    model, listed = problem.model, problem.settings
    torch.manual_seed(0)
    count = len(next(iter(listed.values())))
    columns = torch.cat([value.flatten(1).double() for value in listed.values()], 1)
    rows = {tuple(row.tolist()) for row in columns}
    assert len(rows) == count
    nodes = poutine.trace(model).get_trace(batch_size=300).nodes
    values = [nodes[name]["value"].flatten(1).double() for name in listed]
    if "point_corner" in listed:
        six = (values[1] >= 0).sum(1) == problem.images.shape[1]
        values = [values[0][six], values[1][six][:, : problem.images.shape[1]]]
    drawn = {tuple(row.tolist()) for row in torch.cat(values, 1)}
    assert len(drawn) > 1 and drawn <= rows


def test_gradients_reach_every_number_and_batches_do_not_matter(problem, monkeypatch):
    x = problem.draws[:6].clone().requires_grad_()
    log = problem.log_prob(x)
    log.sum().backward()
    assert x.grad.isfinite().all() and (x.grad != 0).any(0).all()
    monkeypatch.setattr("capsule_zoo.inference.references.reference._ROWS", 1)
    torch.testing.assert_close(problem.log_prob(x), log)


def test_files_say_how_their_draws_were_made(problem):
    checks = problem.checks
    assert {"method", "seed", "version", "torch"} <= set(checks)
    if "rhat" in checks:
        assert checks["rhat"] < reference_draws.RHAT and checks["ess"] > reference_draws.ESS
    assert problem.draws.shape == (reference_draws.NUM_DRAWS, problem.dimension)
    errors = problem.score(problem.draws)
    assert errors.mean_error < 3 * errors.noise and errors.worst < 6 * errors.noise
    assert errors.kl is None


def test_draws_of_chains_balance_the_gradient(problem):
    """E[grad log p] = 0 and E[x grad log p] = -1 under any smooth density on R^D."""
    x = problem.draws[::10].clone().requires_grad_()
    (slope,) = torch.autograd.grad(problem.log_prob(x).sum(), x)
    for term, wanted in ((slope, 0.0), (x.detach() * slope, -1.0)):
        error = term.std(0) / len(term) ** 0.5
        assert ((term.mean(0) - wanted).abs() < 5 * error).all()


def exact_by_hand(problem):
    """Return log weight, mean and variance of every matching of the scene, object by object."""
    points, variance = problem.images[0], math.exp(2 * problem.model.log_floor.item())
    designs = []
    for corners in problem.model.corners.split(3):
        corners = corners - corners.mean(0)
        corners = corners / corners.square().sum(1).mean().sqrt()
        rows = [[[1, 0, x, y], [0, 1, y, -x]] for x, y in corners.tolist()]
        designs.append(torch.tensor(rows).double().view(6, 4))
    matchings = []
    for presence, code in zip(*problem.settings.values(), strict=True):
        left = int((code == 0).sum())
        log = 2 * math.log(0.5) - math.log(4) + math.lgamma(left + 1) - math.lgamma(7)
        log -= left * math.log(4.0)
        means, variances = torch.zeros(2, 4).double(), torch.full((2, 4), 0.25).double()
        for k, design in enumerate(designs):
            if presence[k]:
                slots = [int((code == 1 + 3 * k + c).nonzero()) for c in range(3)]
                coordinates = points[slots].flatten()
                spread = variance * torch.eye(6).double() + 0.25 * design @ design.T
                log += dist.MultivariateNormal(0 * coordinates, spread).log_prob(coordinates).item()
                precision = torch.eye(4).double() / 0.25 + design.T @ design / variance
                means[k] = torch.linalg.solve(precision, design.T @ coordinates / variance)
                variances[k] = torch.linalg.inv(precision).diagonal()
        matchings.append((log, means.flatten(), variances.flatten()))
    logs, means, variances = zip(*matchings, strict=True)
    return tensor(logs, dtype=torch.float64), torch.stack(means), torch.stack(variances)


def test_the_constellation_is_exact():
    problem = load_reference("constellation")
    logs, means, variances = exact_by_hand(problem)
    weights = logs.softmax(0)
    mean, square = weights @ means, weights @ (means.square() + variances)
    torch.testing.assert_close(problem.mean, mean)
    torch.testing.assert_close(problem.square_mean, square)
    torch.testing.assert_close(problem.scale, (square - mean.square()).sqrt())
    assert problem.log_evidence == pytest.approx(logs.logsumexp(0).item(), abs=1e-8)
    assert (weights > 0.01).sum() > 1  # more than one matching is possible
    posterior = exact_posterior(problem.model, problem.images, problem.settings)
    torch.testing.assert_close(posterior.log_weights, logs)
    error = problem.scale / len(problem.draws) ** 0.5
    assert ((problem.draws.mean(0) - mean).abs() < 4.5 * error).all()


def test_the_density_of_the_constellation_integrates_to_its_evidence():
    """By importance weights of draws from a mixture that is a fifth wider than the posterior."""
    problem = load_reference("constellation")
    logs, means, variances = exact_by_hand(problem)
    wide, weights = 1.2 * variances.sqrt(), logs.softmax(0)
    index = torch.multinomial(weights, 500, replacement=True)
    x = means[index] + wide[index] * torch.randn(len(index), 8).double()
    log_probs = dist.Normal(means, wide).log_prob(x[:, None]).sum(-1)
    ratio = (problem.log_prob(x) - (log_probs + weights.log()).logsumexp(-1)).exp()
    error = (ratio.std() / ratio.mean()).item() / len(x) ** 0.5
    assert ratio.mean().log().item() == pytest.approx(problem.log_evidence, abs=5 * error)
    assert error < 0.2


def test_the_exact_guide_scores_best():
    problem = load_reference("constellation")
    exact = ExactMatching(problem.model)
    best = problem.score(exact)
    assert best.mean_error < 2 * best.noise and best.square_error < 2 * best.noise
    assert best.kl == pytest.approx(0, abs=5e-4)  # the guide integrates scales numerically
    weights, *_ = log_weights(problem.model, exact, problem.images)
    assert weights.item() == pytest.approx(problem.log_evidence, abs=5e-4)
    shifted = problem.score(Shifted(problem.model))
    assert shifted.mean_error > 5 * best.mean_error and shifted.worst > shifted.mean_error
    assert shifted.kl > 1


class Shifted(Guide):
    """The exact guide with poses that are moved by a tenth."""

    covers = ("object_presence", "object_pose", "point_corner")

    def __init__(self, model):
        super().__init__(model)
        self.exact = ExactMatching(model)

    def forward(self, points, labels=None):
        with Move():
            return self.exact(points, labels)


class Move(poutine.messenger.Messenger):
    def _pyro_sample(self, msg):
        if msg["name"] == "object_pose":
            shift = torch.distributions.AffineTransform(0.1, 1.0, event_dim=2)
            msg["fn"] = dist.TransformedDistribution(msg["fn"], [shift])


@pytest.mark.parametrize("name", ["part-whole", "generative-capsnet"])
def test_a_guide_that_was_never_fitted_scores_worse_than_the_draws(name):
    problem = load_reference(name)
    guide = FreeForm(problem.model, problem.images.expand(200, *problem.images.shape[1:]))
    errors, best = problem.score(guide.double(), num_draws=200), problem.score(problem.draws[:200])
    assert errors.kl is None and errors.mean_error > 3 * best.mean_error


def test_errors_are_in_posterior_standard_deviations():
    """Three coordinates by hand: E[x] and E[x^2] of two draws, less the reference's."""
    scale = tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    moments = dict(mean=0 * scale, scale=scale, squared_deviation=10 * scale)
    problem = replace(constrained(), **moments, square_mean=0 * scale + 1)
    errors = problem.score(tensor([[1.0, 0.0, -3.0], [3.0, 0.0, -1.0]], dtype=torch.float64))
    means = [2 / 1, 0 / 2, -2 / 4]
    squares = [(5 - 1) / 10, (0 - 1) / 20, (5 - 1) / 40]
    for error, differences in ((errors.mean_error, means), (errors.square_error, squares)):
        assert error == pytest.approx((sum(e**2 for e in differences) / 3) ** 0.5)
    assert errors.worst == pytest.approx(2.0) and errors.noise == pytest.approx(2**-0.5)


def test_half_the_width_is_seen_in_the_squares(problem):
    narrow = problem.mean + (problem.draws - problem.mean) / 2
    errors, best = problem.score(narrow), problem.score(problem.draws)
    assert errors.square_error > 5 * best.square_error


def test_files_are_made_again_to_the_same_numbers(tmp_path, monkeypatch):
    write_reference("constellation", tmp_path)
    monkeypatch.setattr(reference_problems, "FOLDER", tmp_path)
    again = load_reference("constellation")
    monkeypatch.undo()
    stored = load_reference("constellation")
    torch.testing.assert_close(again.images, stored.images)
    for name in ("mean", "scale", "square_mean", "squared_deviation", "draws"):
        torch.testing.assert_close(getattr(again, name), getattr(stored, name))
    assert again.log_evidence == pytest.approx(stored.log_evidence, abs=1e-9)


@pytest.mark.long
def test_chains_that_have_not_mixed_write_nothing(tmp_path):
    with pytest.raises(ValueError, match="chains did not pass: R-hat"):
        write_reference("generative-capsnet", tmp_path, chains=4, transitions=10)
    assert list(tmp_path.iterdir()) == []
