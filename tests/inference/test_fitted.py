"""General guides: fitted to given images, they are offered wherever they serve, and are good."""

import pytest
import torch
from toys import BernoulliMixture, Correlated, conjugate_images, pair

from capsule_zoo.guides import FreeForm, RecognitionMachine
from capsule_zoo.guides.per_image.site_laws import UnservedSite
from capsule_zoo.inference import check_pair, encode, evaluate, summarize
from capsule_zoo.inference.posterior.fitted import auto_normal, general_guides
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.models import CapsuleHelmholtzMachine
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
    guide = general_guides(model, start)[name](model, start, images, steps=50, seed=0)
    before, after = (
        summarize(evaluate(model, each, images, num_particles=40))["elbo"]
        for each in (start, guide)
    )
    log_evidence = model.log_evidence(images).mean().item()
    assert before < log_evidence - 1
    assert log_evidence - 0.4 < after < log_evidence + 0.05


@pytest.mark.parametrize("name", ["free_form", "corrected", "gauss_newton", "auto_normal"])
def test_a_guide_is_fitted_where_gradients_are_off(name):
    (model, start), images, found = pair(), conjugate_images(2), []
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            guide = general_guides(model, start)[name](model, start, images, steps=2, seed=0)
        found.append(evaluate(model, guide, images, num_particles=2).sample_stats.log_weight.values)
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()


@pytest.mark.parametrize("name", ["free_form", "corrected", "gauss_newton", "auto_normal"])
def test_images_of_another_precision_are_fitted(name):
    model, start = pair()
    images = conjugate_images(2).float()
    guide = general_guides(model, start)[name](model, start, images, steps=1, seed=0)
    assert {p.dtype for p in guide.parameters()} == {torch.float64}
    assert torch.isfinite(encode(model, guide, images)["code"]).all()


def test_correlations_cost_independent_sites_their_known_nats_and_a_low_rank_none():
    """The best independent normal law has the diagonal of the precision P of the posterior."""
    torch.manual_seed(0)
    model = Correlated()
    images = model(batch_size=20).detach()
    evidence = model.log_evidence(images).mean().item()
    lost = {}
    for law in ("normal", "low_rank"):
        found = refine(model, None, images, steps=750, law=law, lr=0.03)
        check_pair(model, found.guide, images)
        elbo = summarize(evaluate(model, found.guide, images, num_particles=400))["elbo"]
        lost[law] = evidence - elbo
    precision = model.precision.detach()
    known = (precision.diagonal().log().sum() - precision.logdet()).item() / 2
    assert known > 0.5
    assert known - 0.05 < lost["normal"] < known + 0.15
    assert -0.05 < lost["low_rank"] < 0.15


def test_the_model_and_the_start_are_left_as_they_were():
    model, start = pair()
    images = conjugate_images(3)
    kept = [p.detach().clone() for p in (*model.parameters(), *start.parameters())]
    state = torch.get_rng_state()
    for fitter in general_guides(model, start).values():
        check_pair(model, fitter(model, start, images, steps=2, seed=0), images)
    now = [*model.parameters(), *start.parameters()]
    assert all(torch.equal(a, b) and b.requires_grad for a, b in zip(kept, now, strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_a_guide_is_offered_where_its_laws_fit():
    offered = {"free_form", "corrected", "low_rank", "semi_amortized", "auto_normal"}
    offered |= {"gauss_newton", "mixture"}
    assert set(general_guides(*pair())) == offered
    bits = BernoulliMixture(False)
    assert set(general_guides(bits, FreeForm(bits, torch.rand(1, 1, 2, 2)))) == {
        "free_form",
        "corrected",
        "semi_amortized",
    }
    for name in ("capsule-rbm", "cnn"):
        assert create(name, **small_settings(name)).fitters == {}
    assert "auto_normal" not in create("part-whole", **small_settings("part-whole")).fitters


def test_what_a_guide_cannot_draw_is_named():
    model = CapsuleHelmholtzMachine((1, 2, 2), (2,), 2)
    with pytest.raises(UnservedSite, match=r"capsule1_switch, capsule1_hidden.*free_form"):
        auto_normal(model, RecognitionMachine(model), torch.rand(2, 1, 2, 2), steps=1, seed=0)


def test_an_entry_offers_general_guides_by_name():
    entry = create("vae", **small_settings("vae"))
    assert list(entry.fitters) == [
        "free_form",
        "semi_amortized",
        "corrected",
        "low_rank",
        "gauss_newton",
        "mixture",
        "auto_normal",
    ]
    guide = entry.fit_guide("free_form", torch.rand(2, 1, 5, 6), steps=1)
    assert guide.num_images == 2 and guide.model is entry.model
    with pytest.raises(ValueError, match="unknown general guide 'freeform'; did you mean 'free"):
        entry.fit_guide("freeform", torch.rand(2, 1, 5, 6))
