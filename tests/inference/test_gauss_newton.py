"""Gauss-Newton guides: exact for linear means, always normal, and calibrated near one."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from toys import Correlated, Parts, PartsGuide

from capsule_zoo.guides import Guide
from capsule_zoo.guides.per_image.gauss_newton import MODES
from capsule_zoo.inference import SemiAmortized, check_pair, evaluate, summarize
from capsule_zoo.inference.annealing import annealed_bounds, annealed_log_likelihood
from capsule_zoo.inference.annealing.path import AnnealedPath, State, simulate
from capsule_zoo.inference.annealing.transitions import Moves, space_temperatures
from capsule_zoo.inference.calibration import check_calibration
from capsule_zoo.inference.log_weight import log_density
from capsule_zoo.inference.posterior import fitted
from capsule_zoo.inference.posterior.gauss_newton import (
    gauss_newton,
    measure_information,
    precision,
)
from capsule_zoo.models import VariationalAutoencoder
from capsule_zoo.models.base import Site
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.registry import create, small_settings

FUZZED = ("vae", "generative-capsnet", "part-whole", "shape-codes", "stacked-capsule-autoencoder")


class Prior(Guide):
    """A guide that draws from the prior, whatever the image shows."""

    def forward(self, images, labels=None):
        with poutine.block(hide=["image"]):
            self.model(batch_size=len(images))


@pytest.fixture
def analyzers():
    """Return a factor analyzer with a log-normal site, and images of it, in float64."""
    model = Correlated()
    return model, model(batch_size=5).detach()


@pytest.mark.parametrize("modes", [1, 3])
def test_it_is_the_posterior_of_factor_analysis(analyzers, modes):
    """One step reaches the mode from any point, and all weights are the evidence."""
    model, images = analyzers
    guide = gauss_newton(model, None, images, steps=0, climb=1, modes=modes)
    check_pair(model, guide, images)
    covariance = guide.factor() @ guide.factor().mT
    assert (covariance - model.precision.inverse()).abs().max() < 1e-10
    log_weight = evaluate(model, guide, images, num_particles=20).sample_stats.log_weight.values
    assert abs(log_weight[0] - model.log_evidence(images).detach().numpy()).max() < 1e-10


def test_blocks_are_those_of_the_precision(analyzers):
    model, images = analyzers
    guide = gauss_newton(model, None, images, steps=0, climb=30, blocks=True)
    check_pair(model, guide, images)
    place = guide.factors["place"][:, 0, 0]
    assert (place @ place.mT - model.precision[:2, :2].inverse()).abs().max() < 1e-10
    with pytest.raises(ValueError, match="of blocks; make the guide with blocks=False"):
        guide.factor()


def test_the_factor_is_narrow_where_one_of_the_modes_is(analyzers):
    """Chains would else step as far as a mode is wide that took a part for absent."""
    model, images = analyzers
    guide = gauss_newton(model, None, images, steps=0, climb=1, modes=2)
    for rows in guide.factors.values():
        rows.data[:, 0].mul_(100)  # of the mode that may be the heavier one
    guide.logits[MODES].data.copy_(torch.tensor([9.0, 0.0]))
    mean = (1 + 1e-4) / 2 * model.precision
    assert (guide.factor() @ guide.factor().mT - mean.inverse()).abs().max() < 1e-10


def test_the_guide_to_some_of_the_images_has_their_factors():
    """Also where the sites of the model are not in the order of their names."""
    entry = create("shape-codes", **small_settings("shape-codes"))
    images = entry.model(batch_size=3).detach().clamp(0, 1)
    guide = gauss_newton(entry.model, entry.guide, images, steps=1, climb=0)
    assert list(guide.locs) != sorted(guide.locs)
    index = torch.tensor([2, 0])
    torch.testing.assert_close(guide.select(index).factor(), guide.factor()[index])


def test_a_missing_pixel_tells_nothing(analyzers):
    model, images = analyzers
    images[:, 0, 0, 1] = torch.nan
    guide = gauss_newton(model.with_missing_pixels(), None, images, steps=0, climb=1)
    rows = model.paint[[0, 2, 3]]
    expected = torch.eye(3).double() + rows.T @ rows / 0.25
    assert (guide.factor() @ guide.factor().mT - expected.inverse()).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["part-whole", "generative-capsnet"])
def test_the_density_of_given_latents_is_that_of_the_whole_distribution(name):
    """Site by site, over plates and modes, the densities add up to those of a mixture."""
    entry = create(name, **small_settings(name))
    model = entry.model.double().discretize()
    entry.guide.double()
    images = model(batch_size=2).detach().clamp(0, 1)
    guide = gauss_newton(entry.model, entry.guide, images, steps=1, climb=0, modes=3).discretize()
    trace = poutine.trace(guide).get_trace(images)
    values = {name: trace.nodes[name]["value"] for name in guide.covers}
    state = AnnealedPath(model, None, images).state(values)
    rank = {site.name: site.event_dim for site in model.latent_sites}
    joint = guide.logits["modes"].log_softmax(1).T.clone()  # (modes, images)
    for m in range(3):
        loc = torch.cat([point[:, m].flatten(1) for point in guide.locs.values()], 1)
        scale = torch.cat([rows[:, m] for rows in guide.factors.values()], 1)
        distribution = torch.distributions.MultivariateNormal(loc, scale_tril=scale)
        joint[m] += distribution.log_prob(state.position)
        for name, value in state.choices.items():
            component = guide.families[name].distribution(guide.logits[name][:, m], rank[name])
            joint[m] += component.log_prob(value).reshape(2, -1).sum(1)
    assert joint.isfinite().sum() > 2  # not all are one mode
    assert torch.allclose(log_density(trace, images), joint.logsumexp(0), atol=1e-8)


def test_forward_derivatives_and_differences_agree_and_forward_mode_is_tried_once(monkeypatch):
    entry = create("vae", **small_settings("vae"))
    model = entry.model.double().eval()
    images = model(batch_size=3).detach()
    path = AnnealedPath(model, None, images)
    state, columns = path.draw(), torch.arange(path.columns)
    forward = precision(path, state, columns)

    tried = []

    def refused(*arguments):
        tried.append(arguments)
        raise NotImplementedError

    monkeypatch.setattr(torch.func, "jvp", refused)
    for _ in range(2):
        assert torch.allclose(forward, precision(path, state, columns), rtol=1e-6)
    assert len(tried) == 1  # an error of Pyro keeps the tensors of its trace


@pytest.mark.parametrize("name", FUZZED)
def test_it_is_positive_definite_wherever_it_is(name):
    entry = create(name, **small_settings(name))
    model = entry.model.eval().discretize()
    with torch.no_grad():
        images = model.space.example(4, torch.float32, torch.Generator().manual_seed(1))
        path = AnnealedPath(model, None, images)
        state = path.draw()
        far = torch.tensor([0.0, 1.0, 10.0, 100.0])[:, None] * torch.randn_like(state.position)
        matrix = precision(path, State(far, state.choices), torch.arange(path.columns))
    assert matrix.isfinite().all()
    assert torch.linalg.cholesky_ex(matrix).info.eq(0).all()


@pytest.mark.parametrize(("factor", "calibrated"), [(1.0, True), (1.5, False)])
def test_ranks_are_uniform_where_the_decoder_is_nearly_linear(factor, calibrated, monkeypatch):
    """A guide that is half as wide again is found out."""

    def fit(*arguments, **options):
        guide = gauss_newton(*arguments, climb=4, **options)
        with torch.no_grad():
            for rows in guide.factors.values():
                rows.mul_(factor)
        return guide

    monkeypatch.setitem(fitted._PER_IMAGE, "gauss_newton", fit)
    model = VariationalAutoencoder((1, 5, 6), latent=2, channels=4, sigma_image=0.5).double()
    calibration = check_calibration(
        model, SemiAmortized(Prior(model), 0, kind="gauss_newton"), number=500
    )
    assert (calibration.p > 0.01) == calibrated, calibration


def test_chains_start_at_it_and_move_by_its_covariance(analyzers):
    """From the exact posterior every chain weighs the evidence, in both directions."""
    model, _ = analyzers
    start = SemiAmortized(Prior(model), 0, kind="gauss_newton")
    settings = dict(chains=2, temperatures=3, simulated=4)
    images = model(batch_size=3).detach()
    bounds = annealed_bounds(annealed_log_likelihood(model, start, images, **settings))
    assert abs(bounds["lower"] - model.log_evidence(images).mean().item()) < 1e-8
    assert abs(bounds["gap"]) < 1e-8
    assert bounds["acceptance_rate"] > 0.5


def test_duplicates_count_once():
    model = Correlated()
    images = model(batch_size=4).detach()
    guide = gauss_newton(model, None, images, steps=0, climb=2, modes=3)
    assert guide.logits["modes"].isfinite().sum(1).tolist() == [1] * 4


class Inked(Correlated):
    """Binary pixels whose log odds are linear in the place: the precision is the Hessian."""

    sites = (Site("place", ("images",), event_dim=1),)
    space = ImageSpace((1, 2, 2))

    def forward(self, images=None, labels=None, batch_size=1):
        number, zero = batch_size if images is None else len(images), self.paint.new_zeros(2)
        with pyro.plate("images", number, dim=-1):
            place = pyro.sample("place", dist.Normal(zero, 1.0).to_event(1))
            logits = (4 * place @ self.paint[:, :2].T).view(-1, *self.image_shape)
            return pyro.sample("image", dist.Bernoulli(logits=logits).to_event(3), obs=images)


def test_the_precision_of_binary_pixels_is_the_hessian_of_logistic_regression():
    """It is I + W' p (1 - p) W, at points where p is far from 1 / 2 too."""
    model = Inked()
    images = model(batch_size=5).detach()
    path = AnnealedPath(model, None, images)
    state = path.draw()

    def loss(place):
        logits = 4 * model.paint[:, :2].detach() @ place
        return 0.5 * place.square().sum() + torch.nn.functional.softplus(logits).sum()

    hessian = torch.autograd.functional.hessian
    expected = torch.stack([hessian(loss, place) for place in state.position.detach()])
    matrix = precision(path, state, torch.arange(path.columns))
    torch.testing.assert_close(matrix, expected)


DISTRIBUTIONS = {  # of a parameter t, with the values over which squared scores are summed
    "bernoulli": (lambda t: dist.Bernoulli(logits=3 * t), torch.tensor([0.0, 1.0])),
    "categorical": (lambda t: dist.Categorical(torch.stack([t, 1 / t, t**2])), torch.arange(3)),
    "normal": (lambda t: dist.Normal(2 * t, t.exp()), torch.linspace(-20, 20, 401)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_information_of_a_distribution_is_the_mean_of_its_squared_score(name):
    make, values = DISTRIBUTIONS[name]
    values = values.double() if values.is_floating_point() else values
    t = torch.tensor(0.7).double()
    score = torch.autograd.functional.jacobian(lambda t: make(t).log_prob(values), t)
    weight = make(t).log_prob(values).softmax(0)
    expected = (weight * score.square()).sum()
    information = 0
    for n, (_, root) in enumerate(measure_information(make(t), values[0])):
        place = lambda t, n=n: measure_information(make(t), values[0])[n][0]  # noqa: E731
        information += (root * torch.autograd.functional.jacobian(place, t)).square().sum()
    torch.testing.assert_close(information, expected)


class Waves(Correlated):
    """Means are sines of a point, with many modes that do not explain the image."""

    sites = (Site("place", ("images",), event_dim=1),)

    def forward(self, images=None, labels=None, batch_size=1):
        number, zero = batch_size if images is None else len(images), self.paint.new_zeros(2)
        with pyro.plate("images", number, dim=-1):
            place = pyro.sample("place", dist.Normal(zero, 1.0).to_event(1))
            mean = (6 * place @ self.paint[:, :2].T).sin().view(-1, *self.image_shape)
            return pyro.sample("image", dist.Normal(mean, 0.05).to_event(3), obs=images)


def test_points_that_climb_from_the_prior_find_the_mode():
    """They are as likely as the latents that drew the image, where a single start seldom is."""
    model = Waves()
    images, latents = simulate(model, 20)
    path = AnnealedPath(model, None, images)
    true = path.state(latents)
    counts = []
    for modes, climbing in ((1, 64), (2, 1), (2, 64)):
        settings = dict(steps=20, modes=modes, climbing=climbing)
        points = gauss_newton(model, None, images, **settings).locs["place"]
        joints = [
            path.terms(true._replace(position=points[:, m].detach())).at(1.0) for m in range(modes)
        ]
        counts.append((torch.stack(joints).amax(0) > path.terms(true).at(1.0) - 3).sum())
    assert counts[0] < 8 and counts[1] < 16 and counts[2] == 20, counts


def test_presences_settle_with_the_poses_that_follow_them():
    """The points take all parts for absent, and present ones are told to a hundredth of a nat."""
    model = Parts(noise=0.05).double()
    images, latents = simulate(model, 20)
    guide = gauss_newton(model, PartsGuide(model), images, steps=0, climb=3, check=False)
    presence = (guide.logits["part_presence"][:, 0] > 0).reshape(20, 2)
    assert latents["part_presence"].sum() > 10
    assert torch.equal(presence.double(), latents["part_presence"].reshape(20, 2))
    idata = evaluate(model, guide, images, num_particles=100)
    evidence = model.log_evidence(images).mean().item()
    assert summarize(idata)["iwae"] == pytest.approx(evidence, abs=0.2)


def test_temperatures_lie_where_log_weights_change():
    """Half of them follow the spread, which here is all in the last tenth, half the old ones."""
    betas = torch.linspace(0, 1, 11).tolist()
    spread = torch.zeros(11, 2)
    spread[9:, 0], spread[:, 1] = 1.0, 3.0
    lengths = torch.linspace(1, 2, 11)[:, None].repeat(1, 2)
    temperatures, along = space_temperatures(betas, lengths, spread, 20)
    assert temperatures.shape == along.shape == (21, 2)
    assert temperatures[0].tolist() == [0, 0] and temperatures[-1].tolist() == [1, 1]
    assert (temperatures.diff(dim=0) > 0).all()
    assert (temperatures[:, 0] > 0.8).sum() >= 11
    assert torch.allclose(temperatures[:, 1], torch.linspace(0, 1, 21).double())
    assert torch.allclose(along[::2, 1], lengths[:, 1])


def test_a_factor_moves_as_the_mass_matrix_it_stands_for():
    """Steps with factor S along u are steps of length one along the coordinates S^-1 u."""
    factor = torch.tensor([[2.0, 0.0], [0.7, 0.5]]).double().expand(3, 2, 2)
    moves, rows = Moves(1, 0, factor), torch.randn(6, 2).double()
    assert torch.allclose(moves.scale_vectors(rows), rows @ factor[0].mT)
    assert torch.allclose(moves.scale_vectors(rows, back=True), rows @ factor[0])
    diagonal = Moves(1, 0, torch.rand(6, 2).double())
    assert torch.equal(diagonal.scale_vectors(rows), diagonal.scale_vectors(rows, back=True))
