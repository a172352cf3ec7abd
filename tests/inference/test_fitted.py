"""General guides: fitted to given images, they are offered wherever they serve, and are good."""

import pytest
import torch
from toys import BernoulliMixture, Correlated, conjugate_images, pair

from capsule_zoo.guides import FreeForm, GaussNewton
from capsule_zoo.inference import SemiAmortized, check_pair, encode, evaluate, fit_guide, summarize
from capsule_zoo.inference.posterior.fitted import kinds_for
from capsule_zoo.registry import create, small_settings


@pytest.mark.parametrize(
    "name",
    [
        *("free_form", "corrected", "low_rank", "gauss_newton", "mixture"),
        *("semi_amortized", "auto_normal"),
    ],
)
def test_a_fitted_guide_comes_close_to_the_exact_posterior(name):
    """The posterior is normal, so the ELBO of the best guide is the evidence itself."""
    model, start = pair()
    images = conjugate_images(6)
    guide = fit_guide(name, model, start, images, steps=50)
    before, after = (
        summarize(evaluate(model, candidate, images, num_particles=40))["elbo"]
        for candidate in (start, guide)
    )
    log_evidence = model.log_evidence(images).mean().item()
    assert before < log_evidence - 1
    assert log_evidence - 0.4 < after < log_evidence + 0.05


@pytest.mark.parametrize("name", ["free_form", "corrected", "gauss_newton", "auto_normal"])
def test_a_guide_is_fitted_where_gradients_are_off(name):
    (model, start), images, weights = pair(), conjugate_images(2), []
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            guide = fit_guide(name, model, start, images, steps=2)
        weights.append(
            evaluate(model, guide, images, num_particles=2).sample_stats.log_weight.values
        )
    assert (weights[0] == weights[1]).all() and (weights[0] == weights[2]).all()


@pytest.mark.parametrize("name", ["free_form", "corrected", "gauss_newton", "auto_normal"])
def test_images_of_another_precision_are_fitted(name):
    model, start = pair()
    images = conjugate_images(2).float()
    guide = fit_guide(name, model, start, images, steps=1)
    assert {p.dtype for p in guide.parameters()} == {torch.float64}
    assert torch.isfinite(encode(model, guide, images)["code"]).all()


@pytest.mark.long
def test_correlations_cost_independent_sites_their_known_nats_and_a_low_rank_none():
    """The best independent normal has the diagonal of the precision P of the posterior."""
    torch.manual_seed(0)
    model = Correlated()
    images = model(batch_size=20).detach()
    evidence = model.log_evidence(images).mean().item()
    lost = {}
    for distribution in ("normal", "low_rank"):
        guide = fit_guide(
            "free_form", model, None, images, steps=750, distribution=distribution, lr=0.03
        )
        check_pair(model, guide, images)
        elbo = summarize(evaluate(model, guide, images, num_particles=400))["elbo"]
        lost[distribution] = evidence - elbo
    precision = model.precision.detach()
    divergence = (precision.diagonal().log().sum() - precision.logdet()).item() / 2
    assert divergence > 0.5
    assert divergence - 0.05 < lost["normal"] < divergence + 0.15
    assert -0.05 < lost["low_rank"] < 0.15


def test_the_model_and_the_start_are_left_as_they_were():
    model, start = pair()
    images = conjugate_images(3)
    copies = [p.detach().clone() for p in (*model.parameters(), *start.parameters())]
    state = torch.get_rng_state()
    for kind in kinds_for(model, start):
        check_pair(model, fit_guide(kind, model, start, images, steps=2), images)
    now = [*model.parameters(), *start.parameters()]
    assert all(torch.equal(a, b) and b.requires_grad for a, b in zip(copies, now, strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_a_guide_is_offered_where_its_distributions_fit():
    offered = ["free_form", "semi_amortized", "corrected", "low_rank", "gauss_newton", "mixture"]
    assert kinds_for(*pair()) == [*offered, "auto_normal"]
    bits = BernoulliMixture(False)
    start = FreeForm(bits, torch.rand(1, 1, 2, 2))
    assert kinds_for(bits, start) == ["free_form", "semi_amortized", "corrected"]
    for name in ("capsule-rbm", "cnn"):
        entry = create(name, **small_settings(name))
        assert kinds_for(entry.model, entry.guide) == []
    entry = create("part-whole", **small_settings("part-whole"))
    assert "auto_normal" not in kinds_for(entry.model, entry.guide)


def test_the_door_fits_points_and_widens_them():
    model, start = pair()
    images = conjugate_images(6)
    points = fit_guide("free_form", model, start, images, steps=20, distribution="delta")
    assert points.continuous_distribution == "delta" and len(points.refinement.path) == 21
    wide = fit_guide("widened", model, points, images, steps=2)
    assert evaluate(model, wide, images, num_particles=2).attrs["is_bound"]
    later = fit_guide("semi_amortized", model, start, images, steps=3, distribution="delta")
    assert later.fit_images(images).continuous_distribution == "delta"
    later = SemiAmortized(start, steps=3, kind="gauss_newton")
    assert isinstance(later.fit_images(images), GaussNewton)
