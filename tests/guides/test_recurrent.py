"""The recurrent pair: one canvas, bounded cells, the divergence of each step, labels, masks."""

import math
from unittest.mock import patch

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from torch import Tensor

from capsule_zoo.data import Split
from capsule_zoo.guides import DynamicRouting, RecurrentEncoder
from capsule_zoo.guides.recurrent import OverlappingEncoder
from capsule_zoo.inference import Checks, Inputs, fit, log_weights, loss_per_image
from capsule_zoo.models import RecurrentCapsules, recurrent_capsules
from capsule_zoo.models.networks.layers import CoupledLSTM
from capsule_zoo.models.recurrent_capsules import PAPER, OverlappingCapsules
from capsule_zoo.models.routing.vector_capsules import margin_loss
from capsule_zoo.settings import configure

TINY = dict(classes=3, steps=3, latent=2, units=5, channels=(2, 2), types=2, window=4)
ALONE = RecurrentCapsules, RecurrentEncoder
MODES = [(mode, attention) for mode in ("every", "once", "none") for attention in (True, False)]


def pair(shape=(1, 17, 18), overlaid=False, **sizes):
    kinds = (OverlappingCapsules, OverlappingEncoder) if overlaid else ALONE
    model = configure(kinds[0], shape, routing=DynamicRouting(2), **{**TINY, **sizes}).double()
    return model, kinds[1](model).double()


def noise(model, number=4) -> Tensor:
    return torch.rand(number, *model.image_shape, dtype=torch.float64).round()


@pytest.mark.parametrize(("mode", "attention"), MODES)
def test_the_guide_draws_on_the_models_canvas(mode, attention):
    model, guide = pair(capsules=mode, attention=attention)
    images = noise(model)
    guide_trace = poutine.trace(guide).get_trace(images)
    codes = {site.name: guide_trace.nodes[site.name]["value"].clone() for site in model.sites}
    drawn = poutine.trace(poutine.condition(model, data=codes)).get_trace(images)
    drawings = guide_trace.nodes["_RETURN"]["value"]
    assert len(drawings) == model.steps
    torch.testing.assert_close(drawings[-1].mean, drawn.nodes["image"]["fn"].mean)


def loss_and_gradients(model, guide, images, labels):
    """Return the loss, gradients by name, and how often the model itself drew and looked."""
    pyro.set_rng_seed(0)
    draw = patch.object(model, "draw", wraps=model.draw)
    classify = patch.object(model, "classify", wraps=model.classify)
    with draw as draw, classify as classify:
        loss = loss_per_image(TraceMeanField_ELBO(), model, guide, images, labels)
    modules = torch.nn.ModuleList([model, guide])
    modules.zero_grad()
    loss.backward()
    gradients = {name: p.grad for name, p in modules.named_parameters() if p.grad is not None}
    return loss, gradients, (draw.call_count, classify.call_count)


@pytest.mark.parametrize("overlaid", [False, True], ids=["alone", "pairs"])
@pytest.mark.parametrize(("mode", "attention"), MODES)
def test_what_the_guide_has_drawn_is_not_drawn_again(mode, attention, overlaid, monkeypatch):
    """Loss and gradients equal those of a model that makes its own drawing and looks itself."""
    model, guide = pair(capsules=mode, attention=attention, overlaid=overlaid)
    labels = None if mode == "none" else torch.tensor([0, 2, 1, 2])
    images = noise(model)
    loss, gradients, times = loss_and_gradients(model, guide, images, labels)
    assert times == (0, 0)
    monkeypatch.setattr(recurrent_capsules, "find_value", lambda rests_on: None)
    alone, expected, times = loss_and_gradients(model, guide, images, labels)
    assert times == (1, labels is not None)
    torch.testing.assert_close(loss, alone)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize("overlaid", [False, True], ids=["alone", "pairs"])
def test_a_model_of_images_that_its_guide_has_not_seen_looks_at_them_itself(overlaid):
    model, guide = pair(label_weight=7.0, overlaid=overlaid)
    images, labels = noise(model), torch.tensor([0, 2, 1, 2])
    guide_trace = poutine.trace(guide).get_trace(noise(model))
    drawn = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(images, labels)
    presence = torch.eye(3)[labels]
    if overlaid:
        images = torch.maximum(images, images[[3, 0, 1, 2]])
        presence = torch.tensor([[1.0, 0, 1], [1, 0, 1], [0, 1, 1], [0, 1, 1]])
    loss = margin_loss(model.classify(images), presence)
    torch.testing.assert_close(drawn.nodes["label"]["fn"].log_factor, -7 * loss)


def test_the_paper_preset_has_the_papers_sizes():
    """At 28x28, 6x6 positions of 32 primary capsules see an image, 32 a code; 10 classes of 16."""
    model = configure(RecurrentCapsules, routing=DynamicRouting(3), **PAPER)
    assert model.reader.classes.transform.shape == (6 * 6 * 32, 8, 10 * 16)
    assert model.writer.classes.transform.shape == (32, 8, 10 * 16)
    widths = [
        part.weight.shape[:2] for net in (model.reader, model.writer) for part in net.network[::2]
    ]
    assert widths == [(256, 2), (128, 256), (100, 128), (128, 256)]  # transposed: inputs first


def test_a_drawing_is_the_sum_of_its_strokes():
    """Each stroke is drawn through the window that the model shows, or everywhere."""
    for attention in (True, False):
        model, guide = pair(attention=attention)
        canvas = model.blank
        for drawing in guide(noise(model)):
            patch = model.paint(drawing.hidden).unflatten(1, model.patch_shape)
            canvas = canvas + (model.window(drawing).write(patch) if attention else patch)
            torch.testing.assert_close(drawing.canvas, canvas)


def test_the_guide_sees_what_is_missing():
    """If the canvas equals the image at every step, the guide sees no error."""
    model, guide = pair(capsules="none", attention=False)
    images = noise(model)
    perfect = model.begin(len(images))._replace(canvas=images.logit(eps=1e-12))
    image, error = guide.read(images, perfect).chunk(2, dim=1)
    torch.testing.assert_close(image, images.flatten(1))
    assert error.abs().max() < 1e-9


def test_what_the_forget_gate_leaves_is_what_the_input_gate_lets_in():
    cell, (inputs, hidden, state) = CoupledLSTM(3, 3), torch.randn(3, 4, 3)
    forget, output, new = (torch.cat([inputs, hidden], 1) @ cell.gates.weight.T).split(3, 1)
    after = forget.sigmoid() * state + (1 - forget.sigmoid()) * new.tanh()
    outputs = cell(inputs, hidden, state)
    torch.testing.assert_close(outputs, (output.sigmoid() * after.tanh(), after))


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_cells_stay_within_one_for_any_number_of_steps(scale):
    cell = CoupledLSTM(3, 6)
    with torch.no_grad():
        cell.gates.weight.mul_(scale)
    hidden = state = torch.zeros(8, 6)
    for _ in range(32):
        hidden, state = cell(scale * torch.randn(8, 3), hidden, state)
        assert state.abs().max() <= 1 and hidden.abs().max() <= math.tanh(1) + 1e-6


def replayed(model, guide, images, seed=0):
    """Return traces of guide and model on the same draws."""
    pyro.set_rng_seed(seed)
    guide_trace = poutine.trace(guide).get_trace(images)
    return guide_trace, poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(images)


def test_the_divergence_of_each_step_is_the_closed_form():
    """The loss is the reconstruction plus the sum of divergences: no constant is lost."""
    model, guide = pair()
    images = noise(model)
    guide_trace, drawn = replayed(model, guide, images)
    pyro.set_rng_seed(0)
    divergence = guide.divergences(images)
    assert divergence.shape == (model.steps, len(images))
    for kl, site in zip(divergence, model.sites, strict=True):
        distribution = guide_trace.nodes[site.name]["fn"].base_dist
        mean, variance = distribution.mean, distribution.variance
        expected = 0.5 * (mean.square() + variance - 1 - variance.log()).sum(1)
        torch.testing.assert_close(kl, expected.detach())
    drawn.compute_log_prob()
    reconstruction = drawn.nodes["image"]["log_prob"].mean()
    pyro.set_rng_seed(0)
    loss = loss_per_image(TraceMeanField_ELBO(), model, guide, images)
    torch.testing.assert_close(loss, divergence.sum(0).mean() - reconstruction)


def test_divergences_are_what_log_weights_lose_on_average():
    """Many draws of one image: the mean of log q - log p at a step is the mean of its KL."""
    model, guide = pair((1, 2, 3), steps=2, capsules="none", attention=False)
    images = noise(model, 1).expand(10_000, -1, -1, -1)
    with torch.no_grad():
        _, drawn, guide_trace = log_weights(model, guide, images)
        for trace in (drawn, guide_trace):
            trace.compute_log_prob()
        pyro.set_rng_seed(1)
        expected = guide.divergences(images)
    for t, site in enumerate(model.sites):
        excess = guide_trace.nodes[site.name]["log_prob"] - drawn.nodes[site.name]["log_prob"]
        gap = (excess.mean() - expected[t].mean()).abs()
        spread = (excess.var() + expected[t].var()).sqrt() / len(images) ** 0.5
        assert gap < 5 * spread


@pytest.mark.parametrize("mode", ["every", "once"])
def test_labels_add_the_margin_loss_and_nothing_else(mode):
    model, guide = pair(capsules=mode, label_weight=7.0)
    images, labels = noise(model), torch.tensor([0, 2, 1, 2])
    losses = []
    for marks in (None, labels):
        pyro.set_rng_seed(0)
        losses.append(loss_per_image(TraceMeanField_ELBO(), model, guide, images, marks))
    presence = torch.eye(3)[labels]
    expected = 7 * margin_loss(model.classify(images), presence).mean()
    torch.testing.assert_close(losses[1] - losses[0], expected)
    assert expected > 0


@pytest.mark.parametrize("mode", ["every", "once"])
def test_capsules_that_are_masked_say_nothing_of_the_image(mode):
    model, guide = pair(capsules=mode, attention=False)
    images = noise(model)

    def codes(attend):
        pyro.set_rng_seed(0)
        nodes = poutine.trace(guide).get_trace(images, attend=attend).nodes
        return torch.stack([nodes[site.name]["fn"].mean for site in model.sites])

    everything, nothing = torch.ones(4, 3).double(), torch.zeros(4, 3).double()
    torch.testing.assert_close(codes(everything), codes(None))
    only = codes(torch.eye(3, dtype=torch.float64)[torch.tensor([0, 1, 2, 2])])
    assert not torch.allclose(only, codes(None))
    if mode == "every":  # nothing else tells of the image
        (first, *_) = codes(nothing)
        torch.testing.assert_close(first, first[:1].expand_as(first))


def test_the_first_canvas_is_the_mean_of_the_data():
    model, _ = pair()
    images = noise(model, 50)
    model.set_base_rates(images)
    expected = images.mean(0).clamp(0.01, 0.99)
    torch.testing.assert_close(model.begin(1).mean[0], expected)


def test_capsules_learn_the_class_and_the_drawing():
    """Bars are on the left or on the right; a few steps separate them and gain nats."""
    pyro.set_rng_seed(0)
    model, guide = pair((1, 17, 17), classes=2, units=16, channels=(4, 4))
    model.float(), guide.float()
    labels = torch.arange(40) % 2
    images = torch.zeros(40, 1, 17, 17)
    images[labels == 0, :, 3:14, 3:7] = 1
    images[labels == 1, :, 3:14, 10:14] = 1
    images = (images - 0.1 * torch.rand_like(images)).abs().bernoulli()
    settings = dict(
        objective=TraceMeanField_ELBO(), lr=0.01, batch_size=20, checks=Checks(progress=False)
    )
    run = fit(model, guide, Split(images, labels), steps=60, inputs=Inputs(labels=True), **settings)
    assert (model.classify(images).argmax(1) == labels).all()
    first, last = run.history["loss"].iloc[0], run.history["loss"].iloc[-1]
    assert last < 0.6 * first


def test_a_photograph_has_normal_pixels():
    model, guide = pair((3, 17, 17), likelihood="normal", sigma_image=0.3)
    images = torch.rand(2, 3, 17, 17, dtype=torch.float64)
    drawings = guide(images)
    _, drawn = replayed(model, guide, images)
    distribution = drawn.nodes["image"]["fn"].base_dist
    assert drawings[-1].canvas.shape == images.shape
    torch.testing.assert_close(distribution.scale, torch.full_like(images, 0.3))
