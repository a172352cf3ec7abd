"""Evaluation is compared with evidence that is known in closed form."""

import math
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoGuideList
from toys import (
    BernoulliMixture,
    Conjugate,
    ExactGuide,
    Labelaw,
    LabelFactor,
    NoGuide,
    PointGuide,
    binary_images,
    conjugate_images,
    pair,
)

from capsule_zoo.guides.base import Guide
from capsule_zoo.inference import evaluate, log_weights, summarize
from capsule_zoo.inference.evaluation.inference_data import pareto_shape
from capsule_zoo.models.base import Model
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.registry import create, small_settings


def weights(idata):
    return torch.from_numpy(idata.sample_stats["log_weight"].values)


def test_the_exact_posterior_weighs_every_draw_with_the_evidence():
    model, _ = pair()
    images = conjugate_images(12)
    idata = evaluate(model, ExactGuide(model), images, num_particles=30, batch_size=50)
    expected = model.log_evidence(images).expand(1, 30, 12)
    torch.testing.assert_close(weights(idata), expected, rtol=0, atol=1e-10)
    summary = summarize(idata)
    assert summary["elbo"] == pytest.approx(summary["iwae"], abs=1e-10)
    assert summary["ess"] == pytest.approx(30) and summary["pareto_k"] == 0


def test_elbo_is_the_evidence_less_the_divergence_to_the_posterior():
    model, guide = pair()
    images = conjugate_images(8)
    idata = evaluate(model, guide, images, num_particles=20_000)
    mean = guide.slope * images.sum((1, 2, 3)) + guide.offset
    posterior = torch.distributions.Normal(*model.posterior(images))
    divergence = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, guide.scale), posterior
    )
    expected = (model.log_evidence(images) - divergence).detach()
    log_weight = weights(idata)[0]
    error = log_weight.std(0) / math.sqrt(len(log_weight))
    assert ((log_weight.mean(0) - expected).abs() < 5 * error).all()  # false failure below 1e-5


def test_iwae_rises_with_the_number_of_draws_and_reaches_the_evidence():
    model, guide = pair()
    images = conjugate_images(200)
    evidence = model.log_evidence(images).mean().item()
    bounds = []
    for particles in (1, 10, 1000):
        summary = summarize(evaluate(model, guide, images, num_particles=particles))
        bounds.append(summary["iwae"])
        assert summary["elbo"] < evidence
    assert bounds[0] < bounds[1] < bounds[2] < evidence + 0.01
    assert bounds[2] == pytest.approx(evidence, abs=0.02)


def test_a_site_that_the_model_enumerates_is_summed_out_per_image():
    model, images = BernoulliMixture().double(), binary_images(11)
    idata = evaluate(model, NoGuide(model), images, num_particles=2)
    expected = model.log_evidence(images).expand(1, 2, 11)
    torch.testing.assert_close(weights(idata), expected, rtol=0, atol=1e-12)
    assert not hasattr(idata, "posterior_predictive")


class Parts(Model):
    """A model of two parts per image: each has a kind, summed out, and a value given the kind."""

    space = ImageSpace((1, 1, 2))
    plate_dims = {"images": -2, "parts": -1}

    def forward(self, images=None, labels=None, batch_size=1):
        size = batch_size if images is None else len(images)
        with pyro.plate("images", size, dim=-2):
            shift = pyro.sample("shift", dist.Normal(torch.zeros(1, dtype=torch.float64), 1.0))
            with pyro.plate("parts", 2, dim=-1):
                distribution = dist.Categorical(torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))
                kind = pyro.sample("kind", distribution, infer={"enumerate": "parallel"})
                value = None if images is None else images[:, 0, 0]
                pyro.sample("image", dist.Normal(kind + shift, 0.7), obs=value)


class Shift(Guide):
    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-2):
            pyro.sample("shift", dist.Normal(torch.full((1,), 0.3, dtype=torch.float64), 0.8))


@pytest.mark.parametrize("number", [1, 4])
def test_enumeration_inside_an_inner_plate_equals_brute_force(number):
    images = torch.rand(number, 1, 1, 2, dtype=torch.float64)
    model = Parts()
    with torch.no_grad():
        log_weight, _, guide_trace = log_weights(model, Shift(model), images)
    shift = guide_trace.nodes["shift"]["value"]  # (images, 1)
    kinds = torch.arange(3)
    prior = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    pixels = dist.Normal(kinds + shift[..., None], 0.7).log_prob(images[:, 0, 0, :, None])
    inner = torch.logsumexp(prior + pixels, -1).sum(-1)
    zero = torch.zeros_like(shift)
    outer = dist.Normal(zero, 1.0).log_prob(shift) - dist.Normal(zero + 0.3, 0.8).log_prob(shift)
    torch.testing.assert_close(log_weight, inner + outer[:, 0], rtol=0, atol=1e-12)


def test_the_batch_size_changes_nothing_but_the_draws():
    model, guide = pair()
    images = conjugate_images(7)
    exact = [
        weights(evaluate(model, ExactGuide(model), images, num_particles=5, batch_size=rows))
        for rows in (1, 3, 7, 14, 1000)
    ]
    for other in exact[1:]:
        torch.testing.assert_close(other, exact[0], rtol=0, atol=1e-12)
    shapes = {
        weights(evaluate(model, guide, images, num_particles=5, batch_size=r)).shape for r in (2, 9)
    }
    assert shapes == {(1, 5, 7)}


def test_chains_have_draws_of_their_own_and_the_first_is_that_of_one_chain():
    model, guide = pair()
    images = conjugate_images(4)
    one, three = (
        evaluate(model, guide, images, chains=n, seed=3).sample_stats["log_weight"] for n in (1, 3)
    )
    np.testing.assert_array_equal(one[0], three[0])
    neighbor = evaluate(model, guide, images, seed=4).sample_stats["log_weight"]
    assert len({row.tobytes() for row in (*three.values, neighbor.values[0])}) == 4


def test_the_kept_draws_belong_to_their_images_and_weights():
    model, guide = pair()
    images = conjugate_images(5)
    idata = evaluate(model, guide, images, num_particles=6, draws=6, batch_size=4)
    code = torch.from_numpy(idata.posterior["code"].values)[0]  # (draws, images)
    mean = guide.slope * images.sum((1, 2, 3)) + guide.offset
    joint = dist.Normal(0.0, 1.0).log_prob(code)
    joint = joint + dist.Normal(code[..., None], 0.5).log_prob(images.flatten(1)).sum(-1)
    expected = joint - dist.Normal(mean, guide.scale).log_prob(code)
    torch.testing.assert_close(weights(idata)[0], expected.detach(), rtol=0, atol=1e-10)


def test_a_point_is_no_bound_and_can_exceed_the_evidence():
    model, _ = pair()
    model.noise = 0.1
    guide = PointGuide(model).double()
    images = torch.full((3, 1, 2, 2), 0.5, dtype=torch.float64)
    with torch.no_grad():
        guide.slope.fill_(0.249)
    idata = evaluate(model, guide, images, num_particles=2)
    summary = summarize(idata)
    assert idata.attrs["is_bound"] == 0 and idata.attrs["point_sites"] == "code"
    assert math.isnan(summary["elbo"]) and math.isnan(summary["iwae"])
    assert summary["map_objective"] > model.log_evidence(images).mean().item() + 1


def test_values_of_each_image_are_evaluated_together():
    model, _ = pair()
    images = conjugate_images(5)
    codes = torch.linspace(0, 1, 5).double()
    conditional = poutine.condition(model, {"code": codes})

    def guide(images, labels=None):
        """Draw nothing."""

    with pytest.raises(ValueError, match=r"\(2,\) here, not \(5,\)") as caught:
        evaluate(conditional, guide, images)
    assert "set guide.per_image = True" in caught.value.__notes__[0]
    guide.per_image = True
    idata = evaluate(conditional, guide, images.requires_grad_(), num_particles=3, batch_size=2)
    pixels = dist.Normal(codes[:, None], model.noise).log_prob(images.detach().flatten(1)).sum(1)
    expected = pixels + dist.Normal(model.mean, 1.0).log_prob(codes)
    torch.testing.assert_close(weights(idata)[0, 0], expected.detach())


def test_the_weights_do_not_depend_on_how_many_draws_are_kept():
    model, guide = pair()
    images = conjugate_images(4)
    none, some = (evaluate(model, guide, images, draws=d, batch_size=8) for d in (0, 5))
    assert torch.equal(weights(none), weights(some))
    assert not hasattr(none, "posterior") and not hasattr(none, "observed_data")


class Switched(Conjugate):
    """A model that becomes another model when its presences are discrete."""

    def discretize(self):
        return self.sharing_parameters(noise=1.0)


@pytest.mark.parametrize("discrete", [True, False])
def test_headline_numbers_are_those_of_the_discrete_model(discrete):
    model = Switched().double()
    images = conjugate_images(5)
    used = model.discretize() if discrete else model
    idata = evaluate(model, ExactGuide(used), images, num_particles=3, discrete=discrete)
    torch.testing.assert_close(weights(idata)[0, 0], used.log_evidence(images).detach())


def test_pareto_shape_of_a_pareto_distribution():
    rng = np.random.default_rng(0)
    for shape in (0.3, 0.9):
        log_weight = np.log(rng.pareto(1 / shape, size=(20, 2000)) + 1)
        assert pareto_shape(log_weight).mean() == pytest.approx(shape, abs=0.1)
    assert np.isnan(pareto_shape(np.zeros((2, 5)))).all()


def test_a_tail_of_a_hundred_nats_is_heavy_in_every_precision():
    """Weights e^x of x ~ Exponential(60) have a Pareto distribution of shape 60, without a mean."""
    log_weight = np.random.default_rng(0).exponential(60, size=(20, 100))
    shapes = pareto_shape(log_weight)
    assert (shapes > 10).all() and np.isfinite(shapes).all()
    np.testing.assert_allclose(pareto_shape(log_weight.astype(np.float32)), shapes, rtol=1e-3)
    log_weight[:, 1:] = -708.3 - 1e-5 * np.arange(99)  # the least weights that are not yet 0
    assert np.isinf(pareto_shape(log_weight)).all()


def test_draws_under_autocast_are_kept():
    entry = create("vae", **small_settings("vae"))
    images = torch.rand(3, *entry.model.image_shape)
    with torch.autocast("cpu", torch.bfloat16):
        idata = evaluate(entry.model, entry.guide, images, num_particles=2)
    assert idata.posterior["image_code"].dtype == idata.sample_stats.log_weight.dtype == np.float32


def test_a_function_is_a_guide_with_the_parameters_that_it_has_learned():
    model, linear = pair()
    images = conjugate_images(5)
    slope = linear.slope.item()

    def guide(images, labels=None):
        learned = pyro.param("slope", torch.tensor(9.0, dtype=torch.float64))
        scale = pyro.param("scale", torch.ones((), dtype=torch.float64), dist.constraints.positive)
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("code", dist.Normal(learned * images.sum((1, 2, 3)), scale))

    guide(images)
    with torch.no_grad():
        pyro.param("slope").fill_(slope)
        pyro.get_param_store()["scale"] = linear.scale.detach()
    mean = pyro.param("mean", torch.tensor(5.0))  # of another program
    expected = weights(evaluate(model, linear, images, num_particles=6))
    idata = evaluate(model, guide, images, num_particles=6)
    torch.testing.assert_close(weights(idata), expected, rtol=0, atol=1e-12)
    assert idata.attrs["guide"] == "guide" and mean.item() == 5
    for one in (guide, linear):
        plain = evaluate(lambda images, labels=None: model(images), one, images, num_particles=6)
        torch.testing.assert_close(weights(plain), expected, rtol=0, atol=1e-12)


def test_attributes_say_what_was_bounded():
    images, labels = conjugate_images(3), torch.tensor([0, 1, 1])
    model = LabelFactor().double()
    assert evaluate(model, ExactGuide(model), images).attrs["is_bound"] == 1
    attrs = evaluate(model, ExactGuide(model), images, labels=labels).attrs
    assert attrs["is_bound"] == 0 and "labels enter as a factor" in attrs["not_a_bound"]
    model = Labelaw().double()
    guide = ExactGuide(model)
    attrs = evaluate(model, guide, images, labels=labels).attrs
    assert attrs["is_bound"] == 1 and attrs["bound_on"] == "log p(image, label)"
    assert attrs["not_a_bound"] == ""
    assert evaluate(model, guide, images).attrs["bound_on"] == "log p(image)"
    attrs = evaluate(*(poutine.scale(program, 9.0) for program in (model, guide)), images).attrs
    assert attrs["is_bound"] == 0
    assert attrs["not_a_bound"] == "densities are scaled, as by plates that subsample: code, image"


def two_numbers(images, labels=None, factor=0.0, named=False):
    with pyro.plate("images", len(images)):
        a = pyro.sample("a", dist.Normal(0.0, 0.1))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        mean = pyro.deterministic("mean", a + b) if named else a + b
        mean = mean[:, None, None, None].expand(images.shape)
        pyro.sample("image", dist.Normal(mean, 0.1).to_event(3), obs=images)
        if factor:
            pyro.factor("penalty", factor + 0 * a)


def guesses(images, labels=None, points=(), needless=False):
    with pyro.plate("images", len(images)):
        zero = images.new_zeros(len(images))
        if needless:
            pyro.sample("u", dist.Normal(zero, 100.0), infer={"is_auxiliary": True})
        for name in "ab":
            pyro.sample(name, dist.Delta(zero) if name in points else dist.Normal(zero, 1.0))


NO_BOUNDS = {
    "a needless draw": (two_numbers, partial(guesses, needless=True), "draws u"),
    "points": (two_numbers, partial(guesses, points="a"), "points at a"),
    "points next to it": (two_numbers, partial(guesses, points="ab", needless=True), "at a, b"),
    "a factor": (partial(two_numbers, factor=5.0), guesses, "penalty is a factor"),
}


@pytest.mark.parametrize("case", NO_BOUNDS)
def test_what_is_no_bound_is_called_none(case):
    model, guide, reason = NO_BOUNDS[case]
    attrs = evaluate(model, guide, torch.rand(2, 1, 2, 2), num_particles=2).attrs
    assert attrs["is_bound"] == 0 and reason in attrs["not_a_bound"]


def test_points_next_to_a_guide_of_other_sites_are_no_bound():
    guide = AutoGuideList(two_numbers)
    for kind, name in ((AutoDelta, "a"), (AutoDiagonalNormal, "b")):
        guide.append(kind(poutine.block(two_numbers, expose=[name])))
    images = torch.rand(1, 1, 2, 2)
    assert evaluate(two_numbers, guide, images, num_particles=2).attrs["is_bound"] == 0
    whole = AutoDiagonalNormal(two_numbers)
    assert evaluate(two_numbers, whole, images, num_particles=2).attrs["is_bound"] == 1


def test_a_deterministic_site_is_not_bounded():
    images = torch.rand(2, 1, 2, 2)
    attrs = evaluate(partial(two_numbers, named=True), guesses, images, num_particles=2).attrs
    assert attrs["is_bound"] == 1 and attrs["bound_on"] == "log p(image)"


def test_a_model_of_labels_is_weighed_by_the_density_of_labels():
    entry = create("cnn", **small_settings("cnn"))
    images, labels = torch.rand(4, *entry.model.image_shape), torch.tensor([0, 1, 1, 0])
    idata = evaluate(entry.model, entry.guide, images, labels=labels, num_particles=2)
    scores = entry.model.eval().scores(images).log_softmax(1)[torch.arange(4), labels]
    torch.testing.assert_close(weights(idata)[0, 1], scores.detach(), rtol=1e-5, atol=1e-5)
    assert idata.attrs["is_bound"] == 1 and idata.attrs["bound_on"] == "log p(label | image)"
    entry = create(
        "matrix-capsules", **small_settings("matrix-capsules")
    )  # a loss, not a distribution
    images = torch.rand(4, *entry.model.image_shape)
    idata = evaluate(entry.model, entry.guide, images, labels=labels, num_particles=1)
    assert idata.attrs["is_bound"] == 0 and idata.attrs["not_a_bound"]
