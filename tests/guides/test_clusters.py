"""Presences of whole pictures: sums over clusters compared with sums over all subsets."""

import itertools
from dataclasses import replace

import pyro
import pytest
import torch

from capsule_zoo import create
from capsule_zoo.guides.scenes.clusters import CLOSE, best_of, convolve, presence_of
from capsule_zoo.guides.scenes.whole_pictures import PictureReader
from capsule_zoo.models.scenes.counts import subsets_of
from capsule_zoo.models.scenes.pictures import Pictures
from capsule_zoo.models.scenes.places import UniformPlaces

SIZE = 6.0


@pytest.fixture(autouse=True)
def precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def reader_of(image, power=1.0, **options):
    """Return a reader with random weights for a picture (C, H, W)."""
    pyro.set_rng_seed(0)
    arguments = dict(texture=True, counts="poisson", size=SIZE, window=5, slots=2)
    small = dict(thing_settings=dict(latent=2, channels=3, guide=dict(hidden=5)))
    entry = create(
        "scenes", image_shape=(len(image), 12, 12), sigma_image=0.3, **arguments | small | options
    )
    return PictureReader(entry.guide.eval(), image, power)


def brute_force(reader, patches):
    """Return log weights of all subsets of proposals, each painted on the whole picture."""
    rows = subsets_of(len(patches), patches.log_ratio)
    means = torch.stack([reader.picture.paint(patches, row) for row in rows])
    empty = reader.model.log_likelihood(
        reader.picture.image[None], reader.picture.ground[None, None]
    )[0]
    scores = reader.model.log_likelihood(reader.picture.image[None], means[None])[0]
    return rows, reader.power * (scores - empty) + rows @ patches.log_ratio


@pytest.mark.parametrize("power", [1.0, 0.3])
@pytest.mark.parametrize("channels", [1, 3])
def test_clusters_sum_as_all_subsets_do(channels, power):
    image = torch.rand(channels, 15, 26)
    reader = reader_of(image, power)
    places = torch.tensor([[3, 4], [5, 6], [4, 20], [11, 21], [12, 5], [1, 25], [14, 0]])
    patches = reader.propose(places, reader.picture.ground)
    clusters = reader.clusters(patches)
    assert 1 < len(clusters) < len(patches)  # some interact, and some do not
    rows, log_weight = brute_force(reader, patches)
    total = sum(cluster.log_row_weight.logsumexp(0) for cluster in clusters)
    torch.testing.assert_close(total, log_weight.logsumexp(0), atol=1e-10, rtol=0)
    presence = torch.empty(len(patches))
    for cluster in clusters:
        presence[cluster.members] = cluster.presence
    torch.testing.assert_close(presence, log_weight.softmax(0) @ rows, atol=1e-10, rtol=0)
    counts = torch.zeros(len(patches) + 1)
    counts.index_add_(0, rows.sum(1).long(), log_weight.softmax(0))
    torch.testing.assert_close(convolve([c.counts for c in clusters]), counts, atol=1e-10, rtol=0)
    parameters = [p for p in reader.guide.parameters() if p.requires_grad]
    parameters += [p for p in reader.guide.model.parameters() if p.requires_grad]
    exact, ours = (
        torch.autograd.grad(x, parameters, retain_graph=True, allow_unused=True)
        for x in (log_weight.logsumexp(0), total)
    )
    assert sum(g is not None and bool(g.abs().sum() > 0) for g in exact) > 10
    for a, b in zip(exact, ours, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_the_log_weights_of_two_halves_add_up():
    """A picture that is cut along an empty strip has the sum of log weights of its parts."""
    image = torch.rand(1, 14, 90)
    image[..., 30:60] = 0
    reader = reader_of(image)
    places = torch.tensor([[5, 8], [7, 12], [6, 80]])
    patches = reader.propose(places, reader.picture.ground)
    whole = sum(c.log_row_weight.logsumexp(0) for c in reader.clusters(patches))
    halves = []
    for part, mine in ((slice(0, 45), [0, 1]), (slice(45, 90), [2])):
        half = reader_of(image[..., part])
        shifted = places[mine] - torch.tensor([0, part.start])
        proposed = half.propose(shifted, half.picture.ground)
        halves.append(sum(c.log_row_weight.logsumexp(0) for c in half.clusters(proposed)))
        shift = torch.tensor([0.0, part.start, 0.0])
        torch.testing.assert_close(proposed.pose + shift, patches.pose[mine])
    torch.testing.assert_close(whole, sum(halves), atol=1e-10, rtol=0)
    number = sum(
        reader_of(image[..., p]).model.log_expected_count().exp()
        for p in (slice(0, 45), slice(45, 90))
    )
    torch.testing.assert_close(reader.model.log_expected_count().exp(), number)


@pytest.mark.parametrize("contrast", [1.0, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_a_large_cluster_is_split_where_members_are_certain(seed, contrast):
    """Its best presences are those of all subsets, and so are the probabilities, nearly."""
    generator = torch.Generator().manual_seed(seed)
    image = contrast * torch.rand(1, 14, 40, generator=generator)
    reader, number = reader_of(image), 9
    reader.most = 4
    places = torch.stack([torch.full((number,), 7), 2 + 4 * torch.arange(number)], 1)
    with torch.no_grad():
        patches = reader.propose(places, reader.picture.ground)
        surprise = 10 * torch.randn(number, generator=generator)
        patches = replace(patches, log_ratio=patches.log_ratio + surprise)
        ((together, _),) = reader.picture.group(patches)
        clusters = reader.clusters(patches)
        rows, log_weight = brute_force(reader, patches)
    assert len(together) == number and len(clusters) > 1
    torch.testing.assert_close(best_of(clusters), rows[log_weight.argmax()])
    exact = max(len(cluster.members) for cluster in clusters[1:]) <= reader.most
    probability = log_weight.softmax(0) @ rows
    difference = (presence_of(clusters) - probability).abs().max()
    assert difference < (0.002 if exact else 0.06)


def test_two_objects_give_way_to_one_that_explains_both():
    """No flip of one or two leads there: a half next to the whole explains less than two halves."""
    reader = reader_of(torch.rand(1, 15, 15))
    with torch.no_grad():
        patches = reader.propose(torch.tensor([[7, 6], [7, 9], [7, 7]]), reader.picture.ground)
    corner = patches.corner[:1].expand(3, 2)
    cover = torch.zeros_like(patches.cover)
    top, left = (5 - corner[0]).tolist()
    cover[0, top : top + 6, left : left + 3] = cover[1, top : top + 6, left + 3 : left + 6] = 0.9
    cover[2] = cover[:2].sum(0)
    layers = reader.model.layers(
        Pictures(cover[:, None, None], torch.ones(3, 1, 1, 1, 1), torch.zeros(3, 1))
    )
    patches = replace(patches, layers=tuple(x[:, 0] for x in layers), cover=cover, corner=corner)
    patches = replace(patches, log_ratio=torch.tensor([-15.0, -15.0, -20.0]))
    drawn = reader.picture.paint(patches, torch.tensor([0.0, 0.0, 1.0]))
    reader.picture, reader.most = replace(reader.picture, image=drawn), 2
    halves = torch.tensor([1.0, 1.0, 0.0])
    torch.testing.assert_close(best_of(reader.clusters(patches, halves)), 1 - halves)


def test_proposals_that_paint_nothing_are_clusters_of_one():
    reader = reader_of(torch.rand(1, 15, 26))
    with torch.no_grad():
        patches = reader.propose(torch.tensor([[3, 4], [5, 6], [4, 20]]), reader.picture.ground)
        empty = tuple(layer.index_fill(0, torch.tensor([2]), 0.0) for layer in patches.layers)
        cover = patches.cover.index_fill(0, torch.tensor([2]), 0.0)
        clusters = reader.clusters(replace(patches, layers=empty, cover=cover))
    (alone,) = (cluster for cluster in clusters if 2 in cluster.members)
    assert len(alone.members) == 1
    torch.testing.assert_close(alone.presence[0], patches.log_ratio[2].sigmoid())
    assert reader.clusters(patches[torch.zeros(0).long()]) == []


def test_uniform_places_have_a_density_that_telescopes():
    mean, scale = torch.zeros(3), torch.ones(3)
    x = torch.linspace(-2, 2, 4001)
    pose = torch.stack([torch.zeros_like(x), x, torch.zeros_like(x)], 1)
    density = UniformPlaces(mean, scale, torch.tensor([0.1, 0.1])).log_prob(pose).exp()
    at_origin = UniformPlaces(mean, scale, torch.tensor([0.1, 0.1])).log_prob(torch.zeros(3)).exp()
    torch.testing.assert_close(
        torch.trapezoid(density, x) / at_origin, torch.tensor(2.0), atol=1e-6, rtol=0
    )
    draws = UniformPlaces(mean, scale, torch.tensor([0.3, 0.1])).sample([200_000])
    assert draws[:, 1].var() == pytest.approx(1 / 3 + 0.09, abs=0.01)  # 5 standard errors: .004


def test_the_power_measures_errors_that_neighboring_pixels_share():
    """Noise that is smoothed has smaller pixels and equal sums, and the power is of the sums."""
    generator = torch.Generator().manual_seed(0)
    noise = 0.45 * torch.randn(1, 300, 300, generator=generator)  # 1.5 times the model's
    smooth = torch.nn.functional.avg_pool2d(noise[None], 3, 1, 1)[0]
    assert smooth.std() < 0.2
    for image in (noise, smooth):
        reader = reader_of(image, size=24.0)
        power = reader.fit_power(torch.zeros_like(image))
        assert power == pytest.approx(1 / 1.5**2, rel=0.2)  # about 500 boxes: 4 standard errors
    assert reader_of(0.1 * noise, size=24.0).fit_power(torch.zeros_like(noise)) == 1
    assert reader_of(9 * noise, size=24.0).fit_power(torch.zeros_like(noise)) == 0.25


def test_strokes_that_are_wrong_lower_the_power_and_far_objects_do_not():
    image = torch.zeros(1, 200, 200)
    reader, canvas = reader_of(image, size=24.0), torch.zeros_like(image)
    canvas[:, 50:150, 50:150] = 0.5  # an object that is there
    image.copy_(canvas)
    assert reader.fit_power(canvas) == 1
    image[:, 50:150:6, 50:150] += 1  # strokes that cancel in large boxes
    image[:, 53:150:6, 50:150] -= 1
    assert reader.fit_power(canvas) < 0.5


def test_an_object_is_proposed_again_as_if_it_were_not_there():
    """Alone it is proposed on the ground; next to others, on their picture; so are close pairs."""
    reader = reader_of(torch.rand(1, 20, 30))
    reader.refinement = 0
    patches = reader.propose(torch.tensor([[8, 9], [10, 18], [9, 12]]), reader.picture.ground)
    moved = torch.tensor([0.0, 3.0, -2.0])  # looked at from other patches than before
    patches = replace(patches, pose=patches.pose + moved)
    centers = patches.pose[:, 1:3]
    for present, groups in (([1.0, 0.0, 0.0], [[0]]), ([1.0, 1.0, 1.0], [[0], [1], [2], [0, 2]])):
        present = torch.tensor(present)
        again = reader.propose_again(patches, present)
        assert len(again) == len(groups)
        for row, group in enumerate(groups):
            others = reader.picture.paint(patches, present.index_fill(0, torch.tensor(group), 0.0))
            place = centers[group].mean(0).flip(0).round().long()
            alone = reader.propose(place[None], others)
            torch.testing.assert_close(again.pose[row], alone.pose[0])
            torch.testing.assert_close(again.log_ratio[row], alone.log_ratio[0])


@pytest.mark.parametrize("power", [1.0, 0.3])
def test_refinement_raises_the_log_weight_of_an_object(power):
    """The weight at the mean is likelihood and prior over the unchanged density of the proposal."""
    image = torch.rand(1, 20, 30)
    image[:, 3:5, 4:9] = torch.nan
    reader = reader_of(image, power)
    with torch.no_grad():
        places = torch.tensor([[4, 5], [10, 18], [18, 28]])
        patches = reader.propose(places, reader.picture.ground)
        present, weights, ratios = torch.ones(3), [], []
        for reader.refinement in (0, 20):
            again = reader.propose_again(patches, present)
            for index in range(3):
                others = present.index_fill(0, torch.tensor([index]), 0.0)
                joined = patches.join(again[torch.tensor([index])])
                canvas = reader.picture.paint(joined, torch.cat([others, torch.ones(1)]))
                error = (image - canvas).nan_to_num().square().sum()
                score = -0.5 * power * error / reader.model.sigma_image**2
                weights.append(score + again.log_ratio[index])
                ratios.append(again.log_ratio[index])
        before, after = torch.stack(weights).view(2, 3)
    assert (after > before + 1).all()
    assert len({round(float(ratio), 6) for ratio in ratios}) == 6  # priors of moved objects


@pytest.mark.parametrize("sweeps", [0, 1])
def test_objects_are_proposed_apart_only_with_sweeps(sweeps):
    image = torch.zeros(1, 20, 32)
    image[:, 6:10, 6:10] = image[:, 6:10, 21:25] = 1.0
    with torch.no_grad():
        patches, _, _ = reader_of(image).read(rounds=0, sweeps=sweeps)
    assert (len(patches) > 0) == (sweeps > 0)


def test_objects_are_proposed_apart_from_present_ones_and_refined(monkeypatch):
    image = torch.zeros(1, 20, 32)
    image[:, 6:10, 6:10] = image[:, 6:10, 21:25] = 1.0
    reader, present = reader_of(image), torch.ones(1)
    with torch.no_grad():
        patches = reader.propose(torch.tensor([[8, 8]]), reader.picture.ground)
        canvas = reader.picture.paint(patches, present)
        near = torch.cdist(reader.peaks(canvas).to(canvas), patches.pose[:, 1:3].flip(1))
        assert near.min() < CLOSE * SIZE  # what is left unexplained there is the object's own
        refined = reader.propose_apart(patches, present, canvas)
        reader.refinement = 0
        raw = reader.propose_apart(patches, present, canvas)
        place = raw.corner + reader.side // 2
        assert len(raw) == len(refined) > 0
        assert (torch.cdist(place.to(canvas), torch.tensor([[8.0, 23.0]])) < CLOSE * SIZE).all()

        def score(patch):
            drawn = reader.picture.paint(patches.join(patch), torch.ones(2))
            return reader.model.log_likelihood(image[None], drawn[None, None]) + patch.log_ratio

        gains = torch.cat(
            [score(refined[k : k + 1]) - score(raw[k : k + 1]) for k in range(len(raw))]
        )
    assert (gains >= 0).all() and gains.max() > 1
    with torch.no_grad():
        assert len(reader.propose_apart(patches, present, image)) == 0  # nothing is unexplained
        asked = []
        monkeypatch.setattr(reader, "peaks", lambda *maps: asked.append(maps) or place[:0])
        reader.propose_apart(patches, present, canvas)
    (free,), (row, column) = (
        asked[0][1],
        (patches.pose[0, [2, 1]].round().long() - patches.corner[0]),
    )
    top, left = patches.corner[0]
    for down, right in itertools.product((-2, 0, 2), (-2, 0, 2)):  # what the object covers
        cover = patches.cover[0, row + down, column + right]
        torch.testing.assert_close(
            free[top + row + down, left + column + right], 1 - cover, atol=1e-3, rtol=0
        )
    assert free.min() < 0.9 < free[:, 20:].min()
