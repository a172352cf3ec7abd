"""Plain functions with `pyro.param` under `fit`: the parameters in Pyro's store are trained."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn
from torch.distributions import constraints
from toys import QUIET, LinearGuide, conjugate_images, fit, pair

from capsule_zoo.inference import CheckpointError, as_module, check_pair


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def model_function(images):
    mean = pyro.param("mean", number(0.0))
    with pyro.plate("images", len(images), dim=-1):
        code = pyro.sample("code", dist.Normal(mean, 1.0))
        means = code[:, None, None, None].expand(-1, 1, 2, 2)
        return pyro.sample("image", dist.Normal(means, 0.5).to_event(3), obs=images)


def guide_function(images, labels=None):
    slope = pyro.param("slope", number(0.1))
    offset = pyro.param("a.b", lambda: number(0.0))
    scale = pyro.param("scale", number(0.5), constraint=constraints.positive)
    with pyro.plate("images", len(images), dim=-1):
        pyro.sample("code", dist.Normal(slope * images.sum((1, 2, 3)) + offset, scale))


def same_pair():
    model, guide = pair()
    with torch.no_grad():
        guide.slope.fill_(0.1)
        guide.scale = number(0.5)
    return model, guide


@pytest.mark.parametrize("which", ["guide", "model and guide"])
def test_functions_train_as_modules_do(which):
    images = conjugate_images(40)
    model, guide = same_pair()
    expected = fit(model, guide, images, steps=12, **QUIET)
    program = same_pair()[0] if which == "guide" else model_function
    run = fit(program, guide_function, images, steps=12, **QUIET)
    assert list(run.history["loss"]) == list(expected.history["loss"])
    store = pyro.get_param_store()
    assert store["slope"].item() == guide.slope.item() != 0.1
    assert store["a.b"].item() == guide.offset.item() != 0
    assert store["scale"].item() == guide.scale.item() != 0.5
    assert ("mean" in store) == (which != "guide")


def test_the_trained_function_needs_no_wrapper_and_trains_on():
    images = conjugate_images(200)
    model, _ = pair()
    options = QUIET | {"freeze": "model", "schedule": "linear"}
    for rate in (0.05, 0.02):
        fit(model, guide_function, images, steps=100, **options | {"lr": rate})
    check_pair(model, as_module(guide_function, images), images)
    trace = poutine.trace(guide_function).get_trace(images)
    mean, scale = model.posterior(images)
    distribution = trace.nodes["code"]["fn"]
    torch.testing.assert_close(distribution.loc, mean, atol=0.05, rtol=0)
    torch.testing.assert_close(distribution.scale, scale, atol=0.05, rtol=0)


def test_freeze_and_resume_hold_for_functions(tmp_path):
    path, images = tmp_path / "run.safetensors", conjugate_images(40)
    options = QUIET | {"freeze": "model"}
    fit(model_function, guide_function, images, steps=9, **options)
    store = pyro.get_param_store()
    expected = {name: value.item() for name, value in store.items()}
    assert expected["mean"] == 0
    pyro.clear_param_store()
    fit(model_function, guide_function, images, steps=4, checkpoint=path, **options)
    pyro.clear_param_store()
    fit(model_function, guide_function, images, steps=9, resume=path, **options)
    assert {name: value.item() for name, value in store.items()} == expected
    with pytest.raises(CheckpointError, match="another guide"):
        model, _ = pair()
        fit(model_function, LinearGuide(model).double(), images, steps=9, resume=path, **options)


def test_a_module_registered_in_a_function_is_trained_in_place():
    torch.manual_seed(0)
    network = nn.Linear(4, 1).double()

    def guide(images):
        pyro.module("network", network)
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("code", dist.Normal(network(images.flatten(1))[:, 0], 0.3))

    before = network.weight.detach().clone()
    images = conjugate_images(40)
    model, _ = pair()
    run = fit(model, guide, images, steps=40, freeze="model", **QUIET | {"lr": 0.05})
    assert (network.weight != before).all()
    assert run.history["loss"].iloc[-5:].mean() < run.history["loss"].iloc[:5].mean() - 0.3


def test_handlers_over_modules_and_partial_functions_are_functions():
    images = conjugate_images(40)
    model, guide = same_pair()
    expected = fit(model, guide, images, steps=5, **QUIET)
    other, other_guide = same_pair()
    programs = poutine.block(other, hide=["nothing"]), functools.partial(other_guide)
    run = fit(*programs, images, steps=5, **QUIET)
    assert list(run.history["loss"]) == list(expected.history["loss"])
    assert other.mean.item() == model.mean.item() != 0
