"""Scenes: the blend by brute force, presences summed out exactly, and what the story promises."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceEnum_ELBO

from capsule_zoo.data.scenes import Objects, boxes_of
from capsule_zoo.guides import ConvolutionalEncoder, Guide, Peeling
from capsule_zoo.guides.scenes import proposals
from capsule_zoo.guides.scenes.peeling import blurred, focus
from capsule_zoo.inference import SummedPresences, count, find_objects, fit, log_weights, segment
from capsule_zoo.inference.evaluation.bound import point_sites
from capsule_zoo.inference.evaluation.objects import box_overlaps, foreground_ari, shown
from capsule_zoo.inference.posterior.annealing.path import scored
from capsule_zoo.models import Model, Scenes, Site, VariationalAutoencoder
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.common.trace_density import log_density
from capsule_zoo.models.scenes import CountLaw, Pictures, crop, moved, prefixes_of, subsets_of
from capsule_zoo.registry import create, load, save, small_sizes

LIKE = torch.zeros((), dtype=torch.float64)


def painted() -> ConvolutionalEncoder:
    """Return the guide of an autoencoder that paints grounds of 5x5 pixels."""
    return ConvolutionalEncoder(VariationalAutoencoder((3, 5, 5), 2, channels=3), 5)


FORMS = {
    "gray": dict(channels=1),
    "learned counts": dict(channels=1, counts="learned"),
    "turned": dict(channels=1, turn=1.0),
    "tinted": dict(channels=3, ground="color"),
    "textured": dict(channels=3, texture=True, ground="learned"),
    "gray on gray": dict(channels=1, ground="color"),
    "on a picture": dict(channels=3, ground="picture"),
    "on a painted ground": dict(channels=3, ground=painted),
}


def pair(slots: int = 3, channels: int = 1, texture: bool = False, sweeps: int = 1, **options):
    """Return a small model and its guide, in float64, and three images."""
    pyro.set_rng_seed(0)
    own = 1 + channels if texture else 1
    thing = VariationalAutoencoder((own, 6, 6), 2, channels=3)
    ground = options.pop("ground", "black")
    behind = painted() if ground is painted else None
    ground = behind.model if behind else ground
    model = Scenes((channels, 10, 12), thing, slots, ground=ground, **{"size": 6.0, **options})
    reader = ConvolutionalEncoder(thing, 5, context=channels)
    guide = Peeling(model, reader, glimpse=4, hidden=6, sweeps=sweeps, ground_reader=behind)
    images = torch.rand(3, channels, 10, 12, generator=torch.Generator().manual_seed(1))
    return model.double(), guide.double(), images.double()


def test_counts_have_the_law_that_they_are_given():
    counts = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    law = CountLaw(counts.log())
    rows = law.enumerate_support()
    torch.testing.assert_close(law.log_prob(rows).exp().sum(), torch.ones((), dtype=torch.float64))
    for number in range(4):
        mass = law.log_prob(rows)[rows.sum(-1) == number].exp()
        torch.testing.assert_close(mass.sum(), counts[number])
        assert mass.max() - mass.min() < 1e-12
    torch.manual_seed(0)
    drawn = law.sample((20_000,)).sum(-1)
    share = torch.stack([(drawn == number).double().mean() for number in range(4)])
    assert (share - counts).abs().max() < 5 * math.sqrt(0.25 / 20_000)
    torch.testing.assert_close(law.mean.sum(), drawn.mean(), atol=0.05, rtol=0)


def test_a_rate_is_a_bernoulli_in_every_slot():
    model, _, images = pair(rate=0.5)
    rows = subsets_of(3, LIKE)
    alone = dist.Bernoulli(torch.tensor(1 / 3, dtype=torch.float64)).log_prob(rows).sum(-1)
    torch.testing.assert_close(model.presence_law(images).log_prob(rows), alone)


def test_the_blend_of_all_presences_is_the_formula_pixel_by_pixel():
    model, _, _ = pair(channels=3, ground="color")
    torch.manual_seed(2)
    cover, color = torch.rand(2, 3, 1, 4, 5).double(), torch.rand(2, 3, 3, 1, 1).double()
    depth, ground = torch.randn(2, 3).double(), torch.rand(2, 3, 1, 1).double()
    rows = subsets_of(3, LIKE)
    found = model.blend(rows, Pictures(cover, color, depth), ground)
    for scene, (number, row) in itertools.product(range(2), enumerate(rows)):
        on = [slot for slot in range(3) if row[slot]]
        free = math.prod([1 - cover[scene, slot] for slot in on], start=torch.ones(1, 4, 5))
        mean = free * ground[scene]
        if on:
            weight = [cover[scene, slot] * depth[scene, slot].exp() for slot in on]
            mixed = sum(w * color[scene, slot] for w, slot in zip(weight, on, strict=True))
            mean = mean + (1 - free) * mixed / sum(weight)
        torch.testing.assert_close(found[scene, number], mean, atol=1e-3, rtol=0)


def test_a_picture_is_moved_to_a_window_and_read_there_again():
    rows = torch.linspace(-1, 1, 25)
    picture = (-4 * (rows[:, None] ** 2 + (rows - 0.3) ** 2)).exp()[None, None]
    usual = torch.tensor([0.4, 0.4])
    for pose in ([0.1, 0.2, -0.1], [0.1, 0.2, -0.1, 0.8]):
        at = torch.tensor([pose])
        again = crop(moved(picture, at, (60, 60), usual), at, (25, 25), usual)
        assert (again - picture)[..., 1:-1, 1:-1].abs().max() < 0.05
    placed = moved(torch.ones(1, 1, 25, 25), torch.tensor([[0.0, 0.5, -0.5]]), (60, 60), usual)
    x, y = focus(blurred(placed, 6.0))[0].tolist()
    assert (x, y) == pytest.approx((0.5, -0.5), abs=0.05)  # x to the right, y downwards


@pytest.mark.parametrize("form", FORMS)
def test_the_weight_of_a_draw_is_the_sum_over_all_presences_whatever_is_drawn(form, monkeypatch):
    """The identity on which training without a gradient of discrete draws rests."""
    model, guide, images = pair(**FORMS[form])
    for row in subsets_of(3, LIKE):
        chosen = row.expand(3, 1, 3)[:, 0]
        monkeypatch.setattr(proposals.SubsetLaw, "rsample", lambda self, _=(), z=chosen: z)
        torch.manual_seed(3)
        weight, _, _ = log_weights(model, guide, images)
        torch.manual_seed(3)
        law = guide.presence_law(images, guide.found(images))
        torch.testing.assert_close(weight, law.log_total, rtol=1e-10, atol=1e-10)


def test_the_sum_over_presences_is_that_of_enumeration_value_and_gradient():
    """TraceEnum_ELBO sums over z of the model; its guide draws every slot from its proposal."""
    model, guide, images = pair()
    parameters = [*model.parameters(), *guide.parameters()]

    def draws_all(images):
        found, plate = guide.found(images), model.plate(len(images))
        always = torch.ones(len(images), dtype=torch.bool)
        for slot, proposal in enumerate(found.proposals):
            guide._draw(f"slot_{slot}", proposal, proposal.sites, always, torch.Size(), plate)

    torch.manual_seed(4)
    objective = TraceEnum_ELBO(max_plate_nesting=1)
    summed = objective.differentiable_loss(model.with_enumerated_presences(), draws_all, images)
    torch.manual_seed(4)
    found = guide.found(images)
    law = guide.presence_law(images, found)
    unused = ((1 - law.rows) * found.log_ratio[:, None]).sum(-1)
    own = -(law.log_q + law.log_total[:, None] + unused).logsumexp(-1).sum()
    torch.testing.assert_close(own, summed, rtol=1e-10, atol=1e-10)
    for one, other in zip(
        torch.autograd.grad(own, parameters, allow_unused=True),
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
        known = log_density(scored(model, {**values, "scene_presence": both}, images), images)
        number = model.presence_law(images).log_prob(both)
        for order in some.orders():
            moved = {name: values[order.get(name, name)] for name in values}
            given = log_density(scored(some, moved, images), images)
            torch.testing.assert_close(given, known - number)


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


def test_a_flattened_law_gives_a_lower_bound_and_ends_after_its_updates():
    model, guide, images = pair()
    flat, exact = SummedPresences(updates=2), SummedPresences(updates=1)
    exact.load_state_dict({"done": 1})
    values = []
    for objective in (flat, exact, flat, flat):
        torch.manual_seed(6)
        values.append(objective.differentiable_loss(model, guide, images).item())
    assert values[0] > values[2] > values[1] == values[3]
    assert flat.state_dict() == {"done": 3}


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
    found = guide.found(images)
    whole = guide.presence_law(images, found)
    monkeypatch.setattr(proposals, "MOST_SUBSETS", 4)
    some = guide.presence_law(images, found)
    assert (some.log_total <= whole.log_total + 1e-9).all()
    for rows, log_q in zip(some.rows, some.log_q, strict=True):
        kept = rows[log_q > -math.inf]
        assert len(kept.unique(dim=0)) == len(kept)
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
        law = guide.presence_law(images.float(), guide.found(images.float()))
    for rows, log_q in zip(law.rows, law.log_q, strict=True):
        kept = rows[log_q > -math.inf]
        assert len(kept.unique(dim=0)) == len(kept) == len(rows.unique(dim=0))


def test_presences_of_more_slots_than_bits_are_told_apart(monkeypatch):
    _, guide, images = pair(slots=66)
    guide.eval()
    rows = torch.eye(66).to(images).expand(len(images), -1, -1)
    monkeypatch.setattr(type(guide), "_climbed", lambda *_: rows)
    law = guide.presence_law(images, guide.found(images))
    assert (law.log_q > -math.inf).all()


def test_training_sums_over_prefixes_where_there_are_many_slots():
    assert (
        len(prefixes_of(6, LIKE)) == 22
        and prefixes_of(3, LIKE).tolist() != subsets_of(3, LIKE).tolist()
    )
    _, guide, images = pair(slots=6)
    law = guide.presence_law(images, guide.found(images))
    assert law.rows.shape[1] == 22
    with torch.no_grad():
        assert guide.presence_law(images, guide.found(images)).rows.shape[1] == 64


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
        given = {**values, "scene_presence": torch.full((1, 1), presence).double(), **changed}
        run = poutine.trace(poutine.condition(model, given)).get_trace(batch_size=1)
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
    larger = model.on_canvas(20, 24, slots=5, rate=0.4)
    torch.manual_seed(8)
    picture, pose = torch.ones(1, 1, 6, 6).double(), torch.zeros(1, 3).double()
    areas = [
        moved(picture, pose, m.image_shape[1:], m.usual(pose)).sum().item() for m in (model, larger)
    ]
    assert areas[0] == pytest.approx(36, abs=1) and areas[1] == pytest.approx(36, abs=1)
    assert larger(batch_size=2).shape == (2, 1, 20, 24)
    found = find_objects(larger, guide.on_model(larger), torch.rand(2, 1, 20, 24).double())
    torch.testing.assert_close(found.count_probabilities.sum(-1), torch.ones(2).double())


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
    found = guide.found(images)
    pictures = torch.cat([proposal.drawn.picture for proposal in found.proposals])
    assert pictures.max() > 1 and pictures.min() < 0
    assert found.pictures.cover.max() <= 1 and found.pictures.cover.min() >= 0
    loss = SummedPresences().differentiable_loss(model, guide, images)
    loss.backward()
    assert loss.isfinite() and thing.paint.weight.grad.isfinite().all()
    assert log_weights(model, guide, images)[0].isfinite().all()


@pytest.mark.parametrize(
    "thing",
    ["part-whole", "shape-codes", "stacked-capsule-autoencoder", "generative-capsnet", "vae"],
)
def test_any_image_model_is_an_object(thing):
    sizes = {k: v for k, v in small_sizes(thing).items() if k != "image_shape"}
    if "template_size" in sizes:
        sizes["template_size"] = 5
    entry = create(
        "scenes",
        image_shape=(1, 20, 20),
        thing=thing,
        thing_sizes=sizes,
        window=12,
        size=10.0,
        slots=2,
    )
    images = torch.rand(3, 1, 20, 20)
    loss = entry.objective.differentiable_loss(entry.model, entry.guide, images)
    loss.backward()
    assert loss.isfinite()
    weight, _, _ = log_weights(entry.model.discretized(), entry.guide.discretized(), images)
    assert weight.isfinite().all()
    assert count(entry.model, entry.guide, images).shape == (3,)


@pytest.mark.parametrize("thing", ["part-whole", "stacked-capsule-autoencoder"])
def test_an_object_is_read_by_laws_with_a_density(thing):
    """Where the object's own guide has points, slots would seem to hold objects that are not."""
    sizes = {k: v for k, v in small_sizes(thing).items() if k != "image_shape"}
    own = {k: v for k, v in small_sizes("scenes").items() if k != "thing_sizes"}
    sizes["template_size"] = 5
    entry = create("scenes", **{**own, "window": 12}, thing=thing, thing_sizes=sizes)
    windows = torch.rand(2, 1, 12, 12)
    _, drawn, read = log_weights(entry.model.thing, entry.guide.reader, windows)
    assert not point_sites(drawn, read)
    inner = create(thing, image_shape=(1, 12, 12), **sizes)
    assert point_sites(*log_weights(inner.model, inner.guide, windows)[1:])


def test_a_trained_object_is_used_as_it_is(tmp_path):
    small = dict(image_shape=(1, 6, 6), latent=2, channels=3, hidden=5)
    save(create("vae", **small), tmp_path / "vae")
    entry = create(
        "scenes", image_shape=(1, 12, 10), thing=str(tmp_path / "vae"), train_thing=False, size=6.0
    )
    kept = load(tmp_path / "vae").model.state_dict()
    assert all(
        torch.equal(kept[name], value) for name, value in entry.model.thing.state_dict().items()
    )
    loss = entry.objective.differentiable_loss(entry.model, entry.guide, torch.rand(2, 1, 12, 10))
    loss.backward()
    assert not [*entry.model.thing.parameters(), *entry.guide.reader.parameters()]


def test_objects_that_do_not_fit_are_refused():
    thing = VariationalAutoencoder((2, 6, 6), 2, channels=3)
    with pytest.raises(ValueError, match="channels; objects of scenes"):
        Scenes((3, 10, 10), thing)
    with pytest.raises(ValueError, match="leave out thing_sizes"):
        create("scenes", thing="shape-codes-mnist", thing_sizes=dict(kinds=3))


@pytest.mark.parametrize("part", ["thing", "ground"])
@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("cnn", "explains labels; choose"),
        ("capsule-rbm", "has a density up to a constant; choose"),
        ("constellations", "draws points and no images; choose"),
    ],
)
def test_models_that_draw_no_images_are_refused(part, entry, problem):
    with pytest.raises(ValueError, match=f"{part} .*{problem}"):
        create("scenes", **{part: entry})


def test_sizes_of_a_ground_without_sizes_are_refused():
    with pytest.raises(ValueError, match="ground 'learned' has no sizes; leave out ground_sizes"):
        create("scenes", ground="learned", ground_sizes=dict(latent=3))


def test_what_is_found_is_scored_as_it_should_be():
    numbers = torch.zeros(1, 6, 8, dtype=torch.uint8)
    numbers[0, 1:3, 1:4], numbers[0, 3:6, 5:8] = 1, 2
    known = Objects(
        numbers,
        torch.tensor([[4, 7]]),
        boxes_of(numbers[:, None] == torch.tensor([1, 2])[:, None, None]),
    )
    assert known.boxes[0].tolist() == [[1, 1, 4, 3], [5, 3, 8, 6]]
    other = (3 - numbers) * (numbers > 0)  # the names of objects do not matter
    assert foreground_ari(other, known).item() == 1
    assert foreground_ari(torch.ones_like(numbers), known).item() == 0
    half = known.boxes.clone()
    half[0, 0, 2] = 2.5
    overlap = box_overlaps(half, torch.tensor([[True, True]]), known)
    assert overlap.tolist() == pytest.approx([0.5, 1])
    assert box_overlaps(half, torch.tensor([[False, True]]), known)[0] == 0


@pytest.mark.parametrize("form", ["gray", "tinted", "textured"])
def test_a_pixel_belongs_to_the_likeliest_component_of_a_mixture(form):
    model, guide, images = pair(**FORMS[form])
    images = images * (images > 0.5)
    images[0, :, 2, 3] = math.nan
    with torch.no_grad():
        found = guide.found(images.nan_to_num(0.5))
    on, ground = torch.tensor([[1.0, 0, 1], [1, 1, 1], [0, 0, 0]]).double(), found.ground.drawn
    cover, color, depth = found.pictures
    mean, numbers, owners, covered = shown(model, images, on, found.pictures, ground)
    bright = torch.ones(3)
    if color is None:  # objects make the ground brighter
        bright = (on[..., None, None] * cover[:, :, 0]).flatten(1).amax(-1).clamp_min(1e-9)
        color = ground + bright[:, None, None, None, None] * (1 - ground)
    colors = color * torch.ones(3, 3, *images.shape[1:])  # (scenes, slots, C, H, W)
    for b, y, x in itertools.product(range(3), range(10), range(12)):
        shares = on[b] * cover[b, :, 0, y, x]
        free = (1 - shares).prod()
        assert covered[b, y, x].item() == pytest.approx(1 - free.item())
        shares = shares / bright[b]
        free = (1 - shares).prod()
        weights = shares if depth is None else shares * depth[b].exp()
        weights = (1 - free) * weights / weights.sum().clamp_min(1e-9)
        behind = ground.expand_as(images)[b, :, y, x]
        of_ground, of_objects = free, weights
        if not images[b, 0, y, x].isnan():
            scale = (images[b] - mean[b]).square().nanmean().sqrt()
            law = dist.Normal(torch.stack([behind, *colors[b, :, :, y, x]]), scale)
            density = law.log_prob(images[b, :, y, x]).sum(-1).exp()
            of_ground, of_objects = free * density[0], weights * density[1:]
        assert owners[b, y, x] == (1 + of_objects.argmax() if shares.any() else 0)
        assert numbers[b, y, x] == torch.stack([of_ground, *of_objects]).argmax()
    assert form == "gray" or owners[:2].unique().numel() > 2
    assert numbers[:2].unique().numel() > 2 and not numbers[2].any()


@pytest.mark.parametrize("brightness", [0.3, 1.0])
def test_a_dim_object_shows_where_it_is_half_as_bright_as_at_its_brightest(brightness):
    model, _, _ = pair()
    cover = torch.zeros(1, 3, 1, 10, 12, dtype=torch.float64)
    cover[0, 1, 0, 4, 3:8] = brightness * torch.tensor([0.2, 0.45, 1.0, 0.55, 0.1])
    image, on = cover[:, 1], torch.tensor([[0.0, 1, 0]]).double()
    drawn, numbers, owners, _ = shown(model, image, on, Pictures(cover, None, None), image[0] * 0)
    torch.testing.assert_close(drawn, image, atol=1e-3, rtol=0)
    assert numbers.nonzero()[:, 1:].tolist() == [[4, 5], [4, 6]] and numbers.max() == 2
    assert owners.nonzero()[:, 1:].tolist() == [[4, x] for x in range(3, 8)]


def test_a_blank_picture_and_one_with_too_many_objects_are_told_apart():
    model, guide, _ = pair(slots=1)
    blank = torch.zeros(1, 1, 10, 12).double()
    full = torch.ones(1, 1, 10, 12).double()
    found = find_objects(model, guide, torch.cat([blank, full]))
    assert found.unexplained[1] > 0.1 > found.unexplained[0]
    assert segment(model, guide, blank).shape == (1, 1, 10, 12)


def test_any_image_model_is_a_ground(tmp_path):
    behind = dict(image_shape=(3, 8, 8), latent=2, channels=3, hidden=5)
    save(create("vae", **behind), tmp_path / "vae")
    sizes = {**small_sizes("scenes"), "image_shape": (3, 12, 10), "train_ground": False}
    entry = create("scenes", ground=str(tmp_path / "vae"), **sizes)
    model, images = entry.model, torch.rand(2, 3, 12, 10)
    entry.objective.differentiable_loss(model, entry.guide, images).backward()
    assert not [*model.ground.parameters()]
    assert all(p.grad.abs().sum() > 0 for p in entry.guide.ground_reader.parameters())
    empty, code = torch.zeros(2, 2), torch.randn(2, 2)
    given = {"scene_presence": empty, "ground/image_code": code}
    nodes = poutine.trace(poutine.condition(model, given)).get_trace(batch_size=2).nodes
    alone = load(tmp_path / "vae").model.mean_image(code)
    enlarged = torch.nn.functional.interpolate(alone, (12, 10), mode="bilinear")
    torch.testing.assert_close(nodes["image"]["fn"].mean, enlarged)
    save(entry, tmp_path / "scenes")
    again = load(tmp_path / "scenes").model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_a_learned_law_of_sizes_starts_at_the_given_one_and_moves_towards_the_true_size():
    """Squares of 6 pixels, given as 4: the median of log sizes is log 1.5 = .41."""
    given, _, _ = pair(slots=1, size=4.0, sigma_image=0.1)
    model, guide, _ = pair(slots=1, size=4.0, sigma_image=0.1, size_law="learned")
    model.load_state_dict(given.state_dict(), strict=False)  # weights of before have no such law
    law, old = model.pose_law(LIKE).base_dist, given.pose_law(LIKE).base_dist
    torch.testing.assert_close(law.mean, old.mean, rtol=0, atol=0)
    torch.testing.assert_close(law.stddev, old.stddev)
    with torch.no_grad():
        [*model.thing.parameters()][-1].fill_(4)  # pictures are full squares
    pose = torch.randn(64, 3).double() * LIKE.new_tensor([0, 0.2, 0.2])
    pose[:, 0] = math.log(1.5)
    images = moved(LIKE.new_ones(64, 1, 6, 6), pose, (10, 12), model.usual(pose)).clamp(0, 1)
    how = dict(lr=0.02, batch_size=16, objective=SummedPresences(updates=1))
    fit(model, guide, images, steps=80, **how)
    assert 0.35 < model.size_moments[0] < 0.46


def test_a_picture_that_all_scenes_share_is_learned():
    pyro.set_rng_seed(0)
    picture = torch.linspace(0.1, 0.9, 12).expand(3, 10, 12).contiguous()
    images = (picture + 0.05 * torch.randn(64, 3, 10, 12)).clamp(0, 1)
    sizes = {**small_sizes("scenes"), "image_shape": (3, 10, 12), "rate": 0.01}
    entry = create("scenes", ground="learned-picture", **sizes)
    how = dict(steps=80, lr=0.05, batch_size=16, objective=SummedPresences(updates=1))
    fit(entry.model, entry.guide, images, **how)
    found = entry.model.ground_logits.sigmoid()
    assert (found - picture).abs().mean() < 0.05
    larger = entry.model.on_canvas(20, 24)
    given = {"scene_presence": torch.zeros(1, 2)}
    image = poutine.trace(poutine.condition(larger, given)).get_trace(batch_size=1).nodes["image"]
    small = torch.nn.functional.avg_pool2d(image["fn"].mean, 2)[0]
    assert (small - found).abs().mean() < 0.02


def test_grounds_that_do_not_fit_are_refused():
    thing, ground = VariationalAutoencoder((1, 6, 6), 2), VariationalAutoencoder((1, 8, 8), 2)
    with pytest.raises(ValueError, match="needs 3 channels, at dim -1"):
        Scenes((3, 10, 10), thing, ground=ground)
    model = Scenes((1, 10, 10), thing, ground=ground)
    with pytest.raises(ValueError, match="give its guide as ground_reader"):
        Peeling(model, ConvolutionalEncoder(thing, 5))
    with pytest.raises(ValueError, match="leave out ground_sizes"):
        create("scenes", ground="scenes-mnist", ground_sizes=dict(latent=3))
