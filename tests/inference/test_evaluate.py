"""Evaluation is compared with evidence that is known in closed form."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from toys import (
    BernoulliMixture,
    Conjugate,
    ExactGuide,
    Labelaw,
    LabelFactor,
    LinearGuide,
    NoGuide,
    PointGuide,
    binary_images,
    conjugate_images,
    pair,
)

from capsule_zoo.data import Split
from capsule_zoo.guides.base import Guide
from capsule_zoo.inference import (
    IncompatibleGuide,
    check_pair,
    compare,
    evaluate,
    log_weights,
    summarize,
)
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
    seen = weights(idata)[0]
    error = seen.std(0) / math.sqrt(len(seen))
    assert ((seen.mean(0) - expected).abs() < 5 * error).all()  # false failure below 1e-5


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
                law = dist.Categorical(torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))
                kind = pyro.sample("kind", law, infer={"enumerate": "parallel"})
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
        seen, _, guide_trace = log_weights(model, Shift(model), images)
    shift = guide_trace.nodes["shift"]["value"]  # (images, 1)
    kinds = torch.arange(3)
    prior = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    pixels = dist.Normal(kinds + shift[..., None], 0.7).log_prob(images[:, 0, 0, :, None])
    inner = torch.logsumexp(prior + pixels, -1).sum(-1)
    zero = torch.zeros_like(shift)
    outer = dist.Normal(zero, 1.0).log_prob(shift) - dist.Normal(zero + 0.3, 0.8).log_prob(shift)
    torch.testing.assert_close(seen, inner + outer[:, 0], rtol=0, atol=1e-12)


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


def test_seeds_repeat_and_the_random_state_is_left_alone():
    model, guide = pair()
    images = conjugate_images(4)
    before = torch.get_rng_state()
    first, again, other = (evaluate(model, guide, images, seed=s) for s in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))


def test_chains_have_draws_of_their_own_and_the_first_is_that_of_one_chain():
    model, guide = pair()
    images = conjugate_images(4)
    one, three = (
        evaluate(model, guide, images, chains=n, seed=3).sample_stats["log_weight"] for n in (1, 3)
    )
    np.testing.assert_array_equal(one[0], three[0])
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (three[i] != three[j]).all()


def test_groups_and_attributes():
    model, guide = pair()
    images = conjugate_images(6)
    split = Split(images.float(), torch.zeros(6, dtype=torch.int64), "toy/test")
    idata = evaluate(model, guide, split, num_particles=9, draws=3, batch_size=12)
    assert idata.posterior["code"].dims[:3] == ("chain", "draw", "image")
    assert idata.posterior["code"].shape == (1, 3, 6)
    assert set(idata.posterior.data_vars) == {"code"}
    assert idata.posterior_predictive["pixels"].shape == (1, 3, 6, 1, 2, 2)
    np.testing.assert_allclose(idata.observed_data["pixels"].values, images, atol=1e-7)
    attributes = idata.attrs
    assert attributes["num_particles"] == 9 and attributes["seed"] == 0
    assert attributes["model"] == "Conjugate" and attributes["guide"] == "LinearGuide"
    assert attributes["data"] == "toy/test" and attributes["units"] == "nats per image"
    assert attributes["is_bound"] == 1 and attributes["pyro"] == pyro.__version__


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


@pytest.mark.parametrize(("guide", "bound"), [(AutoNormal, 1), (AutoDelta, 0)])
def test_autoguides_are_evaluated_on_their_own_images(guide, bound):
    model, _ = pair()
    images = conjugate_images(4)
    idata = evaluate(model, guide(model), images, num_particles=7, batch_size=2)
    assert weights(idata).shape == (1, 7, 4) and idata.attrs["is_bound"] == bound


def test_values_of_each_image_are_evaluated_together():
    model, _ = pair()
    images = conjugate_images(5)
    codes = torch.linspace(0, 1, 5).double()
    known = poutine.condition(model, {"code": codes})

    def guide(images, labels=None):
        """Draw nothing."""

    with pytest.raises(ValueError, match=r"\(2,\) here, not \(5,\)") as caught:
        evaluate(known, guide, images)
    assert "set guide.per_image = True" in caught.value.__notes__[0]
    guide.per_image = True
    idata = evaluate(known, guide, images.requires_grad_(), num_particles=3, batch_size=2)
    pixels = dist.Normal(codes[:, None], model.noise).log_prob(images.detach().flatten(1)).sum(1)
    expected = pixels + dist.Normal(model.mean, 1.0).log_prob(codes)
    torch.testing.assert_close(weights(idata)[0, 0], expected.detach())


def test_an_error_that_holds_the_number_of_images_by_chance_gets_no_note():
    model, _ = pair()

    def guide(images, labels=None):
        raise ValueError("the network takes 5 channels")

    with pytest.raises(ValueError, match="takes 5 channels") as caught:
        evaluate(model, guide, conjugate_images(5))
    assert not hasattr(caught.value, "__notes__")


def test_the_model_itself_is_no_guide():
    """Its weights were all 1, and the bound 0 nats."""
    model, _ = pair()
    with pytest.raises(IncompatibleGuide, match="'image' is observed in the guide"):
        evaluate(model, model, conjugate_images(2))


def test_a_guide_with_one_density_for_all_images_is_evaluated_on_one():
    model, _ = pair()
    images = conjugate_images(4)
    with pytest.raises(ValueError, match="one image at a time"):
        evaluate(model, AutoMultivariateNormal(model), images)
    summary = summarize(evaluate(model, AutoMultivariateNormal(model), images[:1]))
    assert summary["is_bound"] and math.isnan(summary["elbo_se"])


def test_the_weights_do_not_depend_on_how_many_draws_are_kept():
    model, guide = pair()
    images = conjugate_images(4)
    none, some = (evaluate(model, guide, images, draws=d, batch_size=8) for d in (0, 5))
    assert torch.equal(weights(none), weights(some))
    assert not hasattr(none, "posterior") and not hasattr(none, "observed_data")


class Switched(Conjugate):
    """A model that becomes another model when its presences are discrete."""

    def discretized(self):
        return self.sharing_parameters(noise=1.0)


@pytest.mark.parametrize("discrete", [True, False])
def test_headline_numbers_are_those_of_the_discrete_model(discrete):
    model = Switched().double()
    images = conjugate_images(5)
    used = model.discretized() if discrete else model
    idata = evaluate(model, ExactGuide(used), images, num_particles=3, discrete=discrete)
    torch.testing.assert_close(weights(idata)[0, 0], used.log_evidence(images).detach())


def test_pareto_shape_of_a_pareto_law():
    rng = np.random.default_rng(0)
    for shape in (0.3, 0.9):
        log_weight = np.log(rng.pareto(1 / shape, size=(20, 2000)) + 1)
        assert pareto_shape(log_weight).mean() == pytest.approx(shape, abs=0.1)
    assert np.isnan(pareto_shape(np.zeros((2, 5)))).all()


def test_a_tail_of_a_hundred_nats_is_heavy_in_every_precision():
    """Weights e^x of x ~ Exponential(60) have a Pareto law of shape 60, without a mean."""
    log_weight = np.random.default_rng(0).exponential(60, size=(20, 100))
    found = pareto_shape(log_weight)
    assert (found > 10).all() and np.isfinite(found).all()
    np.testing.assert_allclose(pareto_shape(log_weight.astype(np.float32)), found, rtol=1e-3)
    log_weight[:, 1:] = -708.3 - 1e-5 * np.arange(99)  # the least weights that are not yet 0
    assert np.isinf(pareto_shape(log_weight)).all()


def test_bad_input():
    model, guide = pair()
    images = conjugate_images(3)
    with pytest.raises(ValueError, match="num_particles must be at least 1"):
        evaluate(model, guide, images, num_particles=0)
    with pytest.raises(ValueError, match="images is an empty batch"):
        evaluate(model, guide, images[:0])
    with pytest.raises(IncompatibleGuide, match="'code' is missing"):
        evaluate(model, NoGuide(model), images)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"seed": 1.5}, "seed must be a whole number from 0"),
        ({"seed": 2**63}, "seed must be a whole number from 0"),
        ({"chains": 0}, "chains must be at least 1"),
        ({"num_particles": 2.5}, "num_particles must be a whole number, 1 or more"),
        ({"labels": torch.zeros(2, dtype=torch.int64)}, r"labels must be \(3,\), .*not \(2,\)"),
        ({"labels": torch.zeros(3)}, "labels must be integers.*float32"),
        ({"labels": torch.zeros(3, dtype=torch.bool)}, "labels must be integers.*bool"),
        ({"labels": ["a", "b", "c"]}, "labels must be a tensor.*not list; number classes"),
        ({"labels": 3}, "labels must be a tensor.*not int"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    model, guide = pair()
    with pytest.raises(ValueError, match=message):
        evaluate(model, guide, conjugate_images(3), **arguments)


def test_numpy_images_and_labels_are_those_of_tensors():
    model, guide = pair()
    images = conjugate_images(4)
    labels = np.arange(4)
    seen = evaluate(model, guide, images.numpy(), labels=labels, num_particles=3)
    assert torch.equal(weights(seen), weights(evaluate(model, guide, images, num_particles=3)))
    with pytest.raises(ValueError, match="divide bytes by 255"):
        evaluate(model, guide, np.zeros((2, 1, 2, 2), np.uint8))
    seen = evaluate(model, guide, images, labels=labels.tolist(), num_particles=3)
    assert torch.equal(weights(seen), weights(evaluate(model, guide, images, num_particles=3)))


def test_draws_under_autocast_are_kept():
    entry = create("vae", **small_settings("vae"))
    images = torch.rand(3, *entry.model.image_shape)
    with torch.autocast("cpu", torch.bfloat16):
        found = evaluate(entry.model, entry.guide, images, num_particles=2)
    assert found.posterior["image_code"].dtype == found.sample_stats.log_weight.dtype == np.float32
    for kind in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match="log weights round in 16 bits; call float"):
            evaluate(entry.model.to(kind), entry.guide.to(kind), images)


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
    check_pair(model, guide, images)
    table = compare({"function": (model, guide), "module": (model, linear)}, images)
    assert table.loc["module", "elbo_difference"] == pytest.approx(0, abs=1e-12)

    def program(images=None, labels=None):
        return model(images, labels)

    for one in (guide, linear):
        plain = evaluate(program, one, images, num_particles=6)
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


def test_a_model_of_labels_has_no_bound_without_labels():
    entry = create("cnn", **small_settings("cnn"))
    images, labels = torch.rand(4, *entry.model.image_shape), torch.tensor([0, 1, 1, 0])
    with pytest.raises(
        ValueError, match=r"ConvolutionalClassifier explains labels.*labels=.*error_rate"
    ):
        evaluate(entry.model, entry.guide, images)
    idata = evaluate(entry.model, entry.guide, images, labels=labels, num_particles=2)
    scores = entry.model.eval().scores(images).log_softmax(1)[torch.arange(4), labels]
    torch.testing.assert_close(weights(idata)[0, 1], scores.detach(), rtol=1e-5, atol=1e-5)
    assert idata.attrs["is_bound"] == 1 and idata.attrs["bound_on"] == "log p(label | image)"
    entry = create("matrix-capsules", **small_settings("matrix-capsules"))  # a loss, not a law
    images = torch.rand(4, *entry.model.image_shape)
    idata = evaluate(entry.model, entry.guide, images, labels=labels, num_particles=1)
    assert idata.attrs["is_bound"] == 0 and idata.attrs["not_a_bound"]


def test_a_site_outside_the_images_plate_is_refused():
    class Global(Conjugate):
        def forward(self, images=None, labels=None, batch_size=1):
            pyro.sample("tilt", dist.Normal(0.0, 1.0))
            return super().forward(images, labels, batch_size)

    class GlobalGuide(LinearGuide):
        def forward(self, images, labels=None):
            pyro.sample("tilt", dist.Normal(0.0, 1.0))
            super().forward(images, labels)

    model = Global().double()
    with pytest.raises(ValueError, match="'tilt' lies outside the plate 'images'"):
        evaluate(model, GlobalGuide(model).double(), conjugate_images(3))
