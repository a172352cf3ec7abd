"""Counterfactuals agree with closed forms and brute force, and refuse what has no answer."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import tensor

from capsule_zoo.guides import Guide, PartWholeGuide
from capsule_zoo.inference import intervene
from capsule_zoo.models import ImageSpace, Model, PartWholeCapsules, Site
from capsule_zoo.registry import create, small_settings
from capsule_zoo.settings import configure

EVERY_PIXEL = ImageSpace((1, 1, 2), (-float("inf"), float("inf")))


class Chain(Model):
    """z -> w -> image and z -> image, linear and normal; the scale of w may depend on z."""

    sites = (Site("z", ("images",)), Site("w", ("images",)))

    def __init__(self, slope=0.0):
        super().__init__()
        self.space = EVERY_PIXEL
        self.paint = torch.nn.Parameter(tensor([[1.0, 0.5], [-0.3, 2.0]], dtype=torch.float64))
        self.slope = slope

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            z = pyro.sample("z", dist.Normal(self.paint.new_tensor(0.4), 1.2))
            scale = 0.7 * torch.exp(self.slope * z)
            w = pyro.sample("w", dist.Normal(-1.5 * z + 0.2, scale))
            mean = torch.stack([z, w], -1) @ self.paint
            distribution = dist.Normal(mean[:, None, None, :], 0.6).to_event(3)
            return pyro.sample("image", distribution, obs=images)


def joint_of_chain(model):
    """Return mean and covariance of (z, w, image) by hand, for a constant scale of w."""
    down = tensor([[1.0, 0.0], [-1.5, 1.0]], dtype=torch.float64)  # (z, w) from their noise
    latent = down @ torch.diag(tensor([1.2**2, 0.7**2], dtype=torch.float64)) @ down.T
    paint = model.paint.detach().T
    both = torch.cat([torch.eye(2, dtype=torch.float64), paint])
    covariance = both @ latent @ both.T
    covariance[2:, 2:] += 0.36 * torch.eye(2, dtype=torch.float64)
    return both @ tensor([0.4, -1.5 * 0.4 + 0.2], dtype=torch.float64), covariance


class PosteriorMean(Guide):
    """A point mass on the exact posterior mean."""

    covers = ("z", "w")

    def forward(self, images, labels=None):
        mean, covariance = joint_of_chain(self.model)
        gain = covariance[:2, 2:] @ torch.linalg.inv(covariance[2:, 2:])
        latents = mean[:2] + (images.flatten(1) - mean[2:]) @ gain.T
        with pyro.plate("images", len(images), dim=-1):
            for name, value in zip(self.covers, latents.T, strict=True):
                pyro.sample(name, dist.Delta(value))


@pytest.fixture
def images():
    return torch.randn(3, 1, 1, 2, dtype=torch.float64)


def test_a_linear_model_agrees_with_its_twin_network(images):
    """E[image' | image] of the network of the factual and the counterfactual world, by hand."""
    model = Chain()
    noise = torch.diag(tensor([1.2, 0.7, 0.6, 0.6], dtype=torch.float64).square())
    paint, at = model.paint.detach().T, 2.0
    w = tensor([-1.5, 1.0, 0, 0], dtype=torch.float64)
    z = tensor([1.0, 0, 0, 0], dtype=torch.float64)
    pixels = torch.eye(4, dtype=torch.float64)[2:]
    image = paint @ torch.stack([z, w]) + pixels  # (2 pixels, noise)
    twin = paint @ torch.stack([0 * z, tensor([0, 1.0, 0, 0], dtype=torch.float64)]) + pixels
    mean = paint @ tensor([0.4, -1.5 * 0.4 + 0.2], dtype=torch.float64)
    twin_mean = paint @ tensor([at, -1.5 * at + 0.2], dtype=torch.float64)
    gain = twin @ noise @ image.T @ torch.linalg.inv(image @ noise @ image.T)
    wanted = twin_mean + (images.flatten(1) - mean) @ gain.T
    intervention = intervene(model, PosteriorMean(model), images, {"z": at})
    assert intervention.images.shape == (1, 3, 1, 1, 2)
    torch.testing.assert_close(intervention.images[0].flatten(1), wanted, atol=1e-10, rtol=0)
    assert torch.equal(intervention.latents["z"], torch.full((1, 3), at, dtype=torch.float64))


def test_the_noise_of_a_descendant_is_its_standardized_residual(images):
    model = Chain(slope=0.4)
    guide = PosteriorMean(model)
    intervention = intervene(model, guide, images, {"z": lambda z: z + 1})
    z, w = (intervention.inferred[name] for name in ("z", "w"))
    moved = -1.5 * (z + 1) + 0.2 + (w - (-1.5 * z + 0.2)) * math.exp(0.4)
    torch.testing.assert_close(intervention.latents["w"], moved, atol=1e-10, rtol=0)
    shift = torch.stack([torch.ones_like(z), moved - w], -1) @ model.paint.detach()
    expected = images.flatten(1) + shift
    torch.testing.assert_close(intervention.images.flatten(2), expected, atol=1e-10, rtol=0)
    paint = torch.stack([z, w], -1) @ model.paint.detach()
    torch.testing.assert_close(intervention.reconstruction.flatten(2), paint, atol=1e-10, rtol=0)
    torch.testing.assert_close(intervention.mean.flatten(2), paint + shift, atol=1e-10, rtol=0)
    below = intervene(model, guide, images, {"w": 0.0})
    assert torch.equal(below.latents["z"], below.inferred["z"])  # nothing above changes


RATES = ((0.2, 0.9), (0.7, 0.4))  # of the two parts, by object


class Coins(Model):
    """An object that is present or not, and two parts, whose image is noisy."""

    sites = (
        Site("object", ("images",), discrete=True),
        Site("parts", ("images",), event_dim=1, discrete=True),
    )

    def __init__(self):
        super().__init__()
        self.space = EVERY_PIXEL
        self.rates = torch.nn.Parameter(tensor(RATES, dtype=torch.float64))

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            presence = pyro.sample("object", dist.Bernoulli(self.rates.new_tensor(0.3)))
            parts = pyro.sample("parts", dist.Bernoulli(self.rates[presence.long()]).to_event(1))
            distribution = dist.Normal(parts[:, None, None, :], 0.8).to_event(3)
            return pyro.sample("image", distribution, obs=images)


class Enumerated(Guide):
    """The exact posterior of `Coins`, from the sum over all eight states."""

    covers = ("object", "parts")

    def states(self, images):
        """Return the states (8, 3) and their posterior (B, 8)."""
        states = torch.cartesian_prod(*[tensor([0.0, 1.0], dtype=torch.float64)] * 3)
        rates = tensor(RATES, dtype=torch.float64)[states[:, 0].long()]
        log = dist.Bernoulli(tensor(0.3).double()).log_prob(states[:, 0])
        log = log + dist.Bernoulli(rates).log_prob(states[:, 1:]).sum(-1)
        pixels = dist.Normal(states[:, 1:], 0.8).log_prob(images.flatten(1)[:, None]).sum(-1)
        return states, (log + pixels).softmax(-1)

    def forward(self, images, labels=None):
        states, posterior = self.states(images)
        with pyro.plate("images", len(images), dim=-1):
            hint = {"is_auxiliary": True}
            state = pyro.sample("state", dist.Categorical(posterior), infer=hint)
            pyro.sample("object", dist.Delta(states[state, 0]))
            pyro.sample("parts", dist.Delta(states[state, 1:], event_dim=1))


def test_a_discrete_model_agrees_with_the_sum_over_its_noise():
    """P(part' = 1 | image, do(object = 1)), where a part is on if its uniform number is below p."""
    image = tensor([0.3, 0.9], dtype=torch.float64)
    number = 40_000
    model = Coins()
    guide = Enumerated(model)
    states, posterior = guide.states(image[None])
    wanted = 0
    for state, weight in zip(states, posterior[0], strict=True):
        before, after = (tensor(RATES[int(j)], dtype=torch.float64) for j in (state[0], 1))
        on = (after / before).clamp(max=1)
        off = ((after - before) / (1 - before)).clamp(min=0)
        wanted = wanted + weight * torch.where(state[1:] > 0, on, off)
    many = image.expand(number, 1, 1, 2)
    intervention = intervene(model, guide, many, {"object": 1.0}, batch_size=number)
    parts = intervention.latents["parts"][0]
    torch.testing.assert_close(parts.mean(0), wanted, atol=5 * 0.5 / number**0.5, rtol=0)
    same = intervention.inferred["object"][0] == 1
    assert torch.equal(parts[same], intervention.inferred["parts"][0][same])


class Summed(Coins):
    """Coins whose object is summed out by enumeration."""

    sites = (
        Site("object", ("images",), discrete=True, enumerated=True),
        Site("parts", ("images",), event_dim=1, discrete=True),
    )

    def forward(self, images=None, labels=None, batch_size=1):
        summed = {"object": {"enumerate": "parallel"}}
        with pyro.poutine.infer_config(config_fn=lambda site: summed.get(site["name"], {})):
            return super().forward(images, labels, batch_size)


class OnlyParts(Enumerated):
    covers = ("parts",)

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            fair = images.new_full((2,), 0.5)
            pyro.sample("parts", dist.Bernoulli(fair).to_event(1))


def test_a_site_that_is_summed_out_is_drawn_from_its_posterior():
    model, images = Summed(), torch.zeros(4000, 1, 1, 2, dtype=torch.float64)
    intervention = intervene(
        model, OnlyParts(model), images, {"parts": lambda parts: parts}, batch_size=4000
    )
    presence, parts = (intervention.inferred[name][0] for name in ("object", "parts"))
    rates = tensor(RATES, dtype=torch.float64)
    for pattern in torch.cartesian_prod(*[tensor([0.0, 1.0], dtype=torch.float64)] * 2):
        joint = tensor([0.7, 0.3]).double() * dist.Bernoulli(rates).log_prob(pattern).sum(-1).exp()
        rows = (parts == pattern).all(-1)
        fraction, wanted = presence[rows].double().mean().item(), (joint[1] / joint.sum()).item()
        assert fraction == pytest.approx(wanted, abs=2.5 / rows.sum().item() ** 0.5)
    on = intervene(model, OnlyParts(model), images, {"object": 1})
    assert (on.latents["object"] == 1).all() and (on.latents["parts"] != on.inferred["parts"]).any()


def test_the_parts_of_an_object_move_with_it():
    """With one object and no dummy to speak of, each part keeps its distance from the vote."""
    sizes = dict(image_shape=(1, 8, 8), template_size=3, epsilon=1e-9, dummy_presence=1e-9)
    model = configure(PartWholeCapsules, objects=1, parts=3, **sizes)
    reader = dict(channels=4, width=8, heads=2, blocks=1, inducing=2)
    guide = configure(PartWholeGuide, model, "normal", **reader)
    images = torch.rand(3, 1, 8, 8)
    shift = tensor([0.0, 0.0, 0.5, 0.0, 0.0, -0.25])
    action = {"object_pose": lambda pose: pose + shift, "object_presence": 1.0}
    with torch.no_grad():  # the votes of this object are its children's means
        model.selections[0].transform.zero_()
        model.selections[0].raw_scale.fill_(1.0)
    intervention = intervene(model, guide, images, action, num_samples=4)
    was_on = (intervention.inferred["object_presence"] > 0)[..., 0]
    assert (intervention.latents["object_presence"] == 1).all() and was_on.any()
    away = (intervention.latents["part_pose"] - intervention.inferred["part_pose"])[was_on]
    torch.testing.assert_close(away, shift.expand_as(away), atol=1e-5, rtol=0)
    assert (intervention.mean != intervention.reconstruction).any()


def test_actions_see_all_images_whatever_the_batches(images):
    model = Chain()
    shifts = tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    pair = model, PosteriorMean(model), images
    whole = intervene(*pair, {"z": lambda z: z + shifts})
    single = intervene(*pair, {"z": lambda z: z + shifts}, batch_size=1)
    torch.testing.assert_close(whole.images, single.images)
    value = intervene(*pair, {"z": whole.latents["z"][0]})
    assert torch.equal(value.images, whole.images)


def test_the_drawn_values_stay():
    entry = create("vae", **small_settings("vae"))
    images = torch.rand(3, *entry.model.image_shape)

    def change(code):
        code += 1  # in place
        return code

    first = intervene(entry.model, entry.guide, images, {"image_code": change}, num_samples=2)
    torch.testing.assert_close(first.latents["image_code"], first.inferred["image_code"] + 1)
    assert not torch.equal(first.inferred["image_code"][0], first.inferred["image_code"][1])


class Waiting(Chain):
    """A chain whose w has a distribution without a rule."""

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            z = pyro.sample("z", dist.Normal(self.paint.new_tensor(0.4), 1.2))
            w = pyro.sample("w", dist.Gamma(z.exp(), 1.0))
            distribution = dist.Normal(w[:, None, None, None].expand(-1, 1, 1, 2), 0.6).to_event(3)
            return pyro.sample("image", distribution, obs=images)


class Fixed(Guide):
    covers = ("z", "w")

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            for name in self.covers:
                pyro.sample(name, dist.Delta(images.new_ones(len(images))))


def test_a_site_whose_noise_has_no_rule_is_named(images):
    model = Waiting()
    guide = Fixed(model)
    with pytest.raises(ValueError, match=r"'w' depends on the action.*set 'w' too, or add a rule"):
        intervene(model, guide, images, {"z": 0.0})
    both = intervene(model, guide, images, {"z": 0.0, "w": 2.0})
    torch.testing.assert_close(both.images[0], images + 1)
