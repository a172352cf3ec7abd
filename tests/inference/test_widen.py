"""A widened guide is a bound, as tight as one scale per coordinate can make it."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from toys import Conjugate, PointGuide, conjugate_images

from capsule_zoo.guides import ConditionalEncoder
from capsule_zoo.guides.base import Guide
from capsule_zoo.inference import as_module, check_pair, evaluate, summarize
from capsule_zoo.inference.posterior.widen import Widened, widen
from capsule_zoo.models.base import Model
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.generative_capsnet import LogRelaxedOneHot
from capsule_zoo.registry import create, small_settings


def points():
    torch.manual_seed(1)
    model = Conjugate().double()
    return model, PointGuide(model).double()


def test_a_guide_that_was_used_before_can_be_widened_and_used_after():
    model, guide = points()
    images = conjugate_images(4)
    guide(images)
    widen(model, guide, images, steps=2)
    guide(images)
    assert model.mean.requires_grad and guide.slope.requires_grad


def test_the_running_statistics_of_the_guide_stay_as_they_are():
    pyro.set_rng_seed(0)
    entry = create("part-whole", **small_settings("part-whole"))
    before = {name: value.clone() for name, value in entry.guide.named_buffers()}
    assert any(name.endswith("running_mean") for name in before)
    images = torch.rand(8, *entry.model.image_shape)
    widened = widen(entry.model, entry.guide, images, steps=3)
    for name, value in widened.guide.named_buffers():
        assert torch.equal(value, before[name])


def test_the_fitted_bound_is_the_optimum_in_closed_form():
    model, guide = points()
    images = conjugate_images(300)
    before = guide.slope.item(), model.mean.item()
    widened = widen(model, guide, images, steps=300)
    assert (guide.slope.item(), model.mean.item()) == before  # the rest is frozen
    assert guide.slope.requires_grad and model.mean.requires_grad
    # For a Gaussian the best scale is the posterior's, wherever the center lies.
    mean, scale = model.posterior(images)
    assert widened.scale("code").item() == pytest.approx(scale[0].item(), rel=0.05)
    center = guide.slope * images.sum((1, 2, 3))
    optimum = model.log_evidence(images) - ((center - mean) / scale) ** 2 / 2
    idata = evaluate(model, widened, images, num_particles=400)
    summary = summarize(idata)
    log_weight = idata.sample_stats["log_weight"].values[0]
    error = log_weight.std() / math.sqrt(log_weight.size)
    assert summary["is_bound"]
    assert abs(summary["elbo"] - optimum.mean().item()) < 6 * error
    assert summary["elbo"] < model.log_evidence(images).mean().item()


@pytest.mark.parametrize("scale", [0.001, 0.1, 3.0])
def test_any_scale_gives_a_bound(scale):
    model, guide = points()
    images = conjugate_images(50)
    widened = Widened(model, guide, images, scale)
    check_pair(model, widened, images)
    summary = summarize(evaluate(model, widened, images, num_particles=200))
    assert summary["is_bound"]
    assert summary["elbo"] < summary["iwae"] < model.log_evidence(images).mean().item() + 0.05


class Poses(Model):
    """A model of two parts per image, each with a vector and a positive gain; relaxed or not."""

    space = ImageSpace((1, 2, 2))
    plate_dims = {"images": -2, "parts": -1}

    def forward(self, images=None, labels=None, batch_size=1):
        size = batch_size if images is None else len(images)
        with pyro.plate("images", size, dim=-2):
            gain = pyro.sample("gain", dist.LogNormal(torch.zeros(1), 0.5))  # (images, 1)
            with pyro.plate("parts", 2, dim=-1):
                pose = pyro.sample("pose", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        mean = (gain * pose.sum(-1)).sum(-1)[:, None, None, None].expand(-1, 1, 2, 2)
        with pyro.plate("images_seen", size, dim=-1):
            pyro.sample("image", dist.Normal(mean, 1.0).to_event(3), obs=images)


class PosePoints(Guide):
    def __init__(self, model):
        super().__init__(model)
        self.pose = nn.Parameter(torch.zeros(2, 3))
        self.gain = nn.Parameter(torch.tensor(0.0))

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-2):
            pyro.sample("gain", dist.Delta(self.gain.exp().expand(1)))
            with pyro.plate("parts", 2, dim=-1):
                pyro.sample("pose", dist.Delta(self.pose, event_dim=1))


def test_one_scale_for_each_coordinate_and_draws_within_the_support():
    model = Poses()
    guide = PosePoints(model)
    images = conjugate_images(5, torch.float32)
    widened = Widened(model, guide, images, scale=0.5)
    assert widened.scale("pose").shape == (1, 2, 3) and widened.scale("gain").shape == (1, 1)
    trace = pyro.poutine.trace(widened).get_trace(images)
    gain, pose = trace.nodes["gain"], trace.nodes["pose"]
    assert gain["value"].shape == (5, 1) and (gain["value"] > 0).all()
    assert pose["value"].shape == (5, 2, 3) and pose["fn"].event_dim == 1
    assert (pose["value"].std(0) > 0).all()  # images differ
    expected = dist.LogNormal(torch.zeros(1), 0.5).log_prob(gain["value"])
    torch.testing.assert_close(gain["fn"].log_prob(gain["value"]), expected)


class SwitchingPoint(PointGuide):
    """A guide that becomes another, with the same parameters, when presences are discrete."""

    factor = 1.0

    def discretize(self):
        return self.sharing_parameters(factor=2.0)

    def forward(self, images, labels=None):
        super().forward(self.factor * images)


def test_discrete_presences_reach_the_inner_guide_and_keep_the_scales():
    model, _ = points()
    guide = SwitchingPoint(model).double()
    images = conjugate_images(4)
    widened = Widened(model, guide, images, scale=1e-6)
    discrete = widened.discretize()
    means = [
        pyro.poutine.trace(g).get_trace(images).nodes["code"]["value"] for g in (widened, discrete)
    ]
    torch.testing.assert_close(means[1], 2 * means[0], rtol=0, atol=1e-4)
    assert discrete.code_log_scale is widened.code_log_scale
    inner, _ = points()
    same = Widened(inner, PointGuide(inner).double(), images)
    assert same.discretize() is same


def test_its_state_holds_the_scales_and_the_inner_guide():
    model, guide = points()
    images = conjugate_images(4)
    widened = Widened(model, guide, images, scale=0.3)
    state = widened.state_dict()
    assert set(state) == {"code_log_scale", "guide.slope"}
    twin = Widened(model, PointGuide(model).double(), images)
    twin.load_state_dict(state)
    torch.testing.assert_close(twin.scale("code"), widened.scale("code"))


def test_points_of_kinds_are_widened_as_kinds_and_discrete_ones_are_certain():
    """The encoder of points gives its kind the prior's density, which no point has."""
    entry = create("generative-capsnet", **small_settings("generative-capsnet"))
    model, images = entry.model, torch.rand(3, *entry.model.image_shape)
    guide = ConditionalEncoder(model, deterministic=True, channels=2, hidden=3)
    widened = widen(model, guide, images, steps=1)
    assert not any("object_kind" in name for name in widened.state_dict())
    kind = pyro.poutine.trace(widened).get_trace(images).nodes["object_kind"]
    assert isinstance(kind["fn"], LogRelaxedOneHot)
    torch.testing.assert_close(kind["fn"].logits, guide.expectations(images)["object_kind"])
    discrete = widened.discretize()
    check_pair(model.discretize(), discrete, images)
    kind = pyro.poutine.trace(discrete).get_trace(images).nodes["object_kind"]
    assert torch.equal(kind["fn"].log_prob(kind["value"]), torch.zeros(3))
    assert summarize(evaluate(model, widened, images, num_particles=2))["is_bound"]


def test_a_function_is_widened_as_a_module():
    model, guide = points()
    images = conjugate_images(4)
    with pytest.raises(ValueError, match=r"not function; .* as_module\(guide, images\) makes one"):
        widen(model, lambda images: guide(images), images)

    def function(images, labels=None):
        slope = pyro.param("slope", torch.tensor(0.1, dtype=images.dtype))
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("code", dist.Delta(slope * images.sum((1, 2, 3))))

    widened = [
        widen(model, candidate, images, steps=9)
        for candidate in (guide, as_module(function, images))
    ]
    torch.testing.assert_close(*(candidate.scale("code") for candidate in widened))
