"""Things and grounds of scenes: any image model is one, trained or not, or is refused."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from capsule_zoo.guides import Guide, Peeling
from capsule_zoo.inference import SummedPresences, fit, log_weights
from capsule_zoo.inference.evaluation.bound import point_sites
from capsule_zoo.inference.objects import count
from capsule_zoo.models import Model, Scenes, Site
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.registry import create, load, save_entry, small_settings


class Blot(Model):
    """A user's own model, whose means are not bounded."""

    sites = (Site("blot_code", ("images",), 1),)
    space, means_in_range = ImageSpace((1, 6, 6)), False

    def __init__(self):
        super().__init__()
        self.paint = torch.nn.Linear(2, 36)

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            code = pyro.sample("blot_code", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            mean = self.paint(code).unflatten(-1, (1, 6, 6))
            return pyro.sample("image", dist.Normal(mean, 0.3).to_event(3), obs=images)


class BlotGuide(Guide[Blot]):
    """The guide to it, that reads means of rows."""

    def __init__(self, model):
        super().__init__(model)
        self.read = torch.nn.Linear(6, 2)

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            mean = self.read(images.mean((1, 3)))
            pyro.sample("blot_code", dist.Normal(mean, 0.5).to_event(1))


def test_a_users_own_model_is_an_object_though_its_means_are_not_bounded():
    torch.manual_seed(0)
    thing, images = Blot(), torch.rand(3, 1, 12, 12)
    with torch.no_grad():
        thing.paint.weight.mul_(4)
    model = Scenes((1, 12, 12), thing, size=6.0)
    guide = Peeling(model, BlotGuide(thing), glimpse=4, hidden=6)
    result = guide.draw_proposals(images)
    pictures = torch.cat([proposal.drawn.picture for proposal in result.proposals])
    assert pictures.max() > 1 and pictures.min() < 0
    assert result.pictures.cover.max() <= 1 and result.pictures.cover.min() >= 0
    loss = SummedPresences().differentiable_loss(model, guide, images)
    loss.backward()
    assert loss.isfinite() and thing.paint.weight.grad.isfinite().all()
    assert log_weights(model, guide, images)[0].isfinite().all()


@pytest.mark.parametrize(
    "thing",
    ["part-whole", "shape-codes", "stacked-capsule-autoencoder", "generative-capsnet", "vae"],
)
def test_any_image_model_is_an_object(thing):
    sizes = {k: v for k, v in small_settings(thing).items() if k != "image_shape"}
    if "template_size" in sizes:
        sizes["template_size"] = 5
    entry = create(
        "scenes",
        image_shape=(1, 20, 20),
        thing=thing,
        thing_settings=sizes,
        window=12,
        size=10.0,
        slots=2,
    )
    images = torch.rand(3, 1, 20, 20)
    loss = entry.objective.differentiable_loss(entry.model, entry.guide, images)
    loss.backward()
    assert loss.isfinite()
    weight, _, _ = log_weights(entry.model.discretize(), entry.guide.discretize(), images)
    assert weight.isfinite().all()
    assert count(entry.model, entry.guide, images).shape == (3,)


@pytest.mark.parametrize("thing", ["part-whole", "stacked-capsule-autoencoder"])
def test_an_object_is_read_by_distributions_with_a_density(thing):
    """Where the object's own guide has points, slots would seem to hold objects that are not."""
    sizes = {k: v for k, v in small_settings(thing).items() if k != "image_shape"}
    settings = {k: v for k, v in small_settings("scenes").items() if k != "thing_settings"}
    sizes["template_size"] = 5
    entry = create("scenes", **{**settings, "window": 12}, thing=thing, thing_settings=sizes)
    windows = torch.rand(2, 1, 12, 12)
    _, drawn, read = log_weights(entry.model.thing, entry.guide.reader, windows)
    assert not point_sites(drawn, read)
    inner = create(thing, image_shape=(1, 12, 12), **sizes)
    assert point_sites(*log_weights(inner.model, inner.guide, windows)[1:])


def test_a_trained_object_is_used_as_it_is(tmp_path):
    small = dict(image_shape=(1, 6, 6), latent=2, channels=3, guide=dict(hidden=5))
    save_entry(create("vae", **small), tmp_path / "vae")
    entry = create(
        "scenes", image_shape=(1, 12, 10), thing=str(tmp_path / "vae"), train_thing=False, size=6.0
    )
    state = load(tmp_path / "vae").model.state_dict()
    assert all(
        torch.equal(state[name], value) for name, value in entry.model.thing.state_dict().items()
    )
    loss = entry.objective.differentiable_loss(entry.model, entry.guide, torch.rand(2, 1, 12, 10))
    loss.backward()
    assert not [*entry.model.thing.parameters(), *entry.guide.reader.parameters()]


def test_any_image_model_is_a_ground(tmp_path):
    behind = dict(image_shape=(3, 8, 8), latent=2, channels=3, guide=dict(hidden=5))
    save_entry(create("vae", **behind), tmp_path / "vae")
    sizes = {**small_settings("scenes"), "image_shape": (3, 12, 10), "train_ground": False}
    entry = create("scenes", ground=str(tmp_path / "vae"), **sizes)
    model, images = entry.model, torch.rand(2, 3, 12, 10)
    entry.objective.differentiable_loss(model, entry.guide, images).backward()
    assert not [*model.ground.parameters()]
    assert all(p.grad.abs().sum() > 0 for p in entry.guide.ground_reader.parameters())
    empty, code = torch.zeros(2, 2), torch.randn(2, 2)
    values = {"scene_presence": empty, "ground/image_code": code}
    nodes = poutine.trace(poutine.condition(model, values)).get_trace(batch_size=2).nodes
    alone = load(tmp_path / "vae").model.mean_image(code)
    enlarged = torch.nn.functional.interpolate(alone, (12, 10), mode="bilinear")
    torch.testing.assert_close(nodes["image"]["fn"].mean, enlarged)
    save_entry(entry, tmp_path / "scenes")
    again = load(tmp_path / "scenes").model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_a_picture_that_all_scenes_share_is_learned():
    pyro.set_rng_seed(0)
    picture = torch.linspace(0.1, 0.9, 12).expand(3, 10, 12).contiguous()
    images = (picture + 0.05 * torch.randn(64, 3, 10, 12)).clamp(0, 1)
    sizes = {**small_settings("scenes"), "image_shape": (3, 10, 12), "rate": 0.01}
    entry = create("scenes", ground="learned-picture", **sizes)
    settings = dict(steps=80, lr=0.05, batch_size=16, objective=SummedPresences(updates=1))
    fit(entry.model, entry.guide, images, **settings)
    ground_image = entry.model.ground_logits.sigmoid()
    assert (ground_image - picture).abs().mean() < 0.05
    larger = entry.model.with_canvas(20, 24)
    values = {"scene_presence": torch.zeros(1, 2)}
    image = poutine.trace(poutine.condition(larger, values)).get_trace(batch_size=1).nodes["image"]
    small = torch.nn.functional.avg_pool2d(image["fn"].mean, 2)[0]
    assert (small - ground_image).abs().mean() < 0.02
