"""The network: its sizes, its label distributions, and its learning."""

import math

import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.guides import DynamicRouting, EMRouting, ExactLabel, VBRouting
from capsule_zoo.inference import (
    Checks,
    Inputs,
    SpreadLoss,
    evaluate,
    fit,
    log_weights,
    loss_per_image,
)
from capsule_zoo.models import MatrixCapsules
from capsule_zoo.models.matrix_capsules import PRESETS, margin_after, spread_energy

TINY = dict(image_shape=(1, 17, 17), classes=3, features=4, capsules=(2, 2, 2))
QUIET = dict(batch_size=4, inputs=Inputs(labels=True), checks=Checks(progress=False))


def tiny(**options):
    return MatrixCapsules(routing=EMRouting(2), **{**TINY, **options})


def images(number=4, size=17):
    return torch.rand(number, 1, size, size)


@pytest.mark.parametrize(
    ("preset", "shape", "classes", "least", "most"),
    [
        ("small", (1, 28, 28), 10, 67_000, 69_000),
        ("full", (2, 32, 32), 5, 310_000, 320_000),  # smallNORB, of which the paper says 310 K
    ],
)
def test_presets_have_the_papers_sizes(preset, shape, classes, least, most):
    model = MatrixCapsules(shape, classes, routing=EMRouting(3), **PRESETS[preset])
    assert least < model.num_parameters < most


@pytest.mark.parametrize(("size", "padding"), [(32, 0), (28, 2)])
def test_grids_are_those_of_the_paper(size, padding):
    """On 32x32 pixels the grids are 14x14 primary capsules, 6x6, 4x4, and the classes."""
    sizes = dict(features=2, capsules=(2, 2, 2), padding=padding)
    model = MatrixCapsules((1, size, size), 5, routing=EMRouting(1), **sizes)
    grids = model.capsules(torch.rand(1, 1, size, size))
    assert [grid.shape for grid in grids] == [(14, 14), (6, 6), (4, 4), (1, 1)]
    assert grids[-1].pose.shape == (1, 1, 5, 4, 4)


@pytest.mark.parametrize("margin", [0.2, 0.9])
def test_spread_energy_is_the_papers_loss(margin):
    presence = torch.rand(6, 5, dtype=torch.float64)
    energy = spread_energy(presence, margin)
    for n, a in enumerate(presence.tolist()):
        for t in range(5):
            loss = sum(max(0.0, margin - (a[t] - a[i])) ** 2 for i in range(5) if i != t)
            assert energy[n, t] == pytest.approx(loss)


def test_labels_are_drawn_from_the_gibbs_distribution_of_the_spread_loss():
    model, batch = tiny().double(), images().double()
    scores = model.scores(batch)
    weights = (-spread_energy(scores.sigmoid(), model.margin)).exp()
    distribution = model.label_distribution(scores)
    torch.testing.assert_close(distribution.probs, weights / weights.sum(-1, keepdim=True))
    trace = poutine.trace(model).get_trace(batch)
    label = trace.nodes["label"]["value"]
    torch.testing.assert_close(
        distribution.log_prob(label), trace.nodes["label"]["fn"].log_prob(label)
    )


def test_the_loss_of_the_model_is_the_spread_loss_per_image():
    model, batch, labels = tiny().eval(), images(), torch.tensor([0, 2, 1, 1])
    loss = loss_per_image(Trace_ELBO(), model, ExactLabel(model), batch, labels)
    presence = model.scores(batch).sigmoid()
    energy = spread_energy(presence, margin_after(0, model.margin_steps))
    torch.testing.assert_close(loss, energy[torch.arange(4), labels].mean())


def test_categorical_labels_have_a_normalized_distribution():
    model = tiny(likelihood="categorical")
    guide, batch = ExactLabel(model), images()
    with torch.no_grad():
        weight = log_weights(model, guide, batch)[0]
        total = sum(
            log_weights(model, guide, batch, torch.full((4,), c))[0].exp() for c in range(3)
        )
    torch.testing.assert_close(weight, torch.zeros(4))  # log p(image), which the model leaves flat
    torch.testing.assert_close(total, torch.ones(4))
    labels = torch.zeros(len(batch), dtype=torch.int64)
    assert evaluate(model, guide, batch, labels=labels).attrs["is_bound"]
    spread = tiny()
    assert not evaluate(spread, ExactLabel(spread), batch, labels=labels).attrs["is_bound"]


def test_a_full_white_pixel_is_as_likely_as_any():
    model, labels = tiny(), torch.zeros(2, dtype=torch.int64)
    for value in (0.0, 0.5, 1.0):
        trace = poutine.trace(model).get_trace(torch.full((2, 1, 17, 17), value), labels)
        trace.compute_log_prob()
        assert trace.nodes["image"]["log_prob_sum"] == 0


def test_margin_grows_as_in_the_released_code():
    assert margin_after(0, 50_000) == pytest.approx(0.2 + 0.79 / (1 + math.exp(4)))
    assert margin_after(200_000, 50_000) == pytest.approx(0.2 + 0.79 / 2)
    assert margin_after(10**9, 50_000) == pytest.approx(0.99, abs=1e-4)


def test_a_linear_margin_grows_by_a_tenth_in_an_epoch():
    model = tiny(margin_steps=100, margin_shape="linear")
    margins = []
    for updates in (0, 100, 350, 700, 10**6):
        model.updates.fill_(updates)
        margins.append(model.margin)
    assert margins == pytest.approx([0.2, 0.3, 0.55, 0.9, 0.9])


def test_a_decoder_adds_its_squared_error_to_the_loss_in_training():
    model, labels = tiny(reconstruction=0.01).double(), torch.tensor([0, 2, 1, 1])
    guide, batch = ExactLabel(model), images().double()
    plain = loss_per_image(Trace_ELBO(), model.eval(), guide, batch, labels)
    total = SpreadLoss().differentiable_loss(model.train(), guide, batch, labels)
    pose = model.capsules(batch)[-1].pose[:, 0].flatten(2)
    masked = torch.zeros(4, 3, 16).double()
    for image, label in enumerate(labels.tolist()):
        masked[image, label] = pose[image, label]
    hidden = masked.flatten(1)
    for layer in model.decoder:
        hidden = layer(hidden)
    error = (hidden.sigmoid().view_as(batch) - batch).square().sum() / 4
    torch.testing.assert_close(total, plain + 0.01 * error)
    total.backward()
    weights = (model.decoder[0].weight, model.classes.transform)
    assert all(weight.grad.abs().max() > 0 for weight in weights)
    with torch.no_grad():
        assert model.predict(batch).shape == (4,)
        drawn = Trace_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1)
        assert math.isfinite(drawn.loss(model, guide, batch, labels))


def test_only_updates_move_the_margin_and_the_state_keeps_it():
    model, objective, batch = tiny(margin_steps=1.0), SpreadLoss(), images()
    guide, labels = ExactLabel(model), torch.zeros(4, dtype=torch.int64)
    with torch.no_grad():
        objective.differentiable_loss(model, guide, batch, labels)
    model(batch, labels)
    objective.differentiable_loss(model.eval(), guide, batch, labels)
    assert model.updates == 0
    fit(model, guide, Split(batch, labels, "noise"), steps=2, objective=objective, **QUIET)
    SVI(model.train(), guide, Adam({}), objective).step(batch, labels)
    twin = tiny(margin_steps=1.0)
    twin.load_state_dict(model.state_dict())
    assert twin.margin == model.margin == margin_after(3, 1.0)


def test_a_resumed_run_has_the_margin_of_a_whole_one(tmp_path):
    split, margins = Split(images(), torch.zeros(4, dtype=torch.int64), "noise"), []
    for parts in ([4], [2, 4]):
        for steps in parts:
            model = tiny(margin_steps=1.0)
            path = tmp_path / "run"
            resume = path if margins and steps == 4 else None
            saved = Checks(checkpoint=path, resume=resume, progress=False)
            settings = QUIET | dict(steps=steps, objective=SpreadLoss(), checks=saved)
            fit(model, ExactLabel(model), split, **settings)
        margins.append(model.margin)
    assert margins == [margin_after(4, 1.0)] * 2


def test_scores_do_not_depend_on_brightness_and_contrast():
    model, batch = tiny().double(), images().double()
    plain = model.scores(batch)
    torch.testing.assert_close(model.scores(0.3 * batch + 0.2), plain, rtol=0.02, atol=0.01)


ROUTINGS = [EMRouting(3), VBRouting(3), DynamicRouting(3)]


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits").train


@pytest.mark.parametrize("routing", ROUTINGS, ids=repr)
def test_poses_and_presences_keep_their_scale_up_the_layers(routing, digits):
    """This holds for any number of children; and no class is certain before learning."""
    model = MatrixCapsules(routing=routing, **PRESETS["small"])
    with torch.no_grad():
        grids = model.capsules(digits.images[:4])
    assert 0.1 < grids[0].pose.std(0).mean() < 0.5  # as far apart as transformations are
    sizes = torch.stack([grid.pose.square().mean().sqrt() for grid in grids])
    assert sizes.max() < 3 * sizes.min()
    for grid in grids:
        assert 0.05 < grid.presence.mean() < 0.95
    least, most = torch.aminmax(grids[-1].presence)
    assert least > 0.02 and most < 0.98


@pytest.mark.parametrize("routing", ROUTINGS, ids=repr)
def test_the_loss_of_the_small_preset_reaches_every_parameter(routing, digits):
    model = MatrixCapsules(routing=routing, **PRESETS["small"])
    batch = digits[:4]
    loss_per_image(Trace_ELBO(), model, ExactLabel(model), batch.images, batch.labels).backward()
    blind = ("beta_a", "beta_u") if isinstance(routing, DynamicRouting) else ()
    for name, parameter in model.named_parameters():
        if name.endswith(blind):
            continue
        slope = parameter.grad.norm()
        assert torch.isfinite(slope) and slope > 1e-6, name


def test_it_learns_where_a_bar_is():
    """The bar is left, middle or right, so chance is right one time in three."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (240,), generator=generator)
    batch = 0.1 * torch.rand(240, 1, 17, 17, generator=generator)
    for n, label in enumerate(labels):
        batch[n, 0, 4:13, 3 + 4 * label : 5 + 4 * label] = 0.9
    model = tiny(margin_steps=10, features=8, capsules=(4, 4, 4))
    split = Split(batch, labels, "bars")
    settings = dict(
        objective=SpreadLoss(),
        steps=40,
        batch_size=30,
        lr=0.01,
        inputs=Inputs(labels=True),
        checks=Checks(progress=False),
    )
    fit(model, ExactLabel(model), split, **settings)
    assert (model.eval().predict(batch) == labels).double().mean() > 0.9
