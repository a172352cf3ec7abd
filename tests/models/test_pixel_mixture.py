"""The pixel mixture against its definition, pixel by pixel, in float64."""

import math

import pyro.distributions as dist
import pytest
import torch

from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.inference import check_pair
from capsule_zoo.models import Capsules, PartWholeCapsules
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.models.parts.pixel_mixture import PixelMixture
from capsule_zoo.settings import configure


def random_mixture(parts=3, channels=2, batch=2, size=3):
    torch.manual_seed(0)
    color = torch.rand(1 + parts, channels, batch, size, size, dtype=torch.float64)
    weight = torch.rand(1 + parts, 1, batch, size, size, dtype=torch.float64)
    return color, weight, PixelMixture(color, weight, 0.2)


def test_density_is_a_sum_over_parts_at_every_pixel():
    color, weight, distribution = random_mixture()
    images = torch.rand(2, 1, 2, 3, 3, dtype=torch.float64)
    expected = torch.zeros(2, 1, dtype=torch.float64)
    for b in range(2):
        for i in range(3):
            for j in range(3):
                fraction = weight[:, 0, b, i, j] / weight[:, 0, b, i, j].sum()
                density = sum(
                    fraction[k]
                    * dist.Normal(color[k, :, b, i, j], 0.2)
                    .log_prob(images[b, 0, :, i, j])
                    .sum()
                    .exp()
                    for k in range(4)
                )
                expected[b] += density.log()
    torch.testing.assert_close(distribution.log_prob(images), expected)


def test_draws_have_the_mean_and_variance_of_the_mixture():
    color, weight, distribution = random_mixture()
    n = 20_000
    draws = distribution.sample((n,))
    assert draws.shape == (n, 2, 1, 2, 3, 3) and distribution.mean.shape == draws.shape[1:]
    fraction = weight / weight.sum(0)
    second = (fraction * color.square()).sum(0).transpose(0, 1)[:, None] + 0.2**2
    for power, expected in ((1, distribution.mean), (2, second)):
        values = draws**power
        error = (values.mean(0) - expected).abs()
        assert (error < 5 * values.std(0) / math.sqrt(n)).all()  # 36 pixels: fails once in 40,000


@pytest.mark.parametrize("channels", [1, 3])
def test_the_model_takes_it_and_all_parts_off_give_the_background(channels):
    torch.manual_seed(0)
    options = dict(image_shape=(channels, 12, 12), template_size=5, likelihood="mixture")
    model = configure(
        PartWholeCapsules, objects=3, parts=4, presence="discrete", **options
    ).double()
    off = Capsules(torch.zeros(2, 4).double(), torch.randn(2, 4, 6).double())
    images = torch.rand(2, channels, 12, 12, dtype=torch.float64)
    expected = dist.Normal(torch.zeros_like(images), model.sigma_image).log_prob(images)
    log_density = model.image_distribution(off).log_prob(images[:, None])
    torch.testing.assert_close(log_density[:, 0], expected.sum((1, 2, 3)))
    assert model.render(off).abs().max() == 0
    guide = configure(
        PartWholeGuide, model, channels=4, width=8, heads=2, blocks=1, inducing=2
    ).double()
    check_pair(model, guide, images)


def test_gradients_are_finite_where_no_part_is_seen():
    model = PartWholeCapsules(
        (1, 12, 12), objects=2, parts=3, painting=Painting(template_size=5, likelihood="mixture")
    ).double()
    pose = torch.zeros(1, 3, 6).double()
    pose[..., 0] = pose[..., 4] = 0.2  # small parts in the middle, nothing elsewhere
    parts = Capsules(torch.ones(1, 3).double().requires_grad_(), pose.requires_grad_())
    model.image_distribution(parts).log_prob(torch.rand(1, 1, 1, 12, 12).double()).sum().backward()
    assert parts.pose.grad.isfinite().all() and parts.presence.grad.isfinite().all()
    assert model.template_logits.grad.isfinite().all()
