"""Plain programs with guides that were made for them, in the functions that take models."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from test_programs import (
    LOADINGS,
    NOISE,
    X,
    components,
    components_by_pixel,
    components_together,
    covariates,
    double,
    marginal,
    parametrized,
    schools,
)

from capsule_zoo.inference import (
    Checks,
    auto_encoder,
    check_pair,
    classify,
    compare,
    encode,
    evaluate,
    fgsm,
    fill_in,
    fit,
    fit_guide,
    infer,
    intervene,
    log_weights,
    posterior_predictive,
    reconstruct,
)
from capsule_zoo.inference.annealing import annealed_log_likelihood
from capsule_zoo.inference.calibration import check_calibration
from capsule_zoo.inference.evaluation.summary import log_mean, pooled_log_weight
from capsule_zoo.inference.examination.program import UnservedProgram, as_model
from capsule_zoo.inference.posterior.gauss_newton import gauss_newton
from capsule_zoo.inference.posterior.refine import refine

SCHOOLS = {"errors": 10 + double(7, 8).abs(), "y": 10 * double(6, 8)}
NEW = {"y": 10 * double(8, 8)}
FIRST, SECOND = double(31, 1, 5), double(32, 1, 5)
QUICK: dict = dict(chains=3, temperatures=6, leapfrogs=2, simulated=2)


def components_of_images(x):
    """The components, in a plate with the name that the zoo gives to its own."""
    with pyro.plate("images", len(x)):
        code = pyro.sample("code", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(code @ LOADINGS, NOISE).to_event(1), obs=x)


def reversed_once(x):
    """A program whose single row has the shape of its argument, and other values."""
    code = pyro.sample("code", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    pyro.sample("x", dist.Normal(code @ LOADINGS, NOISE).to_event(1), obs=x.flip(1)[0])


def log_evidence(*arguments) -> np.ndarray:
    return log_mean(pooled_log_weight(evaluate(*arguments, num_particles=3)))


@pytest.mark.parametrize(
    "program", [components, components_by_pixel, components_together, components_of_images]
)
@pytest.mark.parametrize("by_name", [False, True])
def test_a_program_and_its_data_are_taken_in_place_of_model_and_rows(program, by_name):
    data = {"x": X} if by_name else X
    guide = fit_guide("gauss_newton", program, None, data, steps=5)
    expected = marginal(X).sum()[None] if program is components_together else marginal(X)
    np.testing.assert_allclose(log_evidence(program, guide, data), expected, atol=1e-6)
    rows = as_model(program, X)[1]
    np.testing.assert_allclose(log_evidence(program, guide, rows), expected, atol=1e-6)
    np.testing.assert_allclose(log_evidence(guide.model, guide, rows), expected, atol=1e-6)


@pytest.fixture(scope="module")
def encoder():
    return auto_encoder(schools, SCHOOLS["errors"], SCHOOLS["y"], steps=5)


@pytest.mark.parametrize("kind", ["free_form", "corrected", "low_rank", "mixture", "auto_normal"])
def test_every_kind_of_guide_is_fitted_to_a_program(encoder, kind):
    guide = fit_guide(kind, schools, encoder, SCHOOLS, steps=2)
    assert np.isfinite(log_evidence(schools, guide, SCHOOLS)).all()


def mixture(x):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("cases", len(x)):
        kind = pyro.sample("kind", dist.Categorical(weights))
        pyro.sample("x", dist.Normal(torch.tensor([-2.0, 0.0, 2.0])[kind], 1.0), obs=x)


def test_a_site_with_one_more_number_than_its_free_ones_is_corrected():
    x = torch.tensor([-2.2, 0.1, 1.0, 2.5]).repeat(5)
    encoder = auto_encoder(mixture, x, steps=3)
    guide = fit_guide("corrected", mixture, encoder, x, steps=0)
    assert guide.locs["weights"].shape[-1] == guide.log_scales["weights"].shape[-1] == 2
    same = [log_evidence(mixture, g, {"x": x}) for g in (encoder, guide)]
    np.testing.assert_allclose(*same, rtol=1e-5)
    better = fit_guide("corrected", mixture, encoder, x, steps=60, lr=0.05)
    assert better.refinement.end > better.refinement.start + 0.2


def mean_of_four(x):
    mean = pyro.sample("mean", dist.Normal(torch.zeros(()).double(), 1.0))
    pyro.sample("x", dist.Normal(mean, 1.0).expand([4]).to_event(1), obs=x)


def test_a_program_without_a_plate_has_an_encoder_of_its_scalar():
    x = double(33, 4)
    encoder = auto_encoder(mean_of_four, x, steps=3)
    exact = fit_guide("gauss_newton", mean_of_four, encoder, x, steps=5)
    expected = dist.MultivariateNormal(x.new_zeros(4), torch.eye(4).double() + 1).log_prob(x)
    np.testing.assert_allclose(log_evidence(mean_of_four, exact, x), [expected], atol=1e-6)


def test_points_of_a_program_are_widened(encoder):
    points = fit_guide("free_form", schools, encoder, SCHOOLS, steps=2, distribution="delta")
    wide = fit_guide("widened", schools, points, SCHOOLS, steps=2)
    assert evaluate(schools, wide, SCHOOLS, num_particles=2).attrs["is_bound"]


@pytest.mark.filterwarnings("ignore:lower is too low")  # of so few temperatures
@pytest.mark.parametrize("starts", ["encoder", "several", "prior"])
def test_a_program_is_annealed_as_its_model_is(encoder, starts):
    model, row = as_model(schools, SCHOOLS["errors"], SCHOOLS["y"])
    guide = {"encoder": encoder, "several": {"encoder": encoder}, "prior": None}[starts]
    expected = annealed_log_likelihood(model, guide, row, **QUICK)
    result = annealed_log_likelihood(schools, guide, SCHOOLS, **QUICK)
    for name in ("log_weight", "reverse_log_weight"):
        np.testing.assert_array_equal(result.sample_stats[name], expected.sample_stats[name])


def test_a_program_is_calibrated_and_compared_as_its_model_is(encoder):
    expected = check_calibration(encoder.model, encoder, 90, 15)
    assert torch.equal(check_calibration(schools, encoder, 90, 15).ranks, expected.ranks)
    row = encoder.model.rows_of(SCHOOLS["errors"], NEW["y"])
    expected = compare({"it": (encoder.model, encoder)}, row, num_particles=3)
    table = compare({"it": (schools, encoder)}, NEW, num_particles=3)
    assert table.loc["it", "elbo"] == expected.loc["it", "elbo"]
    old = compare({"it": (schools, encoder)}, SCHOOLS, num_particles=3)
    assert table.loc["it", "elbo"] != old.loc["it", "elbo"]


def test_an_encoder_is_trained_further_and_its_program_is_not():
    settings: dict = dict(steps=2, checks=Checks(progress=False))
    guide = auto_encoder(components, X, steps=2)
    before = guide.head.weight.clone()
    fit(components, guide, X, **settings)
    assert not torch.equal(guide.head.weight, before)
    pyro.get_param_store().clear()
    guide = auto_encoder(parametrized, X[:, 0], steps=2)
    with pytest.raises(UnservedProgram, match=r'parametrized stay as they are.*freeze="model"'):
        fit(parametrized, guide, X[:, 0], **settings)
    fit(parametrized, guide, X[:, 0], freeze="model", **settings)


def test_a_program_that_was_trained_since_is_refused():
    pyro.get_param_store().clear()
    guide = auto_encoder(parametrized, X[:, 0], steps=2)
    assert np.isfinite(log_evidence(parametrized, guide, X[:, 0])).all()
    pyro.param("scale", torch.tensor(3.0).double(), constraint=dist.constraints.positive)
    with pytest.raises(UnservedProgram, match=r"'scale' of parametrized has changed.*anew"):
        evaluate(parametrized, guide, X[:, 0])
    assert np.isfinite(log_evidence(guide.model, guide, guide.model.rows_of(X[:, 0]))).all()


def test_a_tensor_that_may_be_rows_or_an_argument_is_refused():
    guide = fit_guide("gauss_newton", reversed_once, None, FIRST, steps=5)
    expected = marginal(SECOND.flip(1))
    named = log_evidence(reversed_once, guide, {"x": FIRST})
    np.testing.assert_allclose(named, marginal(FIRST.flip(1)), atol=1e-6)
    assert abs(float(named[0] - expected[0])) > 0.1
    with pytest.raises(UnservedProgram, match="rows of reversed_once or its argument 'x'"):
        evaluate(reversed_once, guide, FIRST)


VERBS = {
    "encode": encode,
    "reconstruct": reconstruct,
    "posterior_predictive": lambda *pair: posterior_predictive(*pair, num_samples=2),
    "refine": lambda *pair: refine(*pair, steps=2).locs["code"],
    "gauss_newton": lambda *pair: gauss_newton(*pair, steps=2).locs["code"],
    "infer": lambda model, guide, data: infer(guide, data),
    "check_pair": check_pair,
}


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_program_and_its_data_are_taken_by_every_verb(name, whole):
    program = components_together if whole else components
    guide = auto_encoder(program, X, steps=3)
    rows = guide.model.rows_of(X)
    result = VERBS[name](program, guide, {"x": X})
    torch.testing.assert_close(result, VERBS[name](guide.model, guide, rows))


def test_weights_are_those_of_the_model_of_the_program():
    guide = fit_guide("gauss_newton", components, None, X, steps=5)
    torch.testing.assert_close(log_weights(components, guide, X)[0], marginal(X))


def test_programs_without_a_guide_are_fitted_by_the_fits_themselves():
    for fitted in (refine(components, None, X, steps=2), gauss_newton(components, None, X)):
        assert fitted.model.call.program is components


def test_reconstructions_are_the_means_given_the_inferred_latents():
    """Missing values are predicted, and the arguments of each row stay."""
    x = X.clone()
    x[1, 3] = x[4] = math.nan
    guide = auto_encoder(components, x, steps=3)
    expected = infer(guide, {"x": x}, seed=4)["code"][:, 0] @ LOADINGS
    torch.testing.assert_close(reconstruct(components, guide, x, seed=4), expected)
    x, y = double(11, 4, 2), double(12, 4)
    guide = auto_encoder(covariates, x, y, steps=3)
    some = {"x": x[2:], "y": y[2:]}
    predicted = reconstruct(covariates, guide, some)
    offset = infer(guide, some)["offset"].flatten()
    parts = {part.site or part.argument: part.columns for part in guide.model.space.parts}
    torch.testing.assert_close(predicted[:, parts["y"]].flatten(), offset + x[2:, 0])
    torch.testing.assert_close(predicted[:, parts["count"]].flatten(), (x[2:, 1] + 1).exp())
    torch.testing.assert_close(predicted[:, parts[0]], x[2:])


def test_new_data_are_drawn_given_the_inferred_latents():
    guide = fit_guide("gauss_newton", components, None, X, steps=5)
    drawn = posterior_predictive(components, guide, X, num_samples=400)
    covariance = (LOADINGS @ LOADINGS.T / NOISE**2 + torch.eye(2)).inverse()
    mean = X @ LOADINGS.T @ covariance / NOISE**2 @ LOADINGS
    spread = (LOADINGS.T @ covariance @ LOADINGS).diagonal() + NOISE**2
    assert ((drawn.mean(0) - mean) / (spread / 400).sqrt()).abs().max() < 4.5
    torch.testing.assert_close(drawn.var(0), spread.expand(7, 5), atol=0, rtol=0.35)


REFUSED = {
    "one of several data": (lambda g: evaluate(schools, g, NEW["y"]), "one tensor.*errors, y; giv"),
    "another name": (lambda g: evaluate(schools, g, {"z": X}), "images names 'z'.*errors, y"),
    "another program": (lambda g: evaluate(components, g, X), "for the program schools.*auto_enc"),
    "other sizes": (
        lambda g: evaluate(schools, g, {"errors": torch.ones(6), "y": torch.ones(6)}),
        "other sites or shapes",
    ),
    "nothing observed": (
        lambda g: fit_guide("free_form", schools, None, SCHOOLS["errors"]),
        'observes no site.*by name, {"site": values}',
    ),
    "a missing argument": (
        lambda g: fit_guide("free_form", schools, None, NEW),
        "cannot be called.*'errors'.*in order or by name",
    ),
    "no data": (
        lambda g: fit_guide("free_form", schools, None, "text"),
        "images must be the data of schools.*not a str",
    ),
    "another constant": (
        lambda g: evaluate(schools, g, {"errors": 2 * SCHOOLS["errors"]}),
        "errors of schools is a constant .*another value here.*a new guide",
    ),
    "no draws": (
        lambda g: check_calibration(schools, lambda x: None, 90, 15),
        "batch_size=90.*auto_encoder",
    ),
    "classes": (lambda g: classify(schools, g, SCHOOLS), "schools tells no classes"),
    "an attack": (lambda g: fgsm(schools, NEW["y"], 0.1, guide=g), "schools has no scores"),
    "hidden values": (
        lambda g: fill_in(schools, g, SCHOOLS),
        "schools observes no images .* NaN marks missing values, and reconstruct",
    ),
    "an action": (
        lambda g: intervene(schools, g, SCHOOLS, {"mean": 0.0}),
        "schools is a plain program; use pyro.do",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_refused_in_one_line(encoder, name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        call(encoder)
    assert "\n" not in str(caught.value)
