"""The densities of stacked capsule autoencoders against sums that are written out by hand."""

import pytest
import torch
import torch.nn.functional as F
from machines import shifted
from pyro import poutine
from torch.distributions import Normal

from capsule_zoo.models import StackedCapsuleAutoencoder, poses, templates
from capsule_zoo.models.parts.object_votes import (
    FeaturedCapsules,
    mixing_logits,
    noisy_or,
    part_pose_distribution,
)
from capsule_zoo.models.parts.parent_selection import as_presence
from capsule_zoo.models.parts.part_sets import PartSets
from capsule_zoo.settings import configure

SIZES = dict(
    objects=2,
    parts=3,
    image_shape=(3, 7, 6),
    template_size=4,
    object_features=4,
    part_features=3,
    hidden=5,
)
BATCH = 3


def make(**sizes):
    torch.manual_seed(0)
    return shifted(configure(StackedCapsuleAutoencoder, **{**SIZES, **sizes}).double())


def draw(model, level):
    nodes = poutine.trace(model).get_trace(batch_size=BATCH).nodes
    sites = (f"{level}_{quantity}" for quantity in ("presence", "pose", "feature"))
    return FeaturedCapsules(*(nodes[site]["value"].detach() for site in sites))


@pytest.fixture(params=[True, False], ids=["relaxed", "discrete"])
def model(request):
    return make() if request.param else make().discretize()


def test_each_pixel_is_a_mixture_of_parts_and_background(model):
    parts = draw(model, "part")
    images = torch.rand(BATCH, *model.image_shape, dtype=torch.float64)
    log_density = model.image_distribution(parts).log_prob(images[:, None])
    probability = as_presence(parts.presence, model.relaxed)
    channels, height, width = model.image_shape
    behind = model.background_logits.sigmoid()
    for b in range(BATCH):
        total = 0.0
        layers = []
        for m in range(3):
            paint = model.template_logits[m : m + 1].sigmoid()
            layer = templates.warp_templates(paint, parts.pose[b : b + 1, m : m + 1], (7, 6))
            units = model.color_hidden.weight @ parts.feature[b, m] + model.color_hidden.bias
            tint = model.color_read.weight @ units.relu() + model.color_read.bias
            layers.append((layer[0, :, 0], tint.sigmoid()))
        for y in range(height):
            for x in range(width):
                weights = [model.background_log_weight.exp()]
                colors = [behind]
                for m, (layer, tint) in enumerate(layers):
                    weights.append(probability[b, m] * layer[channels, y, x])
                    colors.append(layer[:channels, y, x] * tint)
                likelihood = 0.0
                for weight, color in zip(weights, colors, strict=True):
                    density = Normal(color, model.sigma_image).log_prob(images[b, :, y, x])
                    likelihood = likelihood + weight * density.sum().exp()
                total = total + (likelihood / sum(weights)).log()
        torch.testing.assert_close(log_density[b, 0], total, rtol=1e-9, atol=1e-9)


def test_the_vote_of_an_object_is_its_pose_times_its_bent_constellation(model):
    objects = draw(model, "object")
    votes = model.votes(objects)
    network = model.relation
    present = as_presence(objects.presence, model.relaxed)
    for k in range(2):
        feature = objects.feature[1, k]
        units = (feature @ network.hidden_weight[k] + network.hidden_bias[k]).relu()
        numbers = (units @ network.read_weight[k]).view(3, 8)
        for m in range(3):
            relation = poses.from_parameters(network.static[k, m] + numbers[m, 2:])
            expected = poses.to_matrix(objects.pose[1, k]) @ poses.to_matrix(relation)
            torch.testing.assert_close(poses.to_matrix(votes.pose[1, m, k]), expected)
            sure = (numbers[m, 0] + network.presence_bias[k, m]).sigmoid()
            torch.testing.assert_close(votes.log_presence[1, m, k].exp(), present[1, k] * sure)
            scale = F.softplus(numbers[m, 1] + network.scale_bias[k, m] + 0.5) + 0.01
            torch.testing.assert_close(votes.scale[1, m, k], scale)
            torch.testing.assert_close(votes.dynamic[1, k, m], numbers[m, 2:])


def test_a_rigid_constellation_does_not_depend_on_the_feature():
    model = make(deformable=False)
    objects = draw(model, "object")
    other = objects._replace(feature=-objects.feature)
    torch.testing.assert_close(model.votes(objects).pose, model.votes(other).pose)
    assert not model.votes(objects).dynamic.any()


def test_the_pose_of_a_part_is_summed_over_its_parents(model):
    objects, parts = draw(model, "object"), draw(model, "part")
    votes = model.votes(objects)
    distribution = part_pose_distribution(votes, parts.presence, model.relaxed, *model.dummy)
    log_density = distribution.log_prob(parts.pose)
    probability = as_presence(parts.presence, model.relaxed)
    origin = torch.zeros(6, dtype=torch.float64)
    for b in range(BATCH):
        for m in range(3):
            dummy = Normal(origin, model.clutter.sigma_dummy).log_prob(parts.pose[b, m]).sum().exp()
            weights, densities = [model.clutter.epsilon], [dummy]
            for k in range(2):
                vote = Normal(votes.pose[b, m, k], votes.scale[b, m, k])
                densities.append(vote.log_prob(parts.pose[b, m]).sum().exp())
                weights.append(votes.log_presence[b, m, k].exp())
            mixed = sum(w * d for w, d in zip(weights, densities, strict=True)) / sum(weights)
            expected = probability[b, m] * mixed + (1 - probability[b, m]) * dummy
            torch.testing.assert_close(log_density[b, m].exp(), expected, rtol=1e-9, atol=1e-12)


def test_a_part_is_off_if_no_vote_and_no_leak_switches_it_on(model):
    votes = model.votes(draw(model, "object"))
    off = (1 - model.clutter.leak) * (1 - votes.log_presence.exp()).prod(-1)
    torch.testing.assert_close(noisy_or(votes, model.clutter.leak).sigmoid(), 1 - off)


def test_the_noisy_or_of_sure_votes_is_finite_with_a_finite_gradient():
    model = make().discretize()
    objects = draw(model, "object")
    with torch.no_grad():
        model.relation.presence_bias.fill_(80.0)
    votes = model.votes(objects._replace(presence=torch.ones_like(objects.presence)))
    logits = noisy_or(votes, model.clutter.leak)
    logits.sum().backward()
    assert logits.isfinite().all() and logits.min() > 10
    assert model.relation.presence_bias.grad.isfinite().all()


def test_the_joint_density_is_the_sum_of_all_its_factors():
    model = make().discretize()
    objects, parts = draw(model, "object"), draw(model, "part")
    images = torch.rand(BATCH, *model.image_shape, dtype=torch.float64)
    values = {
        f"{level}_{name}": value
        for level, capsules in (("object", objects), ("part", parts))
        for name, value in capsules._asdict().items()
    }
    trace = poutine.trace(poutine.condition(model, values)).get_trace(images)
    votes = model.votes(objects)
    on = torch.full_like(objects.presence, 1 / model.classes)
    visibility = 1 - (1 - model.clutter.leak) * (1 - votes.log_presence.exp()).prod(-1)
    identity = poses.identity_like(objects.pose)
    expected = (
        torch.where(objects.presence > 0, on, 1 - on).log().sum()
        + Normal(identity, model.sigma_top).log_prob(objects.pose).sum()
        + Normal(0.0, 1.0).log_prob(objects.feature).sum()
        + torch.where(parts.presence > 0, visibility, 1 - visibility).log().sum()
        + part_pose_distribution(votes, parts.presence, False, *model.dummy)
        .log_prob(parts.pose)
        .sum()
        + Normal(0.0, 1.0).log_prob(parts.feature).sum()
        + model.image_distribution(parts).log_prob(images[:, None]).sum()
    )
    torch.testing.assert_close(trace.log_prob_sum(), expected, rtol=1e-10, atol=1e-9)


def test_weights_of_parents_sum_to_one_only_where_they_are_normalized(model):
    votes = model.votes(draw(model, "object"))
    total = mixing_logits(votes, model.clutter.epsilon).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))
    raw = mixing_logits(votes, model.clutter.epsilon, normalized=False).exp().sum(-1)
    torch.testing.assert_close(raw, model.clutter.epsilon + votes.log_presence.exp().sum(-1))


def test_noise_on_votes_changes_their_presences_and_nothing_else(model):
    objects = draw(model, "object")
    still, noisy = model.votes(objects), model.votes(objects, noise=4.0)
    assert torch.equal(still.pose, noisy.pose)
    assert torch.equal(still.scale, noisy.scale)
    on = still.log_presence.isfinite()
    assert (still.log_presence != noisy.log_presence)[on].all()


def test_the_prior_renders_colors_between_template_and_black():
    model = make().discretize()
    with torch.no_grad():
        for name in ("background_logits", "background_log_weight"):
            getattr(model, name).fill_(-20.0)
    parts = draw(model, "part")
    one = parts._replace(presence=torch.tensor([[0.0, 1.0, 0.0]] * BATCH).double())
    color, weight = model.image_distribution(one).layers()
    assert not weight[[0, 2]].any()
    covered = weight[1, 0] > 1e-3  # (B, H, W)
    image = model.render(one).movedim(1, 0)  # (C, B, H, W)
    torch.testing.assert_close(image[:, covered], color[1][:, covered], rtol=0, atol=1e-4)


def test_parts_are_predicted_by_the_object_that_is_most_responsible(model):
    objects, parts = draw(model, "object"), draw(model, "part")
    if not model.relaxed:  # an object that is off never owns a part
        objects = objects._replace(presence=torch.tensor([[0.0, 1.0]] * BATCH).double())
    votes, prediction = model.votes(objects), model.predict_parts(objects, parts)
    fractions = model.responsibilities(objects, parts)
    torch.testing.assert_close(fractions.sum(-1), torch.ones(BATCH, 3).double())
    for b in range(BATCH):
        for m in range(3):
            scores = []
            for k in range(2):
                distribution = Normal(votes.pose[b, m, k], votes.scale[b, m, k])
                density = distribution.log_prob(parts.pose[b, m]).sum()
                scores.append((votes.log_presence[b, m, k] + density).item())
            winner = max(range(2), key=scores.__getitem__)
            torch.testing.assert_close(prediction.pose[b, m], votes.pose[b, m, winner])
            both = [fractions[b, m, 1 + k].log().item() for k in range(2)]
            assert both[winner] == max(both)


def test_a_scope_has_the_factors_of_its_level():
    """Objects and parts without the image, or parts and image under broad part priors."""
    model = make()
    images = torch.rand(BATCH, *model.image_shape, dtype=torch.float64)
    drawn = poutine.trace(model).get_trace(images)
    replayed = poutine.trace(poutine.replay(model.with_scope("objects"), trace=drawn))
    objects = replayed.get_trace(torch.zeros(BATCH, 1, 3, 14 + 3))
    for trace in (drawn, objects):
        trace.compute_log_prob()
    image = drawn.nodes["image"]["log_prob_sum"]
    assert "image" not in objects.nodes
    torch.testing.assert_close(objects.log_prob_sum() + image, drawn.log_prob_sum())
    replayed = poutine.trace(poutine.replay(model.with_scope("parts"), trace=drawn))
    parts = replayed.get_trace(images)
    parts.compute_log_prob()
    assert not any(name.startswith("object") for name in parts.nodes)
    torch.testing.assert_close(parts.nodes["image"]["log_prob_sum"], image)
    broad = Normal(0.0, model.clutter.sigma_dummy).log_prob(drawn.nodes["part_pose"]["value"]).sum()
    torch.testing.assert_close(parts.nodes["part_pose"]["log_prob_sum"], broad)


def test_scopes_share_parameters_and_know_their_data():
    model = make()
    for scope in ("parts", "objects", "scene"):
        assert list(map(id, model.with_scope(scope).parameters())) == list(
            map(id, model.parameters())
        )
    assert model.with_scope("objects").with_scope("scene").image_shape == model.image_shape
    assert model.with_scope("objects").space == PartSets(3, 14 + 3)
