"""The space of what a model observes: what it refuses, and what is asked of it."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import autoguide

from capsule_zoo.guides import Guide
from capsule_zoo.inference import (
    ReweightedWakeSleep,
    loss_per_image,
    posterior_predictive,
    reconstruct,
    sample,
)
from capsule_zoo.inference.calibration import check_calibration
from capsule_zoo.models import ImageSpace, Model, Site
from capsule_zoo.models.checks import told_apart
from capsule_zoo.models.common.spaces import AnyImages, space_of, tile_batch


class Blank(Model):
    """An image of noise, with a number that does not matter."""

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            pyro.sample("code", dist.Normal(0.0, 1.0))
            distribution = dist.Normal(torch.zeros(1, 2, 3), 1.0).to_event(3)
            return pyro.sample("image", distribution, obs=images)


def blank(space=None) -> Blank:
    model = Blank()
    if space is not None:
        model.space = space
    return model


def test_a_model_without_a_shape_takes_images_of_any_shape_in_the_unit_range():
    model = blank()
    assert not hasattr(model, "image_shape")
    model.space.check(torch.rand(2, 3, 4, 5))


def test_numbers_are_short_unless_they_would_look_the_same():
    assert told_apart(1.0, 0, 1) == "1" and told_apart(1 + 1e-9, 0, 1) == "1.000000001"
    assert told_apart(math.nan, 0, math.inf) == "nan"


def test_every_program_has_a_space():
    model = blank(ImageSpace((1, 2, 3), (-2.0, 2.0)))
    assert space_of(model) is model.space
    assert space_of(Guide(model)) is model.space
    assert space_of(autoguide.AutoNormal(model)) is model.space
    assert space_of(poutine.block(model, hide=["code"])) is model.space
    assert type(space_of(lambda images: None)) is AnyImages


def test_values_of_the_observed_site_become_one_batch():
    space, values = ImageSpace((1, 2, 3)), torch.rand(4, 5, 1, 1, 2, 3)
    assert torch.equal(space.as_batch(values), values.view(20, 1, 2, 3))
    assert torch.equal(space.as_batch(values[0]), values[0, :, 0])
    assert ImageSpace((1, 2, 3), (0.5, 2.0)).fill == 0.5  # of a missing pixel


def test_the_error_of_an_image_is_summed_over_its_pixels():
    predicted, observed = torch.rand(4, 3, 2, 5), torch.rand(4, 3, 2, 5)
    error = ImageSpace((3, 2, 5)).squared_error(predicted, observed)
    expected = torch.stack([((p - o) ** 2).sum() for p, o in zip(predicted, observed, strict=True)])
    torch.testing.assert_close(error, expected)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 4, 2), (3, 1, 2, 5)])
def test_copies_of_a_batch_of_any_rank_follow_each_other(shape):
    batch = torch.rand(shape)
    assert torch.equal(tile_batch(batch, 4).unflatten(0, (4, 3)), batch.expand(4, *shape))


class Renamed(Blank):
    """A blank image, observed at a site of another name."""

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            code = pyro.sample("code", dist.Normal(0.0, 1.0))
            distribution = dist.Normal(
                code[..., None, None, None].expand(-1, 1, 2, 3), 1.0
            ).to_event(3)
            return pyro.sample("pixels", distribution, obs=images)


class Pixels(ImageSpace):
    """Images that are observed at the site "pixels"."""

    site = "pixels"


class OfCodes(Guide):
    """The prior as a guide to `code`."""

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("code", dist.Normal(images.new_zeros(()), 1.0))


USES = {
    "reconstruct": lambda model, images: reconstruct(model, OfCodes(model), images),
    "posterior_predictive": lambda m, images: posterior_predictive(m, OfCodes(m), images, 2),
    "sample": lambda model, images: sample(model, 3),
    "check_calibration": lambda m, _: check_calibration(m, OfCodes(m), number=20, draws=3, bins=4),
    "sleep": lambda m, images: loss_per_image(ReweightedWakeSleep(), m, OfCodes(m), images),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_the_observed_site_has_the_name_that_the_space_says(use):
    model, images = Renamed(), torch.rand(3, 1, 2, 3)
    model.sites = (Site("code", ("images",)),)
    model.space = Pixels((1, 2, 3), (-math.inf, math.inf))
    use(model, images)
    model.space = ImageSpace((1, 2, 3), (-math.inf, math.inf))
    with pytest.raises(ValueError, match=r"no site 'image'.* but .'code', 'pixels'.; rename one"):
        use(model, images)


def test_missing_pixels_are_left_out_at_a_site_of_any_name():
    model, images = Renamed(), torch.rand(3, 1, 2, 3)
    model.space = Pixels((1, 2, 3))
    images[0, 0, 0, 0] = torch.nan
    holed = poutine.condition(model.with_missing_pixels(), {"code": torch.zeros(3)})
    trace = poutine.trace(holed).get_trace(images)
    trace.compute_log_prob()
    log_probs = dist.Normal(0.0, 1.0).log_prob(images.nan_to_num()) * ~images.isnan()
    torch.testing.assert_close(trace.nodes["pixels"]["log_prob"], log_probs.sum((1, 2, 3)))
