"""Guides to scenes: AIR draws prefixes by their scores, slots of attention are exchangeable."""

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceGraph_ELBO

from capsule_zoo.guides.scenes.peeling import alike, color_at, focus
from capsule_zoo.guides.scenes.proposals import SubsetDistribution
from capsule_zoo.guides.scenes.recurrent import prefix_log_probs
from capsule_zoo.guides.scenes.windows import medians
from capsule_zoo.inference import fit_guide
from capsule_zoo.inference.annealing.path import ValueMessenger
from capsule_zoo.inference.check import latent_sites
from capsule_zoo.inference.log_weight import log_density, log_weights
from capsule_zoo.inference.objectives import summed_presences
from capsule_zoo.inference.objects import find_objects
from capsule_zoo.inference.posterior.fill_in import fill_in
from capsule_zoo.models.common import chunks
from capsule_zoo.models.scenes.counts import subsets_of
from capsule_zoo.registry import create, small_settings

GUIDES = ("peeling", "two-sweeps", "recurrent", "slot-attention")


def small(guide, **sizes):
    pyro.set_rng_seed(0)
    entry = create("scenes", **{**small_settings("scenes"), **sizes}).use_guide(guide)
    entry.model.double()
    entry.guide.double()
    with torch.no_grad():
        images = entry.model(batch_size=4).clamp(0, 1)
    return entry, images


def test_the_distribution_of_prefixes_is_that_of_stopping_at_each_step():
    stay = torch.randn(5, 3, dtype=torch.double)
    p = stay.sigmoid()
    stop_at = [1 - p[:, 0], p[:, 0] * (1 - p[:, 1]), p[:, 0] * p[:, 1] * (1 - p[:, 2]), p.prod(-1)]
    torch.testing.assert_close(prefix_log_probs(stay).exp(), torch.stack(stop_at, -1))


def test_air_draws_prefixes_of_all_lengths():
    entry, images = small("recurrent", slots=3)
    drawn = entry.guide(images.repeat(20, 1, 1, 1))
    assert (drawn.diff(dim=-1) <= 0).all()
    assert drawn.sum(-1).unique().tolist() == [0, 1, 2, 3]


def test_the_mean_gradient_of_a_draw_is_that_of_the_bound(monkeypatch):
    """Whatever the baseline says; it descends the squared error of what it expects."""
    logits, weight, baseline = (
        torch.randn(*shape, dtype=torch.double, requires_grad=True)
        for shape in ((2, 4), (2, 4), (2,))
    )
    rows = torch.ones(4, 3).tril(-1)
    log_q = logits.log_softmax(-1)
    bound = (log_q.exp() * (weight - log_q)).sum(-1).mean()
    exact = torch.autograd.grad(bound, (logits, weight), retain_graph=True)
    totals, error = [torch.zeros(2, 4, dtype=torch.double) for _ in exact], torch.zeros(2)
    for row in range(4):
        distribution = SubsetDistribution(weight, rows, log_q=log_q, baseline=baseline)
        monkeypatch.setattr(distribution, "draw_rows", lambda row=row: torch.full((2, 1), row))
        loss = summed_presences._loss_of_a_draw(distribution, baseline, torch.zeros(2))
        slopes = torch.autograd.grad(loss, (logits, weight, baseline), retain_graph=True)
        q = log_q[:, row].exp().detach()
        for total, slope in zip(totals, slopes, strict=False):
            total -= q[:, None] * slope
        error = error + q * slopes[2]
    for total, slope in zip(totals, exact, strict=True):
        torch.testing.assert_close(total, slope)
    expected = (log_q.exp() * (weight - log_q)).sum(-1)
    torch.testing.assert_close(error, (baseline - expected).detach())  # 2 / (2 images)


def test_pyros_own_objective_trains_air_and_its_baseline():
    entry, images = small("recurrent")
    TraceGraph_ELBO().loss_and_grads(entry.model, entry.guide, images)
    for part in (entry.guide.stay, entry.guide.expected, entry.guide.where, entry.guide.cell):
        assert all(p.grad.abs().max() > 0 for p in part.parameters())


@pytest.mark.parametrize("name", GUIDES)
def test_the_weight_of_a_draw_is_that_of_its_presences(name):
    """Slots that are off cancel: they are drawn from the prior on both sides."""
    entry, images = small(name)
    with torch.no_grad():
        torch.manual_seed(1)
        traced = log_weights(entry.model, entry.guide, images)[0]
        torch.manual_seed(1)
        distribution = entry.guide.presence_distribution(images, entry.guide.draw_proposals(images))
        row = distribution.draw_rows()
    drawn = distribution.log_weight.gather(1, row) - distribution.log_q.gather(1, row)
    torch.testing.assert_close(traced, drawn[:, 0])


def test_permuting_the_first_noise_permutes_the_slots():
    entry, images = small("slot-attention", slots=3)
    noise = torch.randn(4, 3, entry.guide.width, dtype=torch.double)
    order = torch.tensor([2, 0, 1])
    slots, middles = entry.guide.attend(images, images, noise)
    again, moved = entry.guide.attend(images, images, noise[:, order])
    torch.testing.assert_close(again, slots[:, order])
    torch.testing.assert_close(moved, middles[:, order])
    assert (slots[:, 0] - slots[:, 1]).abs().max() > 1e-3


def test_a_slot_stands_at_the_ink_that_it_attends_to():
    entry, images = small("slot-attention", slots=1)
    dot = torch.zeros_like(images)
    dot[:, :, 1, 8] = 1
    _, middle = entry.guide.attend(dot, dot, torch.randn(4, 1, entry.guide.width).double())
    assert (middle[:, 0, 0] > 0.5).all() and (middle[:, 0, 1] < -0.5).all()


def test_objects_are_found_at_places_that_are_drawn():
    entry, images = small("peeling")
    objects = find_objects(entry.model, entry.guide, images, draws=3)
    drawn = find_objects(entry.model, entry.guide, images, draws=3, temperature=0.5)
    same = find_objects(entry.model, entry.guide, images, draws=3, temperature=0.0)
    assert torch.equal(objects.log_evidence, same.log_evidence)
    assert (
        not torch.equal(objects.log_evidence, drawn.log_evidence) and entry.guide.temperature == 0
    )


@pytest.mark.parametrize("sizes", [{}, dict(image_shape=(3, 12, 10), ground="picture")])
@pytest.mark.parametrize("name", GUIDES)
def test_missing_pixels_are_left_out(name, sizes):
    entry, images = small(name, **sizes)
    pair = entry.model.with_missing_pixels(), entry.guide.with_missing_pixels()
    entry.objective.load_state_dict({"done": 400})
    torch.manual_seed(2)
    observed = torch.rand(4, 1, 12, 10) < 0.5
    half, values = images.where(observed, torch.nan), []
    for model, guide, batch in [(entry.model, entry.guide, images), (*pair, images), (*pair, half)]:
        torch.manual_seed(1)
        loss = entry.objective.differentiable_loss(model, guide, batch)
        loss.backward()
        with torch.no_grad():
            result = find_objects(model, guide, batch, draws=2)
        slopes = [p.grad.clone() for p in guide.parameters() if p.grad is not None]
        guide.zero_grad(set_to_none=True)
        assert all(slope.isfinite().all() for slope in slopes)
        assert result.unexplained.isfinite().all()
        values.append([loss.detach(), result.log_evidence, *slopes])
    for plain, switched in zip(values[0], values[1], strict=True):
        assert torch.equal(plain, switched)
    result, rows = guide.draw_proposals(half), subsets_of(entry.model.slots, images)
    means = model.blend(rows, result.pictures, result.ground.drawn)
    density = torch.distributions.Normal(means, model.sigma_image).log_prob(images[:, None])
    of_each = (density * observed[:, None]).flatten(2).sum(-1) + result.log_ratio @ rows.T
    of_each = (
        of_each
        + model.presence_distribution(images).log_prob(rows)
        + result.ground.log_ratio[:, None]
    )
    torch.testing.assert_close(guide.log_weights(half, result, rows), of_each)
    filled = fill_in(entry.model, entry.guide, images, observed, num_particles=4)
    assert filled.images.isfinite().all() and filled.log_hidden.isfinite().all()


def test_no_slot_looks_at_missing_pixels_and_grounds_are_medians_of_the_others():
    entry, _ = small("peeling", image_shape=(3, 12, 10), ground="picture", slots=1)
    images = torch.full((2, 3, 12, 10), 0.7).double()
    images[:, :, 1:4, 1:4] = torch.tensor([0.0, 1.0]).double()[:, None, None, None]
    images[:, :, 5:] = torch.nan
    guide = entry.guide.with_missing_pixels()
    left = guide.measure_residual(images, torch.full_like(images, 0.7))
    assert left[:, :, 5:].max() == 0 and left[:, :, 1:4, 1:4].min() > 0.2
    torch.testing.assert_close(medians(images, 1), torch.full((2, 3), 0.7).double())


@pytest.mark.parametrize(
    "sizes", [{}, dict(image_shape=(3, 12, 10), ground="picture", rotation=0.1)]
)
@pytest.mark.parametrize("name", GUIDES)
def test_proposals_are_sites_where_presences_are_summed_out(name, sizes, monkeypatch):
    """Their density is the one at given latents, and the weight that of all subsets by hand."""
    monkeypatch.setattr(chunks, "AT_ONCE", 1)  # the guide paints one image at a time
    entry, images = small(name, **sizes)
    model, guide = entry.with_enumerated_presences.model, entry.with_enumerated_presences.guide
    with torch.no_grad():
        torch.manual_seed(1)
        weight, _, drawn = log_weights(model, guide, images)
        torch.manual_seed(1)
        result = guide.draw_proposals(images)
        rows = subsets_of(model.slots, images)
        means = model.blend(rows, result.pictures, result.ground.drawn)
        log_joint = model.log_likelihood(images, means) + model.presence_distribution(
            images
        ).log_prob(rows)
        values = {n: site["value"] for n, site in latent_sites(drawn).items()}
        torch.manual_seed(1)  # of the first noise of slots
        with ValueMessenger({n: value.clone() for n, value in values.items()}):
            again = poutine.trace(guide).get_trace(images)
    by_hand = log_joint.logsumexp(-1) + result.log_ratio.sum(-1) + result.ground.log_ratio
    of_each = log_joint + result.log_ratio @ rows.T + result.ground.log_ratio[:, None]
    torch.testing.assert_close(guide.log_weights(images, result, rows), of_each)
    torch.testing.assert_close(weight, by_hand)
    torch.testing.assert_close(log_density(again, images), log_density(drawn, images))
    assert {f"slot_{slot}/scene_pose" for slot in range(model.slots)} < values.keys()


_FITTED = [
    ("peeling", method) for method in ("free_form", "semi_amortized", "corrected", "low_rank")
]


@pytest.mark.parametrize(
    "name, fitter", [*_FITTED, ("two-sweeps", "low_rank"), ("recurrent", "free_form")]
)
def test_general_guides_serve_the_model_that_sums_presences_out(name, fitter):
    entry, images = small(name)
    weights = []
    for steps in (1, 12):
        pair = entry.with_enumerated_presences
        guide = fit_guide(fitter, pair.model, pair.guide, images, steps=steps)
        with pyro.validation_enabled(False), torch.no_grad():
            torch.manual_seed(0)
            estimates = [
                log_weights(entry.with_enumerated_presences.model, guide, images)[0]
                for _ in range(8)
            ]
        weights.append(torch.stack(estimates).mean())
    assert weights[1] > weights[0]


def test_attention_keeps_to_one_color_where_objects_touch():
    """Both halves of a picture are unexplained; the color is that of the higher map."""
    red, blue = torch.eye(3)[[0, 2]]
    images = torch.zeros(2, 3, 8, 8)
    images[:, :, 2:6, :4], images[:, :, 2:6, 4:] = red[:, None, None], blue[:, None, None]
    maps = torch.zeros(2, 1, 8, 8)
    maps[0, 0, 3, 1] = maps[1, 0, 3, 6] = 1
    color = color_at(images, maps)
    torch.testing.assert_close(color, torch.stack([red, blue]))
    near = alike(images, color)
    assert (near[0, 0, 2:6, :4] == 1).all() and (near[1, 0, 2:6, 4:] == 1).all()
    assert near[0, 0, :, 4:].max() < 1e-6 and near[1, 0, :, :4].max() < 1e-6


def test_a_place_is_drawn_in_proportion_to_a_power_of_the_map():
    maps = torch.zeros(1, 1, 2, 3)
    maps[0, 0, 0, 0], maps[0, 0, 1, 1], maps[0, 0, 1, 2] = 1, 2, 4
    torch.testing.assert_close(focus(maps), torch.tensor([[2 / 3, 0.5]]))
    torch.manual_seed(0)
    column, row = focus(maps.expand(21_000, 1, 2, 3), temperature=0.5).T
    fractions = [
        ((row < 0) & (column < 0)),
        ((row > 0) & (column == 0)),
        ((row > 0) & (column > 0)),
    ]
    frequencies = torch.stack([fraction.float().mean() for fraction in fractions])
    torch.testing.assert_close(frequencies, torch.tensor([1, 4, 16]) / 21, atol=0.015, rtol=0)


def test_the_estimate_of_the_evidence_is_the_same_from_drawn_places():
    """Draws of a wide distribution at one place and at drawn ones; the places enter no density."""
    estimates = []
    for temperature in (0.0, 2.0):
        entry, images = small(
            "peeling", slots=1, sigma_image=0.5, **{"guide.temperature": temperature}
        )
        with torch.no_grad():
            torch.manual_seed(0)
            weight = log_weights(entry.model, entry.guide, images[:1].expand(4000, 1, 12, 10))[0]
        fraction = weight.exp()
        estimates.append((fraction.mean(), fraction.std() / len(fraction) ** 0.5, weight))
    (one, one_error, at_one), (drawn, drawn_error, at_drawn) = estimates
    assert one_error < 0.05 * one and drawn_error < 0.05 * drawn
    assert (at_one.std() - at_drawn.std()).abs() > 0.01  # the places do change the draws
    assert (one - drawn).abs() < 5 * (one_error**2 + drawn_error**2) ** 0.5


def test_the_density_of_proposals_that_are_sites_is_that_of_one_place():
    entry, images = small("peeling", **{"guide.temperature": 2.0})
    guide = entry.with_enumerated_presences.guide
    with torch.no_grad():
        drawn = poutine.trace(guide).get_trace(images)
        values = {n: site["value"] for n, site in latent_sites(drawn).items()}
        with ValueMessenger({n: value.clone() for n, value in values.items()}):
            again = poutine.trace(guide).get_trace(images)
    torch.testing.assert_close(log_density(again, images), log_density(drawn, images))


def test_medians_of_neighborhoods_leave_out_a_stroke():
    ramp = torch.linspace(0, 1, 40).expand(2, 3, 40, 40)
    struck = ramp.clone()
    struck[:, :, 18:21] = 1  # three rows of 40, in neighborhoods of 12
    plain, with_stroke = (medians(x, 10).unflatten(-1, (3, 10, 10)) for x in (ramp, struck))
    assert (plain - with_stroke).abs().max() < 0.15  # where the stroke changes pixels by up to 1
    assert (plain.diff(dim=-1) > 0.03).all()  # it follows the ramp
    torch.testing.assert_close(medians(struck, 1), struck.flatten(2).median(-1).values)
