"""The fitted top: a normalized density, consistent with its draws, found by likelihood."""

import itertools

import torch

from capsule_zoo.inference.evaluation.ancestral import log_prior
from capsule_zoo.inference.top_prior import fit_top_prior
from capsule_zoo.models import PartWholeCapsules, VariationalAutoencoder
from capsule_zoo.models.parts.painted_parts import Painting


def model():
    torch.manual_seed(0)
    return PartWholeCapsules(
        (1, 8, 8), objects=2, parts=3, painting=Painting(template_size=3)
    ).double()


def two_kinds(number, seed=1):
    """Return objects of two kinds of image, with presences that depend on the poses."""
    generator = torch.Generator().manual_seed(seed)
    kind = (torch.rand(number, generator=generator) < 0.3).long()
    chance = torch.tensor([[0.9, 0.2], [0.1, 0.8]], dtype=torch.float64)[kind]
    presence = (torch.rand(number, 2, generator=generator) < chance).double()
    center = torch.tensor([-1.0, 2.0], dtype=torch.float64)[kind, None]
    common = torch.randn(number, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(number, 12, generator=generator, dtype=torch.float64)
    pose = (center + 0.3 * common + 0.1 * noise).view(number, 2, 6)
    return {"object_presence": presence, "object_pose": pose}


def test_binary_states_sum_to_the_distribution_of_the_poses():
    """Summed over presences, the density of one kind is a Gaussian."""
    values = two_kinds(300)
    top = fit_top_prior(model(), values, components=1, steps=3)
    states = torch.tensor(list(itertools.product([0.0, 1.0], repeat=2)), dtype=torch.float64)
    pose = values["object_pose"][:5]
    log_densities = [
        top.log_prob({"object_presence": state.expand(5, 2), "object_pose": pose})
        for state in states
    ]
    flat = values["object_pose"].flatten(1)
    gaussian = torch.distributions.MultivariateNormal(
        flat.mean(0), torch.cov(flat.T, correction=0) + 1e-4 * torch.diag(flat.var(0))
    )
    torch.testing.assert_close(
        torch.stack(log_densities).logsumexp(0),
        gaussian.log_prob(pose.flatten(1)),
        rtol=1e-6,
        atol=1e-6,
    )


def test_draws_follow_the_density():
    """E_top[log top - log other] is a divergence: not negative, zero only for itself."""
    top = fit_top_prior(model(), two_kinds(2000), components=3, steps=20)
    other = fit_top_prior(model(), two_kinds(2000, seed=2), components=1, steps=1)
    drawn, n = top.sample(4000, seed=3), 4000
    ratio = top.log_prob(drawn) - other.log_prob(drawn)
    assert ratio.mean() > 5 * ratio.std() / n**0.5
    # E_top[other / top] = 1 for normalized densities; other is wider, so the weights are bounded.
    weight = (-ratio).exp()
    assert abs(weight.mean() - 1) < 5 * weight.std() / n**0.5


def test_expectation_maximization_climbs_and_beats_one_kind_on_fresh_images():
    values, fresh = two_kinds(2000), two_kinds(1000, seed=9)
    scores = [
        fit_top_prior(model(), values, components=2, steps=steps).log_prob(values).mean()
        for steps in (1, 2, 4, 8, 16)
    ]
    assert all(later > earlier - 1e-3 for earlier, later in itertools.pairwise(scores))
    one = fit_top_prior(model(), values, components=1).log_prob(fresh)
    two = fit_top_prior(model(), values, components=2).log_prob(fresh)
    assert (two - one).mean() > 0.5
    single = log_prior(model(), fresh)
    assert (two - single).mean() > 10


def test_it_serves_a_code_without_binary_numbers():
    torch.manual_seed(0)
    vae = VariationalAutoencoder((1, 5, 6), latent=3, channels=2)
    code = torch.randn(500, 3) * torch.tensor([1.0, 0.1, 2.0]) + 1
    top = fit_top_prior(vae, {"image_code": code}, components=2)
    drawn = top.sample(4000)["image_code"]
    assert drawn.dtype == torch.float32
    error = 6 * code.std(0) / 500**0.5
    assert ((drawn.mean(0) - code.mean(0)).abs() < error).all()
    assert ((drawn.std(0) - code.std(0)).abs() < error).all()


def test_a_number_that_never_changes_does_no_harm():
    values = two_kinds(200)
    values["object_pose"][..., 2] = 0.25
    values["object_presence"][:, 0] = 1.0
    top = fit_top_prior(model(), values, components=3)
    assert torch.isfinite(top.log_prob(values)).all()
    torch.testing.assert_close(
        top.sample(50)["object_pose"][..., 2],
        torch.full((50, 2), 0.25, dtype=torch.float64),
        atol=1e-3,
        rtol=0,
    )


def test_numbers_that_hardly_vary_are_as_likely_on_fresh_images():
    """In float32 their variation is rounding, which must not be taken for knowledge."""
    values, fresh = (
        {name: value.float() for name, value in two_kinds(400, seed).items()} for seed in (1, 9)
    )
    for noise, group in ((0.9e-7, values), (1.3e-7, fresh)):
        group["object_pose"][..., 0] = 1.0 + noise * torch.randn(400, 2)
    top = fit_top_prior(model(), values, components=2)
    gap = top.log_prob(values).mean() - top.log_prob(fresh).mean()
    assert abs(gap) < 2
