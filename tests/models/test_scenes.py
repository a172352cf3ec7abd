"""Scenes: the blend by brute force, presences summed out exactly, and what the story promises."""

import itertools
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from small_scenes import FORMS, LIKE, pair

from capsule_zoo.guides import AttendInferRepeat
from capsule_zoo.guides.scenes import proposals
from capsule_zoo.guides.scenes.peeling import blur_maps, focus
from capsule_zoo.inference import SummedPresences, fit, log_weights
from capsule_zoo.inference.annealing.path import score_latents
from capsule_zoo.inference.objects import find_objects
from capsule_zoo.models.common.trace_density import log_density
from capsule_zoo.models.scenes.counts import CountDistribution, prefixes_of, subsets_of
from capsule_zoo.models.scenes.pictures import Pictures, crop, move_pictures


def test_counts_have_the_distribution_that_they_are_given():
    counts = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    distribution = CountDistribution(counts.log())
    rows = distribution.enumerate_support()
    torch.testing.assert_close(
        distribution.log_prob(rows).exp().sum(), torch.ones((), dtype=torch.float64)
    )
    for number in range(4):
        mass = distribution.log_prob(rows)[rows.sum(-1) == number].exp()
        torch.testing.assert_close(mass.sum(), counts[number])
        assert mass.max() - mass.min() < 1e-12
    torch.manual_seed(0)
    drawn = distribution.sample((20_000,)).sum(-1)
    fraction = torch.stack([(drawn == number).double().mean() for number in range(4)])
    assert (fraction - counts).abs().max() < 5 * math.sqrt(0.25 / 20_000)
    torch.testing.assert_close(distribution.mean.sum(), drawn.mean(), atol=0.05, rtol=0)


def test_a_rate_is_a_bernoulli_in_every_slot():
    model, _, images = pair(rate=0.5)
    rows = subsets_of(3, LIKE)
    alone = dist.Bernoulli(torch.tensor(1 / 3, dtype=torch.float64)).log_prob(rows).sum(-1)
    torch.testing.assert_close(model.presence_distribution(images).log_prob(rows), alone)


def test_the_blend_of_all_presences_is_the_formula_pixel_by_pixel():
    model, _, _ = pair(channels=3, ground="color")
    torch.manual_seed(2)
    cover, color = torch.rand(2, 3, 1, 4, 5).double(), torch.rand(2, 3, 3, 1, 1).double()
    depth, ground = torch.randn(2, 3).double(), torch.rand(2, 3, 1, 1).double()
    rows = subsets_of(3, LIKE)
    means = model.blend(rows, Pictures(cover, color, depth), ground)
    for scene, (number, row) in itertools.product(range(2), enumerate(rows)):
        on = [slot for slot in range(3) if row[slot]]
        free = math.prod([1 - cover[scene, slot] for slot in on], start=torch.ones(1, 4, 5))
        mean = free * ground[scene]
        if on:
            weight = [cover[scene, slot] * depth[scene, slot].exp() for slot in on]
            mixed = sum(w * color[scene, slot] for w, slot in zip(weight, on, strict=True))
            mean = mean + (1 - free) * mixed / sum(weight)
        torch.testing.assert_close(means[scene, number], mean, atol=1e-3, rtol=0)


def test_a_picture_is_moved_to_a_window_and_read_there_again():
    rows = torch.linspace(-1, 1, 25)
    picture = (-4 * (rows[:, None] ** 2 + (rows - 0.3) ** 2)).exp()[None, None]
    usual = torch.tensor([0.4, 0.4])
    for pose in ([0.1, 0.2, -0.1], [0.1, 0.2, -0.1, 0.8]):
        at = torch.tensor([pose])
        again = crop(move_pictures(picture, at, (60, 60), usual), at, (25, 25), usual)
        assert (again - picture)[..., 1:-1, 1:-1].abs().max() < 0.05
    placed = move_pictures(
        torch.ones(1, 1, 25, 25), torch.tensor([[0.0, 0.5, -0.5]]), (60, 60), usual
    )
    x, y = focus(blur_maps(placed, 6.0))[0].tolist()
    assert (x, y) == pytest.approx((0.5, -0.5), abs=0.05)  # x to the right, y downwards


@pytest.mark.parametrize("form", FORMS)
def test_the_weight_of_a_draw_is_the_sum_over_all_presences_whatever_is_drawn(form, monkeypatch):
    """The identity on which training without a gradient of discrete draws rests."""
    model, guide, images = pair(**FORMS[form])
    for row in subsets_of(3, LIKE):
        subset = row.expand(3, 1, 3)[:, 0]
        monkeypatch.setattr(proposals.SubsetDistribution, "rsample", lambda self, _=(), z=subset: z)
        torch.manual_seed(3)
        weight, _, _ = log_weights(model, guide, images)
        torch.manual_seed(3)
        distribution = guide.presence_distribution(images, guide.draw_proposals(images))
        torch.testing.assert_close(weight, distribution.log_total, rtol=1e-10, atol=1e-10)


def test_the_sum_over_presences_is_that_of_enumeration_value_and_gradient():
    """TraceEnum_ELBO sums over z of the model; its guide draws every slot from its proposal."""
    model, guide, images = pair()
    parameters = [*model.parameters(), *guide.parameters()]

    def draws_all(images):
        result, plate = guide.draw_proposals(images), model.plate(len(images))
        always = torch.ones(len(images), dtype=torch.bool)
        for slot, proposal in enumerate(result.proposals):
            guide._draw(f"slot_{slot}", proposal, proposal.sites, always, torch.Size(), plate)

    torch.manual_seed(4)
    objective = TraceEnum_ELBO(max_plate_nesting=1)
    summed = objective.differentiable_loss(model.with_enumerated_presences(), draws_all, images)
    torch.manual_seed(4)
    result = guide.draw_proposals(images)
    distribution = guide.presence_distribution(images, result)
    unused = ((1 - distribution.rows) * result.log_ratio[:, None]).sum(-1)
    loss = -(distribution.log_q + distribution.log_total[:, None] + unused).logsumexp(-1).sum()
    torch.testing.assert_close(loss, summed, rtol=1e-10, atol=1e-10)
    for one, other in zip(
        torch.autograd.grad(loss, parameters, allow_unused=True),
        torch.autograd.grad(summed, parameters, allow_unused=True),
        strict=True,
    ):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_scenes_of_a_given_number_of_objects_have_the_joint_density_given_it(form):
    """Whatever the order of the objects: a name for each of the S! orders of the slots."""
    model, guide, images = pair(slots=2, **FORMS[form])
    with torch.no_grad():
        torch.manual_seed(0)
        trace = poutine.trace(guide.with_objects(2)).get_trace(images)
        some = model.with_objects(2)
        values = {site.name: trace.nodes[site.name]["value"] for site in some.sites}
        assert "scene_presence" not in trace.nodes and len(some.orders()) == 2
        both = images.new_ones(3, 2)
        log_joint = log_density(
            score_latents(model, {**values, "scene_presence": both}, images), images
        )
        number = model.presence_distribution(images).log_prob(both)
        for order in some.orders():
            moved = {name: values[order.get(name, name)] for name in values}
            log_conditional = log_density(score_latents(some, moved, images), images)
            torch.testing.assert_close(log_conditional, log_joint - number)


@pytest.mark.parametrize("form", FORMS)
def test_the_objective_is_the_elbo_of_pyro_value_and_gradient(form):
    model, guide, images = pair(**FORMS[form])
    parameters = [*model.parameters(), *guide.parameters()]
    objective = SummedPresences(updates=1)
    objective.load_state_dict({"done": 1})
    losses = []
    for loss in (objective.differentiable_loss, Trace_ELBO().differentiable_loss):
        torch.manual_seed(5)
        losses.append(loss(model, guide, images))
    losses[1] = losses[1] / len(images)
    torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-10)
    pairs = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in losses)
    for one, other in zip(*pairs, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_flattened_distribution_gives_a_lower_bound_and_ends_after_its_updates():
    model, guide, images = pair()
    flat, exact = SummedPresences(updates=2), SummedPresences(updates=1)
    exact.load_state_dict({"done": 1})
    values = []
    for objective in (flat, exact, flat, flat):
        torch.manual_seed(6)
        values.append(objective.differentiable_loss(model, guide, images).item())
    assert values[0] > values[2] > values[1] == values[3]
    assert flat.state_dict() == {"done": 3}


def test_a_training_that_ends_before_presences_are_decided_is_told():
    model, guide, images = pair()
    air = AttendInferRepeat(model, guide.reader, hidden=6).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model, guide, images, steps=3, batch_size=3, objective=SummedPresences(updates=3))
        fit(model, air, images, steps=2, batch_size=3, objective=SummedPresences(updates=3))
    with pytest.warns(UserWarning, match=r"cut short \(2 steps\), before presences .* 15 steps"):
        fit(model, guide, images, steps=2, batch_size=3, objective=SummedPresences(updates=3))


def test_divergences_in_place_of_log_ratios_are_no_bound():
    """Two values of u, one slot: p(x) = a + p_1 F, and E_q log(a + e^-KL f) exceeds its log."""
    prior, guide = torch.tensor([0.01, 0.99]), torch.tensor([0.5, 0.5])
    fits, absent = torch.tensor([1.0, 0.0]), 1.0
    evidence = math.log(absent + (prior * fits).sum())
    divergence = (guide * (guide / prior).log()).sum()
    with_divergence = (guide * (absent + (-divergence).exp() * fits).log()).sum()
    with_ratio = (guide * (absent + prior / guide * fits).log()).sum()
    assert with_ratio < evidence < with_divergence - 0.05


def test_a_family_of_presences_counts_none_twice_and_stays_below_the_sum(monkeypatch):
    _, guide, images = pair(slots=4)
    guide.eval()
    result = guide.draw_proposals(images)
    whole = guide.presence_distribution(images, result)
    monkeypatch.setattr(proposals, "MOST_SUBSETS", 4)
    some = guide.presence_distribution(images, result)
    assert (some.log_total <= whole.log_total + 1e-9).all()
    for rows, log_q in zip(some.rows, some.log_q, strict=True):
        subsets = rows[log_q > -math.inf]
        assert len(subsets.unique(dim=0)) == len(subsets)
    best = whole.rows[torch.arange(3), whole.log_q.argmax(1)]
    assert (some.log_prob(best) > -math.inf).all()


def test_presences_of_many_slots_are_searched_without_a_list_of_all():
    rows = subsets_of(4, LIKE)
    for most in range(5):
        assert torch.equal(subsets_of(4, LIKE, most), rows[rows.sum(1) <= most])
    _, guide, images = pair(slots=30)
    guide.float()
    guide.model.float()
    with torch.no_grad():
        distribution = guide.presence_distribution(
            images.float(), guide.draw_proposals(images.float())
        )
    for rows, log_q in zip(distribution.rows, distribution.log_q, strict=True):
        subsets = rows[log_q > -math.inf]
        assert len(subsets.unique(dim=0)) == len(subsets) == len(rows.unique(dim=0))


def test_presences_of_more_slots_than_bits_are_told_apart(monkeypatch):
    _, guide, images = pair(slots=66)
    guide.eval()
    rows = torch.eye(66).to(images).expand(len(images), -1, -1)
    monkeypatch.setattr(type(guide), "_climb", lambda *_: rows)
    distribution = guide.presence_distribution(images, guide.draw_proposals(images))
    assert (distribution.log_q > -math.inf).all()


def test_training_sums_over_prefixes_where_there_are_many_slots():
    assert (
        len(prefixes_of(6, LIKE)) == 22
        and prefixes_of(3, LIKE).tolist() != subsets_of(3, LIKE).tolist()
    )
    _, guide, images = pair(slots=6)
    distribution = guide.presence_distribution(images, guide.draw_proposals(images))
    assert distribution.rows.shape[1] == 22
    with torch.no_grad():
        assert guide.presence_distribution(images, guide.draw_proposals(images)).rows.shape[1] == 64


@pytest.mark.parametrize("form", FORMS)
def test_a_second_sweep_is_a_guide_too(form):
    model, guide, images = pair(slots=2, sweeps=2, **FORMS[form])
    weight, trace, _ = log_weights(model, guide, images)
    assert weight.isfinite().all() and trace.nodes["scene_presence"]["value"].shape == (3, 2)


def test_taking_an_object_away_and_putting_it_elsewhere():
    model, _, _ = pair(slots=1)
    pyro.set_rng_seed(7)
    trace = poutine.trace(model).get_trace(batch_size=1)
    values = {
        n: s["value"]
        for n, s in trace.nodes.items()
        if n.startswith("slot_0/") and s["type"] == "sample" and n != "slot_0/images"
    }

    def mean(presence: float, **changed):
        latents = {**values, "scene_presence": torch.full((1, 1), presence).double(), **changed}
        run = poutine.trace(poutine.condition(model, latents)).get_trace(batch_size=1)
        return run.nodes["image"]["fn"].mean.detach()

    assert mean(0.0).abs().max() == 0
    moves = [
        mean(1.0, **{"slot_0/scene_pose": torch.tensor([[0.0, x, 0.0]]).double()})
        for x in (-0.4, 0.4)
    ]
    centers = [(image[0, 0].sum(0) * torch.arange(12)).sum() / image.sum() for image in moves]
    assert centers[1] - centers[0] == pytest.approx(0.8 * 6, abs=0.5)


def test_another_canvas_keeps_the_size_of_objects_in_pixels():
    model, guide, _ = pair()
    larger = model.with_canvas(20, 24, slots=5, rate=0.4)
    torch.manual_seed(8)
    picture, pose = torch.ones(1, 1, 6, 6).double(), torch.zeros(1, 3).double()
    areas = [
        move_pictures(picture, pose, m.image_shape[1:], m.usual(pose)).sum().item()
        for m in (model, larger)
    ]
    assert areas[0] == pytest.approx(36, abs=1) and areas[1] == pytest.approx(36, abs=1)
    assert larger(batch_size=2).shape == (2, 1, 20, 24)
    objects = find_objects(larger, guide.on_model(larger), torch.rand(2, 1, 20, 24).double())
    torch.testing.assert_close(objects.count_probabilities.sum(-1), torch.ones(2).double())


def test_a_learned_distribution_of_sizes_starts_at_the_given_one_and_moves_towards_the_true_size():
    """Squares of 6 pixels, given as 4: the median of log sizes is log 1.5 = .41."""
    base, _, _ = pair(slots=1, size=4.0, sigma_image=0.1)
    model, guide, _ = pair(slots=1, size=4.0, sigma_image=0.1, size_distribution="learned")
    model.load_state_dict(
        base.state_dict(), strict=False
    )  # weights of before have no such distribution
    distribution, old = (
        model.pose_distribution(LIKE).base_dist,
        base.pose_distribution(LIKE).base_dist,
    )
    torch.testing.assert_close(distribution.mean, old.mean, rtol=0, atol=0)
    torch.testing.assert_close(distribution.stddev, old.stddev)
    with torch.no_grad():
        [*model.thing.parameters()][-1].fill_(4)  # pictures are full squares
    pose = torch.randn(64, 3).double() * LIKE.new_tensor([0, 0.2, 0.2])
    pose[:, 0] = math.log(1.5)
    images = move_pictures(LIKE.new_ones(64, 1, 6, 6), pose, (10, 12), model.usual(pose)).clamp(
        0, 1
    )
    settings = dict(lr=0.02, batch_size=16, objective=SummedPresences(updates=1))
    fit(model, guide, images, steps=80, **settings)
    assert 0.35 < model.size_moments[0] < 0.46


def test_the_number_of_a_poisson_process_grows_with_the_area():
    model, _, _ = pair(slots=4, **FORMS["poisson"], rate=0.6)
    expected = 0.6 * 10 * 12 / 6.0**2  # rate for each area of size * size
    torch.testing.assert_close(model.log_expected_count().exp(), LIKE + expected)
    prior, rows = model.presence_distribution(LIKE), subsets_of(4, LIKE)
    numbers = rows.sum(1)
    poisson = torch.distributions.Poisson(LIKE + expected).log_prob(torch.arange(5.0).double())
    truncated = poisson - poisson.logsumexp(0)  # a scene of this size has four slots
    log_sets = torch.tensor([math.log(math.comb(4, int(n))) for n in numbers])
    torch.testing.assert_close(prior.log_prob(rows), truncated[numbers.long()] - log_sets)
    large = model.with_canvas(20, 36)
    torch.testing.assert_close(large.log_expected_count().exp(), LIKE + 6 * expected)
    large.log_expected_count().backward()
    assert model.log_intensity.grad == 1
    with pytest.raises(ValueError, match="poisson"):
        pair()[0].log_expected_count()
