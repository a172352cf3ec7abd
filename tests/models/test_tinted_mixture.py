"""The fast density of tinted templates equals the density of the stacked layers."""

import pytest
import torch

from capsule_zoo.models.parts.pixel_mixture import TintedMixture


def distribution_and_leaves(channels=3, batch=(4,), scale=0.3, dtype=torch.float64, zeros=False):
    torch.manual_seed(0)
    number = torch.Size(batch).numel()
    leaves = {
        "drawn": torch.rand(5, channels + 1, number, 6, 7, dtype=dtype),
        "tint": torch.rand(*batch, 5, channels, dtype=dtype),
        "presence": torch.rand(*batch, 5, dtype=dtype),
        "behind": torch.rand(channels, dtype=dtype),
        "claim": torch.tensor(0.2, dtype=dtype),
    }
    leaves["drawn"] = leaves["drawn"] + 0.01
    leaves["presence"] = leaves["presence"] + 0.01
    if zeros:
        leaves["drawn"][:, :, :, 0] = 0  # outside every template
        leaves["drawn"][2, -1, :, 3:] = 0  # a color without a weight
        leaves["presence"][..., 1] = 0
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    return TintedMixture(**leaves, scale=scale), list(leaves.values())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("batch", [(4,), (2, 4)])
@pytest.mark.parametrize("scale", [1.0, 0.3, 0.01])
def test_density_and_gradients_are_those_of_the_stacked_layers(channels, batch, scale):
    distribution, leaves = distribution_and_leaves(channels, batch, scale)
    images = torch.rand(*batch, 1, channels, 6, 7, dtype=torch.float64)
    ours, theirs = distribution.log_prob(images), distribution.as_stacks.log_prob(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    outer = torch.randn_like(ours)
    pairs = zip(
        torch.autograd.grad(ours, leaves, outer),
        torch.autograd.grad(theirs, leaves, outer),
        strict=True,
    )
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("together", [True, False])
def test_pixels_and_channels_that_are_not_seen_are_left_out(channels, together):
    distribution, leaves = distribution_and_leaves(channels)
    images = torch.rand(4, 1, channels, 6, 7, dtype=torch.float64)
    mask = torch.rand(4, 1, 1 if together else channels, 6, 7) > 0.4
    ours, theirs = (
        component.log_prob_where(images, mask)
        for component in (distribution, distribution.as_stacks)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    slopes = (torch.autograd.grad(log_probs.sum(), leaves) for log_probs in (ours, theirs))
    for mine, other in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-8)
    everything = torch.ones_like(images, dtype=torch.bool)
    assert torch.equal(
        distribution.log_prob_where(images, everything), distribution.log_prob(images)
    )


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_layers_without_weight_add_nothing(scale):
    distribution, leaves = distribution_and_leaves(scale=scale, zeros=True)
    images = torch.rand(4, 1, 3, 6, 7, dtype=torch.float64)
    torch.testing.assert_close(
        distribution.log_prob(images), distribution.as_stacks.log_prob(images)
    )
    drawn, tint, presence, behind, claim = leaves
    indices = [0, 2, 3, 4]
    without = TintedMixture(
        drawn[indices], tint[:, indices], presence[:, indices], behind, claim, scale
    )
    torch.testing.assert_close(distribution.log_prob(images), without.log_prob(images))


def test_a_part_that_is_off_is_told_how_much_better_it_would_explain_the_image():
    distribution, leaves = distribution_and_leaves(1, scale=3.0, zeros=True)
    images = torch.rand(4, 1, 1, 6, 7, dtype=torch.float64)
    (slope,) = torch.autograd.grad(distribution.log_prob(images).sum(), distribution.presence)
    drawn, tint, presence, behind, claim = (leaf.detach() for leaf in leaves)
    on = presence.clone()
    on[:, 1] = 1e-7
    raised = TintedMixture(drawn, tint, on, behind, claim, distribution.scale).log_prob(images)
    expected = (raised - distribution.log_prob(images).detach()).squeeze(1) / 1e-7
    torch.testing.assert_close(slope[:, 1], expected, rtol=0.05, atol=0.05)


def test_gradients_are_numerical_derivatives():
    distribution, leaves = distribution_and_leaves(1)
    inputs = [leaves[0][:2, :, :, :2, :2], leaves[1][:, :2], leaves[2][:, :2], *leaves[3:]]
    inputs = [leaf.detach().clone().requires_grad_() for leaf in inputs]
    images = torch.rand(4, 1, 1, 2, 2, dtype=torch.float64)

    def density(*numbers):
        return TintedMixture(*numbers, scale=distribution.scale).log_prob(images)

    assert torch.autograd.gradcheck(density, inputs)


def test_a_color_far_from_all_layers_has_a_finite_density_in_single_precision():
    distribution, leaves = distribution_and_leaves(1, scale=0.01, dtype=torch.float32, zeros=True)
    images = torch.full((4, 1, 1, 6, 7), 5.0)
    density = distribution.log_prob(images)
    density.sum().backward()
    exact = TintedMixture(*(leaf.detach().double() for leaf in leaves), scale=0.01)
    torch.testing.assert_close(density.double(), exact.log_prob(images.double()), rtol=1e-5, atol=0)
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_more_batch_dims_and_draws_are_those_of_the_stacked_layers():
    distribution, _ = distribution_and_leaves()
    images = torch.rand(2, 4, 1, 3, 6, 7, dtype=torch.float64)
    assert (
        distribution.expand(torch.Size((4, 1))) is distribution
    )  # so that a plate keeps the fast density
    wide = distribution.expand(torch.Size((2, 4, 1)))
    torch.testing.assert_close(distribution.log_prob(images), wide.log_prob(images))
    torch.testing.assert_close(distribution.log_prob(images)[0], distribution.log_prob(images[0]))
    torch.manual_seed(1)
    drawn = distribution.sample((6000,)).mean(0)
    torch.testing.assert_close(drawn, distribution.mean.detach(), rtol=0, atol=0.03)


def test_pixels_that_need_a_gradient_get_one():
    distribution, _ = distribution_and_leaves()
    images = torch.rand(4, 1, 3, 6, 7, dtype=torch.float64, requires_grad=True)
    distribution.log_prob(images).sum().backward()
    assert images.grad.abs().min() > 0
