"""Objects that are found in scenes: which pixels are theirs, and how they are scored."""

import itertools
import math

import pyro.distributions as dist
import pytest
import torch
from small_scenes import FORMS, pair

from capsule_zoo.data.scenes import Objects, boxes_of
from capsule_zoo.guides.scenes.proposals import SubsetDistribution
from capsule_zoo.inference.objects import (
    box_overlaps,
    find_objects,
    foreground_ari,
    render_objects,
    segment,
)
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.models.common.spaces import tile_batch
from capsule_zoo.models.scenes.pictures import Pictures


def test_what_is_found_is_scored_as_it_should_be():
    numbers = torch.zeros(1, 6, 8, dtype=torch.uint8)
    numbers[0, 1:3, 1:4], numbers[0, 3:6, 5:8] = 1, 2
    truth = Objects(
        numbers,
        torch.tensor([[4, 7]]),
        boxes_of(numbers[:, None] == torch.tensor([1, 2])[:, None, None]),
    )
    assert truth.boxes[0].tolist() == [[1, 1, 4, 3], [5, 3, 8, 6]]
    other = (3 - numbers) * (numbers > 0)  # the names of objects do not matter
    assert foreground_ari(other, truth).item() == 1
    assert foreground_ari(torch.ones_like(numbers), truth).item() == 0
    flooded = torch.where(numbers == 0, 1, numbers)  # which gives the ground to the first object
    assert foreground_ari(flooded, truth).item() == 1
    half = truth.boxes.clone()
    half[0, 0, 2] = 2.5
    overlap = box_overlaps(half, torch.tensor([[True, True]]), truth)
    assert overlap.tolist() == pytest.approx([0.5, 1])
    assert box_overlaps(half, torch.tensor([[False, True]]), truth)[0] == 0


@pytest.mark.parametrize("form", ["gray", "tinted", "textured"])
def test_a_pixel_belongs_to_the_likeliest_component_of_a_mixture(form):
    model, guide, images = pair(**FORMS[form])
    images = images * (images > 0.5)
    images[0, :, 2, 3] = math.nan
    with torch.no_grad():
        proposals = guide.draw_proposals(images.nan_to_num(0.5))
    on, ground = torch.tensor([[1.0, 0, 1], [1, 1, 1], [0, 0, 0]]).double(), proposals.ground.drawn
    cover, color, depth = proposals.pictures
    mean, numbers, owners, covered, left = render_objects(
        model, images, on, proposals.pictures, ground
    )
    torch.testing.assert_close(left, (images - mean).square().flatten(1).nanmean(1))
    bright = torch.ones(3)
    if color is None:  # objects make the ground brighter
        bright = (on[..., None, None] * cover[:, :, 0]).flatten(1).amax(-1).clamp_min(1e-9)
        color = ground + bright[:, None, None, None, None] * (1 - ground)
    colors = color * torch.ones(3, 3, *images.shape[1:])  # (scenes, slots, C, H, W)
    for b, y, x in itertools.product(range(3), range(10), range(12)):
        fractions = on[b] * cover[b, :, 0, y, x]
        free = (1 - fractions).prod()
        assert covered[b, y, x].item() == pytest.approx(1 - free.item())
        fractions = fractions / bright[b]
        free = (1 - fractions).prod()
        weights = fractions if depth is None else fractions * depth[b].exp()
        weights = (1 - free) * weights / weights.sum().clamp_min(1e-9)
        behind = ground.expand_as(images)[b, :, y, x]
        of_ground, of_objects = free, weights
        if not images[b, 0, y, x].isnan():
            scale = (images[b] - mean[b]).square().nanmean().sqrt()
            distribution = dist.Normal(torch.stack([behind, *colors[b, :, :, y, x]]), scale)
            density = distribution.log_prob(images[b, :, y, x]).sum(-1).exp()
            of_ground, of_objects = free * density[0], weights * density[1:]
        assert owners[b, y, x] == (1 + of_objects.argmax() if fractions.any() else 0)
        assert numbers[b, y, x] == torch.stack([of_ground, *of_objects]).argmax()
    assert form == "gray" or owners[:2].unique().numel() > 2
    assert numbers[:2].unique().numel() > 2 and not numbers[2].any()


@pytest.mark.parametrize("brightness", [0.3, 1.0])
def test_a_dim_object_shows_where_it_is_half_as_bright_as_at_its_brightest(brightness):
    model, _, _ = pair()
    cover = torch.zeros(1, 3, 1, 10, 12, dtype=torch.float64)
    cover[0, 1, 0, 4, 3:8] = brightness * torch.tensor([0.2, 0.45, 1.0, 0.55, 0.1])
    image, on = cover[:, 1], torch.tensor([[0.0, 1, 0]]).double()
    drawn, numbers, owners, *_ = render_objects(
        model, image, on, Pictures(cover, None, None), image[0] * 0
    )
    torch.testing.assert_close(drawn, image, atol=1e-3, rtol=0)
    assert numbers.nonzero()[:, 1:].tolist() == [[4, 5], [4, 6]] and numbers.max() == 2
    assert owners.nonzero()[:, 1:].tolist() == [[4, x] for x in range(3, 8)]


def test_a_blank_picture_and_one_with_too_many_objects_are_told_apart():
    model, guide, _ = pair(slots=1)
    blank = torch.zeros(1, 1, 10, 12).double()
    full = torch.ones(1, 1, 10, 12).double()
    objects = find_objects(model, guide, torch.cat([blank, full]))
    assert objects.unexplained[1] > 0.1 > objects.unexplained[0]
    assert segment(model, guide, blank).shape == (1, 1, 10, 12)


def test_many_images_with_an_object_in_every_slot_are_told_once():
    """Of 12 images, 4 with an object in the only slot are too few to say so, and 5 are not."""
    model, guide, _ = pair(slots=1)
    blank, full = torch.zeros(1, 1, 10, 12).double(), torch.ones(1, 1, 10, 12).double()
    batch = torch.cat([full.expand(4, -1, -1, -1), blank.expand(8, -1, -1, -1)])
    objects = find_objects(model, guide, batch)
    assert objects.is_full.tolist() == 4 * [True] + 8 * [False] == (objects.counts == 1).tolist()
    many = torch.cat([batch[:1], batch[:-1]])
    with pytest.warns(UserWarning, match="fill all slots=1 in 5 of 12 images.*--slots N") as told:
        assert segment(model, guide, many).shape == (12, 1, 10, 12)
    assert len(told) == 1
    find_objects(model, guide, full.expand(3, -1, -1, -1))


def test_the_shown_draw_has_the_most_likely_number_of_objects(monkeypatch):
    """A single draw of one object is the best of all; three draws of two are likelier together."""
    model, guide, images = pair()
    rows = torch.tensor([[0.0, 0, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]]).double()
    weight = torch.tensor([-9.0, 1.5, 1.0, 0.5, 0.6]).double()

    def presence_distribution(copies, result):
        return SubsetDistribution(weight.expand(len(copies), -1), rows)

    monkeypatch.setattr(guide, "presence_distribution", presence_distribution)
    result = find_objects(model, guide, images, draws=2)
    assert result.counts.tolist() == [2, 2, 2]
    assert result.presence.tolist() == [[True, True, False]] * 3
    posterior = torch.tensor([-9, 1.5, weight[2:].logsumexp(0), -math.inf]).softmax(0)
    torch.testing.assert_close(result.count_probabilities[0], posterior.double())


def test_the_evidence_is_the_log_of_the_mean_weight_of_the_draws():
    """It is not their sum, so that it does not rise with the number of draws."""
    model, guide, images = pair()
    objects = find_objects(model, guide, images, draws=4)
    with torch.no_grad(), use_seed(0):
        copies = tile_batch(images, 4)
        total = guide.presence_distribution(
            copies, guide.draw_proposals(copies)
        ).log_total.unflatten(0, (4, 3))
    torch.testing.assert_close(objects.log_evidence, total.exp().mean(0).log())
