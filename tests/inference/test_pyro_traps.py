"""Pyro's traps: each is shown in Pyro, followed by the zoo's remedy."""

import math
import warnings

import arviz
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import nn
from toys import BernoulliMixture, Conjugate, LinearGuide, NoGuide, binary_images, conjugate_images

from capsule_zoo.inference import (
    Checks,
    IncompatibleGuide,
    check_pair,
    evaluate,
    fit,
    is_bound,
    log_weights,
    summarize,
)
from capsule_zoo.inference.isolation import isolated_parameters


class Plain(PyroModule):
    """A guide of toys.Conjugate whose module has no name: two of them share a parameter."""

    def __init__(self):
        super().__init__()
        self.location = nn.Parameter(torch.zeros(()))

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("code", dist.Normal(self.location, 0.3))


# 1. A PyroModule class instantiated twice shares its parameters by name.


def test_the_second_plain_module_never_trains():
    model, images = Conjugate(), conjugate_images(4, torch.float32)
    moved = []
    for guide in (Plain(), Plain()):
        SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=Trace_ELBO()).step(images)
        moved.append(guide.location.item() != 0)
    assert moved == [True, False]


@pytest.mark.parametrize("way", ["svi", "module"])
def test_the_second_zoo_module_trains_both_ways(way):
    model, images = Conjugate(), conjugate_images(4, torch.float32)
    for guide in (LinearGuide(model), LinearGuide(model)):
        start = guide.offset
        if way == "svi":
            SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=Trace_ELBO()).step(images)
        else:
            module = Trace_ELBO()(model, guide)
            optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
            module(images).backward()
            optimizer.step()
        assert guide.offset is start and start.item() != 0


def test_the_second_plain_module_trains_under_fit():
    model, images = Conjugate(), conjugate_images(4, torch.float32)
    for guide in (Plain(), Plain()):
        start = guide.location
        fit(model, guide, images, steps=1, checks=Checks(progress=False))
        assert guide.location is start and start.item() != 0


def test_a_plain_module_never_trains_again_after_the_store_was_loaded(tmp_path):
    """The zoo's remedy is tested in test_param_store.py."""
    model, images, guide = Conjugate(), conjugate_images(4, torch.float32), Plain()
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=Trace_ELBO())
    svi.step(images)
    pyro.get_param_store().save(tmp_path / "store.pt")
    pyro.get_param_store().load(tmp_path / "store.pt")
    before = guide.location.item()
    svi.step(images)
    assert guide.location.item() == before  # nothing reads what the optimizer holds


def test_the_store_unfreezes_what_enters_it():
    guide, images = Plain(), conjugate_images(4, torch.float32)
    guide.location.requires_grad_(False)
    guide(images)
    assert guide.location.requires_grad  # Pyro's doing
    guide.location.requires_grad_(False)
    pyro.clear_param_store()
    with isolated_parameters(guide) as refreeze:
        guide(images)
        refreeze()
        assert not guide.location.requires_grad
    assert not guide.location.requires_grad


# 2. An enumerated site in a vectorized plate that is read outside gives a wrong ELBO.


class Pair(PyroModule):
    """A model of two coins per image, summed out, and an image that depends on their sum."""

    def __init__(self, correct):
        super().__init__()
        self.correct = correct

    def forward(self, images=None, labels=None, batch_size=1):
        infer = {"enumerate": "parallel"}
        with pyro.plate("images", len(images), dim=-2 + self.correct):
            if self.correct:
                left = pyro.sample("left", dist.Bernoulli(0.3), infer=infer)
                right = pyro.sample("right", dist.Bernoulli(0.3), infer=infer)
                number = left + right
            else:
                with pyro.plate("coins", 2, dim=-1):
                    number = pyro.sample("coin", dist.Bernoulli(0.3), infer=infer).sum(-1, True)
            pixels = images if self.correct else images[:, None]
            pyro.sample("image", dist.Normal(number, 0.5), obs=pixels)


def coins_by_hand(images):
    sums = torch.tensor([0.0, 1.0, 2.0])
    distribution = torch.tensor([0.49, 0.42, 0.09]).log()
    return torch.logsumexp(distribution + dist.Normal(sums, 0.5).log_prob(images[:, None]), 1)


def test_an_enumerated_plate_read_outside_is_silently_wrong():
    images = torch.tensor([0.2, 1.7])
    guide = NoGuide(Pair(correct=True))
    exact = coins_by_hand(images).sum().item()
    right = TraceEnum_ELBO(max_plate_nesting=1).loss(Pair(correct=True), guide, images)
    wrong = TraceEnum_ELBO(max_plate_nesting=2).loss(Pair(correct=False), guide, images)
    assert -right == pytest.approx(exact, abs=1e-5)
    assert abs(-wrong - exact) > 0.1


def test_the_zoo_sums_out_what_stands_in_its_own_plate():
    images = torch.tensor([0.2, 1.7])
    with torch.no_grad():
        log_weight, _, _ = log_weights(Pair(correct=True), NoGuide(Pair(correct=True)), images)
    torch.testing.assert_close(log_weight, coins_by_hand(images))


# 3. RenyiELBO weights the whole batch unless every site sits in the images plate.


class Unplated(PyroModule):
    """A guide whose codes are one event of the whole batch instead of a plate."""

    def forward(self, images, labels=None):
        distribution = dist.Normal(torch.zeros(len(images), dtype=images.dtype), 0.5)
        pyro.sample("code", distribution.to_event(1))


class UnplatedModel(PyroModule):
    def forward(self, images, labels=None):
        zero = torch.zeros(len(images), dtype=images.dtype)
        code = pyro.sample("code", dist.Normal(zero, 1.0).to_event(1))
        mean = code[:, None, None, None].expand_as(images)
        pyro.sample("image", dist.Normal(mean, 0.5).to_event(4), obs=images)


def test_importance_weights_are_pooled_over_the_batch_by_pyro_and_per_image_here():
    images = conjugate_images(40)
    model = Conjugate().double()
    evidence = model.log_evidence(images).mean().item()

    class Broad(LinearGuide):
        def forward(self, images, labels=None):
            with pyro.plate("images", len(images), dim=-1):
                zero = torch.zeros(len(images), dtype=images.dtype)
                pyro.sample("code", dist.Normal(zero, 0.5))

    renyi = RenyiELBO(alpha=0, num_particles=200, vectorize_particles=False)
    pooled = -renyi.loss(UnplatedModel(), Unplated(), images) / len(images)
    iwae = summarize(evaluate(model, Broad(model), images, num_particles=200))["iwae"]
    assert pooled < evidence - 0.1  # one weight for 40 images: hardly better than the ELBO
    assert iwae == pytest.approx(evidence, abs=0.05)


def test_a_site_that_belongs_to_no_image_is_refused_here():
    with pytest.raises(ValueError, match="outside the plate 'images'"):
        log_weights(UnplatedModel(), Unplated(), conjugate_images(3))


# 4. TraceMeanField_ELBO drops the log density of Delta sites.


class Shifted(PyroModule):
    """A Delta that carries a log density of one nat."""

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("code", dist.Delta(images.sum((1, 2, 3)), torch.ones(len(images))))


def test_mean_field_drops_the_density_of_a_delta():
    model, images = Conjugate(), conjugate_images(5, torch.float32)
    whole = Trace_ELBO().loss(model, Shifted(), images)
    dropped = TraceMeanField_ELBO().loss(model, Shifted(), images)
    assert whole - dropped == pytest.approx(5.0, abs=1e-4)
    assert not is_bound(TraceMeanField_ELBO())
    with torch.no_grad():
        log_weight, _, _ = log_weights(model, Shifted(), images)
    assert -log_weight.sum().item() == pytest.approx(whole, abs=1e-4)


# 5. RelaxedBernoulli saturates in float32; logit space does not.


def test_relaxed_bernoulli_saturates_and_its_logits_do_not():
    temperature, logits = torch.tensor(0.1), torch.full((200_000,), 1.0)
    distribution = torch.distributions.RelaxedBernoulli(temperature, logits=logits)
    drawn = distribution.sample()
    assert (drawn >= 1 - 2e-7).any()  # the clamp, where the density is wrong
    base = distribution.base_dist
    value = base.rsample()
    assert torch.isfinite(value).all() and torch.isfinite(base.log_prob(value)).all()
    assert value.max() > math.log(1 / 1.2e-7)  # beyond what (0, 1) can tell from 1


# 6. poutine.scale with a tensor, or below an enumerated site, raises.


def test_scaling_an_enumerated_model_by_a_tensor_raises_in_pyro():
    model, images = BernoulliMixture(), binary_images(3).float()
    scale = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises((ValueError, RuntimeError)):
        TraceEnum_ELBO(max_plate_nesting=1).loss(
            poutine.scale(model, scale=scale), NoGuide(model), images
        )


def test_scaling_the_whole_block_by_a_number_works():
    model, images = BernoulliMixture(), binary_images(3).float()
    loss = TraceEnum_ELBO(max_plate_nesting=1)
    plain = loss.loss(model, NoGuide(model), images)
    scaled = loss.loss(poutine.scale(model, scale=0.5), NoGuide(model), images)
    assert scaled == pytest.approx(plain / 2, rel=1e-5)


# 7. AutoGuides need the enumerated sites hidden, and one call before load_state_dict.


class Both(Conjugate):
    """A model with a continuous code and a kind that is summed out."""

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", len(images), dim=-1):
            code = pyro.sample("code", dist.Normal(self.mean, 1.0))
            distribution = dist.Categorical(torch.ones(2, dtype=images.dtype))
            kind = pyro.sample("kind", distribution, infer={"enumerate": "parallel"})
            mean = (code + kind)[..., None, None, None].expand(*kind.shape[:-1], -1, 1, 2, 2)
            pyro.sample("image", dist.Normal(mean, 0.5).to_event(3), obs=images)


def test_autoguides_need_the_enumerated_sites_hidden():
    model, images = Both().double(), conjugate_images(3)
    with pytest.raises(IncompatibleGuide):
        check_pair(model, AutoNormal(model), images)
    guide = AutoNormal(poutine.block(model, hide=["kind"]))
    run = fit(
        model, guide, images, steps=100, lr=0.05, checks=Checks(progress=False), freeze="model"
    )
    assert run.history["loss"].iloc[-10:].mean() < run.history["loss"].iloc[:10].mean()


def test_autoguides_have_no_parameters_before_their_first_call_and_fit_resumes_them(tmp_path):
    model, images, path = Conjugate().double(), conjugate_images(3), tmp_path / "run.safetensors"
    trained = AutoNormal(model)
    assert not list(trained.parameters())
    fit(model, trained, images, steps=3, checks=Checks(checkpoint=path, progress=False))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        AutoNormal(model).load_state_dict(trained.state_dict())
    fresh = AutoNormal(model)
    fit(model, fresh, images, steps=3, checks=Checks(resume=path, progress=False))
    assert torch.equal(fresh.median()["code"], trained.median()["code"])


# 9. arviz's from_dict takes keywords before 1.0, and a nested dict from then on.


@pytest.mark.skipif(int(arviz.__version__.split(".")[0]) >= 1, reason="fixed in arviz 1.0")
def test_a_nested_dict_is_silently_misread_by_old_arviz():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        idata = arviz.from_dict({"sample_stats": {"log_weight": np.ones((1, 7, 5))}})
    assert "sample_stats" not in idata.groups()
