"""Part-whole capsules are compared with brute force over all parents, in float64."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from machines import shifted
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceEnum_ELBO

from capsule_zoo.models import Capsules, PartWholeCapsules
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.models.parts.parent_selection import as_presence, log_presence
from capsule_zoo.settings import configure

TYPED = dict(types=2, instances=2)  # two parts of one template, and two types
SIZES = dict(template_size=4, image_shape=(1, 6, 6), epsilon=0.1, dummy_presence=0.2)


def make(layers, **options):
    torch.manual_seed(0)
    return shifted(configure(PartWholeCapsules, layers=layers, **{**SIZES, **options}).double())


def draw(model, batch=2, seed=1):
    """Draw every latent site and the image from the prior."""
    torch.manual_seed(seed)
    trace = poutine.trace(model).get_trace(batch_size=batch)
    values = {site.name: trace.nodes[site.name]["value"].detach() for site in model.latent_sites}
    return values, trace.nodes["_RETURN"]["value"].detach().clamp(0, 1)


def point_guide(values):
    """Return a guide with certain values: its loss is -log p(image, values)."""

    def guide(images, labels=None):
        with pyro.plate("images", len(images), dim=-2):
            for level in sorted({name.rpartition("_")[0] for name in values}):
                presence, pose = values[f"{level}_presence"], values[f"{level}_pose"]
                with pyro.plate(f"{level}s", presence.shape[1], dim=-1):
                    pyro.sample(f"{level}_presence", dist.Delta(presence))
                    pyro.sample(f"{level}_pose", dist.Delta(pose, event_dim=1))

    return guide


def brute_force(model, values, images):
    """Compute log p(image, presences, poses), (B,), with all parents summed one by one."""

    def distribution(logits):
        return model.presence_distribution(logits)

    def capsules(name):
        return values[f"{name}_presence"], values[f"{name}_pose"]

    t, pose = capsules("object")
    top = distribution(model.presence_logits).log_prob(t)
    top = top + dist.Normal(poses.identity_like(pose), model.pose.sigma_top).log_prob(pose).sum(-1)
    total = top.sum(1)
    for level, relation in zip(model.levels[1:], model.selections, strict=True):
        log_t, parent_pose = log_presence(t, model.relaxed), poses.to_matrix(pose)
        t, pose = capsules(level.name)
        columns = relation.log_affinity.shape[1]  # a column for each parent, or parent and type
        group = [child // level.exchangeable for child in range(level.size)]
        parent_of = [column * len(log_t[0]) // columns for column in range(columns)]
        for image in range(len(t)):
            weights = torch.cat(
                [
                    pose.new_full((level.size, 1), relation.epsilon),
                    (log_t[image, parent_of] + relation.log_affinity[group]).exp(),
                ],
                dim=1,
            )
            choice = weights / weights.sum(1, keepdim=True)
            terms = []
            parents = range(choice.shape[1])
            for selection in itertools.product(parents, repeat=level.size):
                if any(choice[child, parent] == 0 for child, parent in enumerate(selection)):
                    continue  # a parent that is off cannot be chosen
                term = torch.zeros((), dtype=torch.float64)
                for child, parent in enumerate(selection):
                    presence = as_presence(t[image, child], model.relaxed)
                    if parent == 0:
                        gamma = pose.new_tensor(SIZES["dummy_presence"]).logit()
                        mean, scale = poses.identity_like(pose), relation.sigma_dummy
                    else:
                        entry = group[child], parent - 1
                        gamma = relation.presence_logits[entry]
                        moved = poses.to_matrix(relation.transform[entry])
                        moved = moved[:2] + torch.eye(3, dtype=torch.float64)[:2]
                        frame = torch.cat([moved, moved.new_tensor([[0, 0, 1]])])
                        mean = poses.from_matrix(parent_pose[image, parent_of[parent - 1]] @ frame)
                        raw = relation.raw_scale[entry]
                        on = relation.sigma_min + torch.nn.functional.softplus(raw)
                        scale = presence * on + (1 - presence) * relation.sigma_off
                    term = (
                        term
                        + choice[child, parent].log()
                        + distribution(gamma).log_prob(t[image, child])
                    )
                    term = term + dist.Normal(mean, scale).log_prob(pose[image, child]).sum()
                terms.append(term)
            brute = torch.stack(terms).logsumexp(0)
            total = total + torch.nn.functional.one_hot(torch.tensor(image), len(t)) * brute
    painted = model.render(Capsules(t, pose))
    likelihood = dist.Normal(painted, model.sigma_image).log_prob(images).sum((1, 2, 3))
    return total + likelihood


@pytest.mark.parametrize("presence", ["relaxed", "discrete"])
@pytest.mark.parametrize(
    ("layers", "options"),
    [((2, 3), {}), ((2, 2, 2), {}), ((2, 3), TYPED), ((2, 2, 3), TYPED), ((2, 2), dict(types=3))],
)
def test_enumeration_marginal_and_brute_force_agree(layers, options, presence):
    model = make(layers, presence=presence, **options)
    values, images = draw(model)
    if presence == "discrete":  # every object off in the first image: the dummy alone is left
        values["object_presence"][0] = 0
        values["object_presence"][1] = 1
    losses = {
        "marginal": Trace_ELBO().differentiable_loss(model, point_guide(values), images),
        "enumerate": TraceEnum_ELBO(max_plate_nesting=2).differentiable_loss(
            model.with_selection("enumerate"), point_guide(values), images
        ),
        "brute force": -brute_force(model, values, images).sum(),
    }
    parameters = list(model.parameters())
    gradients = {
        name: torch.autograd.grad(loss, parameters, allow_unused=True)
        for name, loss in losses.items()
    }
    for name, loss in losses.items():
        torch.testing.assert_close(loss, losses["brute force"], rtol=0, atol=1e-10)
        for mine, exact in zip(gradients[name], gradients["brute force"], strict=True):
            torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("types", [0, 2])
def test_responsibilities_are_the_enumerated_posterior(types):
    model = make((3, 4), presence="discrete", selection="enumerate", types=types)
    values, images = draw(model, batch=4)
    objective = TraceEnum_ELBO(max_plate_nesting=2)
    marginals = objective.compute_marginals(model, point_guide(values), images)
    choices = marginals["part_parent"].probs
    assert choices.shape[-1] == 1 + 3 * max(types, 1)
    expected = torch.cat([choices[..., :1], choices[..., 1:].unflatten(-1, (3, -1)).sum(-1)], -1)
    levels = [
        Capsules(values[f"{n}_presence"], values[f"{n}_pose"].double()) for n in ("object", "part")
    ]
    torch.testing.assert_close(model.choices(*levels), choices)
    torch.testing.assert_close(model.responsibilities(*levels), expected)
    torch.testing.assert_close(expected.sum(-1), torch.ones_like(expected[..., 0]))
    off = values["object_presence"][:, None].expand(-1, 4, -1) == 0
    assert off.any() and expected[..., 1:][off].abs().max() == 0  # a parent that is off has none


def test_all_parts_off_gives_the_background():
    model = make((2, 3), presence="discrete", background="learned")
    off = Capsules(torch.zeros(2, 3).double(), torch.randn(2, 3, 6).double())
    expected = model.background_logits.sigmoid().expand(2, 1, 6, 6)
    torch.testing.assert_close(model.render(off), expected)


def test_permuting_objects_with_their_parameters_changes_nothing():
    model = make((4, 3))
    values, images = draw(model)
    order = torch.tensor([2, 0, 3, 1])
    before = Trace_ELBO().loss(model, point_guide(values), images)
    with torch.no_grad():
        model.presence_logits.copy_(model.presence_logits[order].clone())
        for name in ("log_affinity", "presence_logits", "transform", "raw_scale"):
            parameter = getattr(model.selections[0], name)
            parameter.copy_(parameter[:, order].clone())
    shuffled = {k: v[:, order] if k.startswith("object") else v for k, v in values.items()}
    after = Trace_ELBO().loss(model, point_guide(shuffled), images)
    assert before == pytest.approx(after, abs=1e-10)
    assert Trace_ELBO().loss(model, point_guide(values), images) != pytest.approx(after, abs=1e-3)


def test_an_affine_change_of_the_objects_moves_the_votes_as_matrices_say():
    model = make((3, 4))
    values, _ = draw(model)
    change = torch.randn(6, dtype=torch.float64)
    objects = Capsules(values["object_presence"], values["object_pose"])
    moved = objects._replace(pose=poses.compose(change, objects.pose))
    before, after = (model.selections[0](o, True).vote[:, :, 1:] for o in (objects, moved))
    expected = poses.to_matrix(change) @ poses.to_matrix(before)
    torch.testing.assert_close(poses.to_matrix(after), expected)


def test_parts_are_present_as_often_as_their_parents_say():
    """Their frequency follows from the choices of a parent and their gammas."""
    model = make((2, 2), presence="discrete")
    torch.manual_seed(3)
    trace = poutine.trace(model).get_trace(batch_size=20_000)
    parents = Capsules(trace.nodes["object_presence"]["value"], trace.nodes["object_pose"]["value"])
    distribution = model.selections[0](parents, relaxed=False)
    fractions = distribution.log_weights.softmax(-1)
    expected = (fractions * distribution.presence_logits.sigmoid()).sum(-1)
    presence = trace.nodes["part_presence"]["value"]
    error = (presence - expected).mean(0)
    assert (error.abs() < 5 * (presence - expected).std(0) / math.sqrt(20_000)).all()


def test_the_two_selections_draw_from_one_prior():
    """First and second moments of the parts' poses agree within five standard errors."""
    model, n = make((2, 3), presence="discrete", sigma_top=0.2), 40_000
    moments = []
    for selection in ("marginal", "enumerate"):
        torch.manual_seed(5)
        trace = poutine.trace(model.with_selection(selection)).get_trace(batch_size=n)
        pose = trace.nodes["part_pose"]["value"].flatten(1)
        features = torch.cat([pose, pose.square(), trace.nodes["part_presence"]["value"]], dim=1)
        moments.append((features.mean(0), features.var(0) / n))
    (mean_a, var_a), (mean_b, var_b) = moments
    assert ((mean_a - mean_b).abs() < 5 * (var_a + var_b).sqrt()).all()


def test_size_of_the_model():
    """The paper's claim: under ten thousand numbers at 16 objects, 24 parts, 11x11 templates."""
    assert (
        PartWholeCapsules(objects=16, parts=24, painting=Painting(template_size=11)).num_parameters
        == 9_280
    )


def test_singular_poses_give_no_nan():
    model = make((2, 3))
    values, images = draw(model)
    values = {k: torch.zeros_like(v) if k.endswith("pose") else v for k, v in values.items()}
    values = {k: v.requires_grad_() for k, v in values.items()}
    loss = Trace_ELBO().differentiable_loss(model, point_guide(values), images)
    gradients = torch.autograd.grad(loss, [*values.values(), *model.parameters()])
    assert loss.isfinite() and all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("layers", [(2, 3), (2, 2, 2)])
def test_a_model_with_four_rotations_is_invariant_under_quarter_turns(layers):
    """The exception is the dummy, which stands upright: here it has no weight."""
    changes = {}
    for rotations in (1, 4):
        model = make(layers, rotations=rotations, epsilon=1e-300)
        values, images = draw(model)
        quarter = poses.rotation(torch.tensor(math.pi / 2, dtype=torch.float64))  # clockwise
        rotated = {k: poses.compose(quarter, v) if "pose" in k else v for k, v in values.items()}
        before = Trace_ELBO().loss(model, point_guide(values), images)
        after = Trace_ELBO().loss(model, point_guide(rotated), images.rot90(-1, (2, 3)))
        changes[rotations] = abs(after - before)
    assert changes[4] < 1e-8 and changes[1] > 1


@pytest.mark.parametrize("rotations", [1, 5])
def test_rotations_are_summed_out_of_the_objects_poses(rotations):
    model = make((2, 3), rotations=rotations, sigma_top=0.2, sigma_place=0.7)
    pose = torch.randn(7, 6, dtype=torch.float64)
    angles = 2 * math.pi * torch.arange(rotations, dtype=torch.float64) / rotations
    scale = torch.tensor([0.2, 0.2, 0.7, 0.2, 0.2, 0.7], dtype=torch.float64)
    log_probs = dist.Normal(poses.rotation(angles), scale).log_prob(pose[:, None]).sum(-1)
    torch.testing.assert_close(
        model.pose.distribution(model.presence_logits).log_prob(pose),
        log_probs.exp().mean(-1).log(),
    )


def test_the_prior_takes_every_rotation_equally_often():
    model, n = make((2, 3), rotations=3, sigma_top=0.01), 6000
    pose = poutine.trace(model).get_trace(batch_size=n).nodes["object_pose"]["value"][:, 0]
    steps = torch.atan2(pose[:, 3], pose[:, 0]) / (2 * math.pi / 3)
    counts = steps.round().remainder(3).long().bincount(minlength=3)
    assert (steps - steps.round()).abs().max() < 0.05
    assert (counts / n - 1 / 3).abs().max() < 5 * math.sqrt(2 / 9 / n)


def test_instances_share_their_template():
    """A model whose templates are copies has the same distribution and more parameters."""
    shared, copies = make((2, 5), instances=2), make((2, 5))
    values, images = draw(shared)
    with torch.no_grad():
        copies.load_state_dict({**shared.state_dict(), "template_logits": copies.template_logits})
        copies.template_logits.copy_(shared.template_logits[[0, 0, 1, 1, 2]])
    losses = [Trace_ELBO().loss(m, point_guide(values), images) for m in (shared, copies)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)
    assert len(shared.template_logits) == 3 and shared.templates()[0].shape == (5, 1, 4, 4)


def test_parts_of_one_template_with_types_are_exchangeable():
    """With a mixture at each pixel no part hides another, and the joint density is unchanged."""
    model = make((2, 4), likelihood="mixture", **TYPED)
    values, images = draw(model)
    before = Trace_ELBO().loss(model, point_guide(values), images)

    def loss(order):
        shuffled = {
            name: value[:, order] if name.startswith("part") else value
            for name, value in values.items()
        }
        return Trace_ELBO().loss(model, point_guide(shuffled), images)

    assert loss([1, 0, 3, 2]) == pytest.approx(before, abs=1e-10)
    assert abs(loss([2, 1, 0, 3]) - before) > 1e-3  # parts of two templates


def test_one_type_for_each_part_alone_is_the_model_without_types():
    plain, typed = make((2, 3)), make((2, 3), types=1)
    values, images = draw(plain)
    for mine, same in zip(plain.parameters(), typed.parameters(), strict=True):
        torch.testing.assert_close(mine, same, rtol=0, atol=0)  # initialized with equal numbers
    losses = [Trace_ELBO().loss(m, point_guide(values), images) for m in (plain, typed)]
    assert losses[0] == losses[1]


def test_a_model_with_types_counts_no_part_twice():
    """Parameters: 16 parts have one template and one relation, whatever their number is."""
    two_parts, all_parts = (
        PartWholeCapsules(objects=4, parts=n, types=3, painting=Painting(instances=n))
        for n in (2, 16)
    )
    assert two_parts.num_parameters == all_parts.num_parameters == 4 + 4 * 3 * 9 + 2 * 121
