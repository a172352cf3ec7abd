"""Plain Pyro programs as models of the zoo: exact densities, refusals, and what stays untouched."""

import math
import traceback

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam
from pyro.nn import PyroModule, PyroSample
from scipy.special import voigt_profile
from torch import Tensor, nn
from torch.distributions.transforms import AffineTransform

from capsule_zoo.inference import evaluate
from capsule_zoo.inference.annealing import annealed_bounds, annealed_log_likelihood
from capsule_zoo.inference.annealing.path import score_latents
from capsule_zoo.inference.evaluation.summary import log_mean, pooled_log_weight
from capsule_zoo.inference.examination.program import UnservedProgram, as_model
from capsule_zoo.inference.log_weight import log_density
from capsule_zoo.inference.posterior.gauss_newton import gauss_newton
from capsule_zoo.models.common.spaces import tile_batch


def double(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LOADINGS, NOISE = double(0, 2, 5), 0.5
X = double(1, 7, 2) @ LOADINGS + NOISE * double(2, 7, 5)
CLASSES = torch.tensor([0.7, 0.3], dtype=torch.float64)
SHIFTS = torch.tensor([-1.0, 2.0], dtype=torch.float64)


def components(x):
    with pyro.plate("cases", len(x)):
        code = pyro.sample("code", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(code @ LOADINGS, NOISE).to_event(1), obs=x)


def components_by_pixel(x):
    """The same with an inner plate, which Pyro puts to the left of the cases."""
    with pyro.plate("cases", len(x)):
        code = pyro.sample("code", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        with pyro.plate("pixels", 5):
            pyro.sample("x", dist.Normal((code @ LOADINGS).T, NOISE), obs=x.T)


def components_together(x):
    """The same with one event for both codes and cases of a fixed number, all one row."""
    with pyro.plate("cases", 7):
        code = pyro.sample("code", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(code @ LOADINGS, NOISE).to_event(1), obs=x)


def marginal(x: Tensor) -> Tensor:
    """Return the exact log p of each case of `components`, of what is not missing."""
    covariance = LOADINGS.T @ LOADINGS + NOISE**2 * torch.eye(5)
    log_probs = []
    for row in x:
        is_observed = ~row.isnan()
        part = covariance[is_observed][:, is_observed]
        distribution = torch.distributions.MultivariateNormal(part.new_zeros(len(part)), part)
        log_probs.append(
            distribution.log_prob(row[is_observed]) if len(part) else part.new_zeros(())
        )
    return torch.stack(log_probs)


def evidence(program, *args, **options) -> np.ndarray:
    """Return log p of each row by the Gauss-Newton distribution, exact for linear means."""
    model, rows = as_model(program, *args, **options)
    idata = evaluate(model, gauss_newton(model, None, rows, steps=5), rows, num_particles=4)
    weights = pooled_log_weight(idata)
    assert np.ptp(weights, axis=0).max() < 1e-6  # the posterior itself
    return log_mean(weights)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("program", [components, components_by_pixel, components_together])
def test_the_evidence_of_linear_components_is_exact(program, missing):
    """By row, or as the sum over all data as one row; missing values are summed out."""
    x = X.clone()
    if missing:
        x[0, 3] = x[2, :2] = x[4] = math.nan
    expected = marginal(x) if program is not components_together else marginal(x).sum()[None]
    np.testing.assert_allclose(evidence(program, x), expected, atol=1e-6)


def regression(x, y=None):
    weights = pyro.sample("weights", dist.Normal(x.new_zeros(2), 2.0).to_event(1))
    with pyro.plate("cases", len(x)):
        return pyro.sample("y", dist.Normal(x @ weights, 0.3), obs=y)


class Linear(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = PyroModule[nn.Linear](2, 1, bias=False)
        self.inner.weight = PyroSample(dist.Normal(torch.zeros(1, 2).double(), 2.0).to_event(2))

    def forward(self, x, y=None):
        mean = self.inner(x)[:, 0]
        with pyro.plate("cases", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


@pytest.mark.parametrize("program", [regression, Linear()])
@pytest.mark.parametrize("by_name", [False, True])
def test_the_evidence_of_a_linear_regression_is_exact(program, by_name):
    x, y = double(3, 6, 2), double(4, 6)
    covariance = 4 * x @ x.T + 0.09 * torch.eye(6)
    distribution = torch.distributions.MultivariateNormal(torch.zeros(6).double(), covariance)
    data = ((x,), {"observed": {"y": y}}) if by_name else ((x, y), {})
    np.testing.assert_allclose(
        evidence(program, *data[0], **data[1]), [distribution.log_prob(y)], atol=1e-6
    )


def mixture(x, infer=None):
    with pyro.plate("cases", len(x)):
        kind = pyro.sample("kind", dist.Categorical(CLASSES), infer=infer)
        code = pyro.sample("code", dist.Normal(0.0, 1.0))
        mean = SHIFTS[kind][..., None] + code[..., None] * LOADINGS[0]
        pyro.sample("x", dist.Normal(mean, NOISE).to_event(1), obs=x)


@pytest.mark.parametrize("infer", [None, {"enumerate": "parallel"}])
def test_discrete_sites_are_summed_out(infer):
    model, rows = as_model(mixture, X, infer)
    assert [site.name for site in model.sites if site.enumerated] == ["kind"]
    code = double(5, 7, 1)
    log_prob = log_density(score_latents(model, {"code": code}, rows), rows)
    terms = [
        dist.Normal(shift + code * LOADINGS[0], NOISE).log_prob(X).sum(1) + p.log()
        for shift, p in zip(SHIFTS, CLASSES, strict=True)
    ]
    expected = torch.stack(terms).logsumexp(0) + dist.Normal(0.0, 1.0).log_prob(code[:, 0])
    torch.testing.assert_close(log_prob, expected)


def global_mixture(x):
    with pyro.plate("components", 2):
        means = pyro.sample("means", dist.Normal(x.new_zeros(()), 3.0))
    with pyro.plate("cases", len(x)):
        kind = pyro.sample("kind", dist.Categorical(CLASSES))
        pyro.sample("x", dist.Normal(means[kind], 1.0), obs=x)


def on_grid(model, row: Tensor, name: str, values: Tensor) -> Tensor:
    """Return the log joint density of copies of a row at the values of a site, (number,)."""
    rows = tile_batch(row, len(values))
    return log_density(score_latents(model, {name: values}, rows), rows)


def test_means_of_a_mixture_have_the_exact_evidence_by_enumeration():
    x = torch.tensor([-1.0, 0.5, 2.5], dtype=torch.float64)
    model, row = as_model(global_mixture, x)
    line = torch.linspace(-25, 25, 501, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    joint = torch.cat([on_grid(model, row, "means", part) for part in grid.split(50_000)])
    log_evidence = joint.logsumexp(0) + 2 * math.log(line[1] - line[0])
    total = []
    for kinds in torch.cartesian_prod(*[torch.arange(2)] * 3):
        of = torch.nn.functional.one_hot(kinds, 2).double()
        covariance = 9 * of @ of.T + torch.eye(3)
        distribution = torch.distributions.MultivariateNormal(torch.zeros(3).double(), covariance)
        total.append(CLASSES[kinds].log().sum() + distribution.log_prob(x))
    torch.testing.assert_close(log_evidence, torch.stack(total).logsumexp(0), atol=1e-6, rtol=0)


def heavy(y):
    slope = pyro.sample("slope", dist.Cauchy(y.new_zeros(()), 1.5))
    pyro.sample("y", dist.Normal(slope, 0.7), obs=y)


def test_a_heavy_tailed_prior_has_the_evidence_of_the_voigt_profile():
    y = torch.tensor(6.0, dtype=torch.float64)
    model, row = as_model(heavy, y)
    values = torch.linspace(-10, 22, 20_001, dtype=torch.float64)
    log_evidence = on_grid(model, row, "slope", values).logsumexp(0) + math.log(
        values[1] - values[0]
    )
    assert log_evidence.item() == pytest.approx(math.log(voigt_profile(6.0, 0.7, 1.5)), abs=1e-6)


def schools(errors, y=None):
    mean = pyro.sample("mean", dist.Normal(errors.new_zeros(()), 5.0))
    spread = pyro.sample("spread", dist.HalfCauchy(errors.new_tensor(5.0)))
    with pyro.plate("schools", len(errors)):
        effect = pyro.sample("effect", dist.Normal(mean, spread))
        pyro.sample("y", dist.Normal(effect, errors), obs=y)


def test_eight_schools_have_their_joint_density():
    """And, effects integrated, the evidence -31.3113 by quadrature; see `zoo/examine`."""
    y, errors = 10 * double(6, 8), 10 + double(7, 8).abs()
    model, row = as_model(schools, errors, observed={"y": y})
    assert not model.by_row and row.shape == (1, 8)
    mean, spread, effect = double(8, 3, 1), double(9, 3, 1).exp(), double(10, 3, 8)
    values = {"mean": mean, "spread": spread, "effect": effect}
    log_joint = log_density(score_latents(model, values, tile_batch(row, 3)), tile_batch(row, 3))
    expected = dist.Normal(0.0, 5.0).log_prob(mean) + dist.HalfCauchy(5.0).log_prob(spread)
    expected = expected + dist.Normal(mean, spread).log_prob(effect).sum(1, keepdim=True)
    expected = expected + dist.Normal(effect, errors).log_prob(y).sum(1, keepdim=True)
    torch.testing.assert_close(log_joint, expected[:, 0])


def covariates(x, y):
    with pyro.plate("cases", len(x)):
        offset = pyro.sample("offset", dist.Normal(x.new_zeros(()), 1.0))
        pyro.sample("y", dist.Normal(offset + x[:, 0], 0.5), obs=y)
        pyro.sample("count", dist.Poisson((x[:, 1] + 1).exp()), obs=y.abs().round())


def test_rows_keep_their_covariates_and_all_observed_sites():
    x, y = double(11, 4, 2), double(12, 4)
    model, rows = as_model(covariates, x, y)
    assert model.by_row and set(model.space.sites) == {"y", "count"}
    parts = dist.Normal(x[:, 0], (1 + 0.25) ** 0.5).log_prob(y)
    parts = parts + dist.Poisson((x[:, 1] + 1).exp()).log_prob(y.abs().round())
    np.testing.assert_allclose(evidence(covariates, x, y), parts, atol=1e-6)
    new_x, new_y = double(13, 2, 2), double(14, 2)
    new = model.rows_of(new_x, new_y)
    assert new.shape == (2, rows.shape[1])
    drawn = model(batch_size=6)
    covered = next(part.columns for part in model.space.parts if part.site is None)
    torch.testing.assert_close(drawn[:4, covered], rows[:, covered])
    torch.testing.assert_close(drawn[4:, covered], rows[:2, covered])


def mixing(x):
    with pyro.plate("cases", len(x)):
        code = pyro.sample("code", dist.Normal(x.new_zeros(()), 1.0))
        pyro.sample("x", dist.Normal(code - code.mean(), 1.0), obs=x)


def test_a_program_whose_rows_depend_on_each_other_is_one_row():
    model, rows = as_model(mixing, X[:, 0])
    assert not model.by_row and rows.shape == (1, 7)


def empirical(x):
    """A prior that all rows make, which matters little next to a likelihood of little noise."""
    with pyro.plate("cases", len(x)):
        code = pyro.sample("code", dist.Normal(x.mean(0), 2.0).to_event(1))
        pyro.sample("x", dist.Normal(code, 0.001).to_event(1), obs=x)


def limited(x):
    """The same, where a draw of the prior gives the data the density 0."""
    with pyro.plate("cases", len(x)):
        limit = pyro.sample("limit", dist.Gamma(2.0, 1 / x.mean()))
        pyro.sample("x", dist.Uniform(0.0, limit), obs=x)


@pytest.mark.parametrize(("program", "x"), [(empirical, X.float()), (limited, X.abs()[:, 0])])
def test_rows_that_share_a_prior_of_the_data_are_one_row(program, x):
    assert not as_model(program, x)[0].by_row


def spread_out(x):
    with pyro.plate("cases", len(x)):
        offset = pyro.sample("offset", dist.Normal(x.new_zeros(()), 2.0))
        pyro.sample("x", dist.Normal(offset, 0.5), obs=x)


def test_a_reparametrized_site_is_no_data():
    program = poutine.reparam(spread_out, config={"offset": LocScaleReparam(0.0)})
    model, rows = as_model(program, X[:, 0])
    assert model.by_row and rows.shape == (7, 1) and [*model.space.sites] == ["x"]
    expected = dist.Normal(0.0, math.hypot(2.0, 0.5)).log_prob(X[:, 0])
    guide = gauss_newton(model, None, rows, steps=2)
    idata = evaluate(model, guide, rows, num_particles=2)
    np.testing.assert_allclose(log_mean(pooled_log_weight(idata)), expected, atol=1e-6)
    assert idata.attrs["bound_on"] == "log p(x)"


def spike_and_slab(x):
    with pyro.plate("features", 2):
        on = pyro.sample("on", dist.Bernoulli(x.new_tensor(0.3)))
        slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("cases", 7):
        pyro.sample("x", dist.Normal((on * slope).sum(-1), 1.0), obs=x)


def test_a_switch_before_a_number_in_one_plate_is_annealed():
    """Against the sum over both switches: x is normal given how many of them are on."""
    x = X[:, 0]
    total = -math.inf
    for switches, weight in ((0, 0.49), (1, 0.42), (2, 0.09)):
        covariance = torch.eye(7, dtype=torch.float64) + switches
        normal = dist.MultivariateNormal(x.new_zeros(7), covariance)
        total = np.logaddexp(total, math.log(weight) + normal.log_prob(x).item())
    idata = annealed_log_likelihood(
        spike_and_slab, None, x, chains=64, temperatures=60, simulated=0
    )
    assert annealed_bounds(idata)["lower"] == pytest.approx(total, abs=0.5)


FACTOR = torch.linalg.cholesky(torch.eye(5, dtype=torch.float64) + 0.3)


def correlated_noise(x):
    with pyro.plate("cases", len(x)):
        code = pyro.sample("code", dist.Normal(x.new_zeros(()), 1.0))
        mean = code[:, None].expand(x.shape)
        pyro.sample("x", dist.MultivariateNormal(mean, scale_tril=FACTOR), obs=x)


def test_rows_may_share_a_covariance():
    model, rows = as_model(correlated_noise, X)
    code = double(31, 7)
    mean = code[:, None].expand(X.shape)
    expected = dist.MultivariateNormal(mean, FACTOR @ FACTOR.T).log_prob(X)
    expected = expected + dist.Normal(0.0, 1.0).log_prob(code)
    assert model.by_row
    marginal_covariance = FACTOR @ FACTOR.T + 1.0  # the code adds its variance to every pair
    exact = dist.MultivariateNormal(X.new_zeros(5), marginal_covariance).log_prob(X)
    np.testing.assert_allclose(evidence(correlated_noise, X), exact, atol=1e-6)
    torch.testing.assert_close(
        log_density(score_latents(model, {"code": code[:, None]}, rows), rows), expected
    )


def stretched(scale):
    return dist.TransformedDistribution(dist.Normal(0.0, 1.0), [AffineTransform(0.0, scale)])


@pytest.mark.parametrize(
    "prior, likelihood",
    [
        (dist.InverseGamma(3.0, 1.0), lambda scale: dist.Normal(0.0, scale)),
        (dist.Gamma(2.0, 1.0), lambda scale: dist.Gumbel(0.0, scale)),
        (dist.Gamma(2.0, 1.0), lambda scale: dist.Kumaraswamy(scale, 2.0)),
        (dist.Gamma(2.0, 1.0), stretched),
    ],
)
def test_transformed_distributions_have_their_density_for_several_rows(prior, likelihood):
    y = torch.rand(6, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1

    def program(y):
        scale = pyro.sample("scale", prior)
        with pyro.plate("cases", len(y)):
            pyro.sample("y", likelihood(scale), obs=y)

    model, row = as_model(program, y)
    scale, rows = torch.tensor([[0.5], [1.0], [2.5]]), tile_batch(row, 3)
    log_joint = log_density(score_latents(model, {"scale": scale}, rows), rows)
    expected = prior.log_prob(scale)[:, 0] + likelihood(scale).log_prob(y).sum(1)
    torch.testing.assert_close(log_joint, expected)


def read_outside(x):
    with pyro.plate("parts", 3):
        part = pyro.sample("part", dist.Bernoulli(x.new_tensor(0.3)))
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 1.0))
    pyro.sample("x", dist.Normal(part.sum(-1), scale), obs=x)


def test_a_discrete_site_that_is_read_outside_of_its_plate_is_not_summed_out():
    """Pyro's sum over it would be wrong, without an error."""
    model, _ = as_model(read_outside, X[0, 0])
    assert [site.name for site in model.sites if site.enumerated] == []


def unobserved():
    pyro.sample("z", dist.Normal(0.0, 1.0))


def counted(x):
    count = pyro.sample("count", dist.Poisson(3.0))
    pyro.sample("x", dist.Normal(count, 1.0), obs=x)


def factored(x):
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.factor("penalty", -(z**2))
    pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def subsampled(x):
    with pyro.plate("cases", len(x), subsample_size=2) as index:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x[index])


def undeclared(x):
    z = pyro.sample("z", dist.Normal(torch.zeros(5), 1.0))
    pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=x)


def branching(x):
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(z if z > 0 else -z, 1.0), obs=x)


def scaled(x):
    with poutine.scale(scale=0.5):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def masked(x):
    with pyro.plate("cases", len(x)), poutine.mask(mask=x > 0):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def partly_masked(x):
    with pyro.plate("cases", len(x)):
        z = pyro.sample("z", dist.Normal(x.new_zeros(2), 1.0).mask(False).to_event(1))
        pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x)


def of_other_totals(x):
    with pyro.plate("cases", len(x)):
        z = pyro.sample("z", dist.Binomial(torch.arange(len(x)).to(x), 0.5))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def observed_in_part(x):
    with pyro.plate("cases", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x, obs_mask=x > 0)


def correlated(x):
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.MultivariateNormal(z * torch.ones(2), torch.eye(2)), obs=x)


def exact(x):
    pyro.sample("x", dist.Normal(0.0, 1.0).expand(x.shape).to_event(1), obs=x)


def mismatched(x):
    weights = pyro.sample("weights", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("x", dist.Normal(torch.ones(7, 3) @ weights, 1.0).to_event(1), obs=x)


def negative(x):
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(z, -1.0 * torch.ones(7)).to_event(1), obs=x)


def gray(x, validate=None):
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Bernoulli(logits=z, validate_args=validate), obs=x)


REFUSED = {
    "a class": (lambda: as_model(Linear, X), "not the class Linear"),
    "no function": (lambda: as_model("components", X), "must be a function or a module"),
    "too few arguments": (lambda: as_model(components), "cannot be called.*'x'"),
    "an unknown name": (
        lambda: as_model(components, X, observed={"xx": X}),
        "'xx', which is neither an argument nor a site.*'code', 'x'",
    ),
    "data without names": (lambda: as_model(schools, X, observed=X), 'must be {"site": values}'),
    "an error of its own": (lambda: as_model(components, "text"), "cannot run on these data"),
    "nothing observed": (lambda: as_model(unobserved), "observes no site.*obs="),
    "nothing latent": (lambda: as_model(exact, X[0]), "no latent site"),
    "countless values": (lambda: as_model(counted, X[0, 0]), "'count'.*Poisson.*Categorical"),
    "a factor": (lambda: as_model(factored, X[0, 0]), "'penalty'.*pyro.factor.*obs="),
    "subsampling": (lambda: as_model(subsampled, X[:, 0]), "'cases'.*2 of 7.*subsample_size"),
    "a batch without a plate": (lambda: as_model(undeclared, X[0]), r"'z'.*of 5.*to_event\(1\)"),
    "an error after a site": (
        lambda: as_model(mismatched, X[:, 0]),
        "mismatched .*after site 'weights' .RuntimeError: size mismatch.* call mismatched itself",
    ),
    "a negative scale": (
        lambda: as_model(negative, X[:, 0]),
        r"after site 'z' .*parameter scale \(Tensor of shape \(7,\)\) of distribution Normal to",
    ),
    "the site before a branch": (
        lambda: as_model(branching, X[0, 0]),
        "after site 'z' .*data-dependent control flow.; write branches",
    ),
    "values that are not drawn": (
        lambda: as_model(gray, torch.tensor(0.25)),
        "'x' of gray observes values that Bernoulli does not draw, such as 0.25; .*Boolean",
    ),
    "a scale": (lambda: as_model(scaled, X[0, 0]), "'z'.*poutine.scale.*leave it out"),
    "a masked latent": (lambda: as_model(masked, X[:, 0]), "'z'.*under a mask.*observed sites"),
    "a part of a latent": (lambda: as_model(partly_masked, X[:, 0]), "'z'.*latent under a mask"),
    "totals": (lambda: as_model(of_other_totals, X[:, 0]), "'z'.*Binomial, whose values differ"),
    "a mask of data": (lambda: as_model(observed_in_part, X[:, 0]), "'x_unobserved'.*by NaN"),
    "infinite data": (lambda: as_model(components, X / 0), "'x'.*not finite"),
    "a part of an event": (
        lambda: as_model(correlated, torch.tensor([1.0, math.nan])),
        "'x'.*MultivariateNormal.*a part cannot be missing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_refused_in_one_line(name):
    call, message = REFUSED[name]
    with pytest.raises(UnservedProgram, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    report = "".join(traceback.format_exception(caught.value))
    assert "Trace Shapes" not in report and "Param Sites" not in report


def test_values_that_a_program_allows_by_itself_are_taken():
    model, rows = as_model(gray, torch.tensor(0.25), False)
    assert model.space.sites == ("x",) and rows.tolist() == [[0.25]]


def parametrized(x):
    scale = pyro.param("scale", torch.tensor(2.0).double(), constraint=dist.constraints.positive)
    with pyro.plate("cases", len(x)):
        code = pyro.sample("code", dist.Normal(x.new_zeros(()), scale))
        pyro.sample("x", dist.Normal(code, 1.0), obs=x)


def test_parameters_have_their_trained_values_and_everything_stays_as_it_was():
    pyro.get_param_store().clear()
    x = X[:, 0]
    fresh, _ = as_model(parametrized, x)
    assert not list(pyro.get_param_store())  # a program that never ran leaves nothing behind
    pyro.param("scale", torch.tensor(3.0).double(), constraint=dist.constraints.positive)
    held = pyro.get_param_store().get_state()["params"]["scale"].clone()
    module = Linear().eval()
    module.inner.train()
    state = torch.get_rng_state()
    model, rows = as_model(parametrized, x)
    as_model(module, double(3, 6, 2), observed={"y": double(4, 6)})
    assert torch.equal(torch.get_rng_state(), state) and pyro.distributions.is_validation_enabled()
    assert not module.training and module.inner.training
    assert list(pyro.get_param_store()) == ["scale"]
    assert torch.equal(pyro.get_param_store().get_state()["params"]["scale"], held)
    for program_model, scale in ((fresh, 2.0), (model, 3.0)):
        guide = gauss_newton(program_model, None, rows, steps=2)
        log_evidence = log_mean(
            pooled_log_weight(evaluate(program_model, guide, rows, num_particles=2))
        )
        expected = dist.Normal(0.0, (scale**2 + 1) ** 0.5).log_prob(x)
        np.testing.assert_allclose(log_evidence, expected, atol=1e-6)


def test_missing_covariates_are_refused():
    x = double(3, 6, 2)
    x[2, 1] = math.nan
    with pytest.raises(UnservedProgram, match=r"'y'.*NaN may mark observed values alone"):
        as_model(covariates, x, double(4, 6))
