"""What Pyro shares, unfreezes, drops or lacks by itself does no harm here."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import nn
from toys import Conjugate, conjugate_images

from capsule_zoo.inference import Checks, IncompatibleGuide, check_pair, fit, is_bound, log_weights
from capsule_zoo.inference.isolation import isolated_parameters


class Plain(PyroModule):
    """A guide of toys.Conjugate whose module has no name: two of them share a parameter."""

    def __init__(self):
        super().__init__()
        self.location = nn.Parameter(torch.zeros(()))

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("code", dist.Normal(self.location, 0.3))


def test_the_second_plain_module_trains_under_fit():
    model, images = Conjugate(), conjugate_images(4, torch.float32)
    for guide in (Plain(), Plain()):
        start = guide.location
        fit(model, guide, images, steps=1, checks=Checks(progress=False))
        assert guide.location is start and start.item() != 0


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
