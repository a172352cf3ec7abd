"""The ellipse world: its posterior against complex arithmetic and full covariances."""

import itertools

import pytest
import torch
from scipy.stats import multivariate_normal

from capsule_zoo.experiments.constellations.ellipses import EllipseWorld, Messages
from capsule_zoo.models.constellations.similarities import as_complex


def move(arrangement, pose):
    """Return ellipses (n, 4) moved by a similarity: center t + u p, axis u a."""
    t, u = complex(pose[0], pose[1]), complex(pose[2], -pose[3])
    centers, axes = as_complex(arrangement[:, :2]), as_complex(arrangement[:, 2:])
    return torch.cat([torch.view_as_real(t + u * centers), torch.view_as_real(u * axes)], 1)


@pytest.mark.parametrize("visible", [1, 2, 3])
def test_the_posterior_is_that_of_all_choices_of_ellipses(visible):
    world = EllipseWorld.random(4, 3, 0.3)
    images, _ = world.draw(5, visible, torch.Generator().manual_seed(0))
    expected = torch.zeros(5, 4, dtype=torch.float64)
    for kind, arrangement in enumerate(world.arrangements):
        columns = [move(arrangement, pose) for pose in torch.eye(4).tolist()]
        for choice in itertools.permutations(range(3), visible):
            factor = torch.stack([column[[*choice]].flatten() for column in columns], 1)
            covariance = factor @ factor.T + 0.09 * torch.eye(4 * visible, dtype=torch.float64)
            normal = multivariate_normal(cov=covariance.numpy())
            expected[:, kind] += torch.from_numpy(normal.pdf(images.flatten(1).numpy()))
    torch.testing.assert_close(
        world.log_posterior(images).exp(),
        expected / expected.sum(1, keepdim=True),
        rtol=1e-10,
        atol=1e-12,
    )


def test_the_posterior_is_as_sure_as_it_is_right():
    """The expected accuracy is within 4.5 standard errors (false alarms below 1e-5)."""
    world = EllipseWorld.random(5, 4, 0.3)
    generator = torch.Generator().manual_seed(1)
    for visible, least in ((1, 0.2), (4, 0.6)):
        images, kinds = world.draw(1500, visible, generator)
        sure, guess = world.log_posterior(images).exp().max(-1)
        surprise = (guess == kinds).double() - sure
        assert abs(surprise.mean()) < 4.5 * surprise.std() / 1500**0.5
        assert sure.mean() > least


def test_messages_do_not_depend_on_the_order():
    torch.manual_seed(0)
    network, images = Messages(4, 3).double(), torch.randn(6, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(network(images.flip(1)), network(images))
