"""Whatever measures or draws does so in evaluation mode, and leaves modules in their own mode."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from capsule_zoo.data import Split
from capsule_zoo.inference import (
    classify,
    compare,
    encode,
    error_rate,
    evaluate,
    fill_in,
    mean_images,
    posterior_predictive,
    reconstruct,
    sample,
)
from capsule_zoo.inference.evaluation.ancestral import infer
from capsule_zoo.inference.functions import as_module
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.inference.probes import latents
from capsule_zoo.registry import create, small_settings

IMAGES = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 1])


def pair(name):
    entry = create(name, **{**small_settings(name), "image_shape": IMAGES.shape[1:]})
    return entry.model.train(), entry.guide.train()


DRAW = {
    "evaluate": lambda m, g: evaluate(m, g, IMAGES, num_particles=2),
    "compare": lambda m, g: compare({"a": (m, g)}, IMAGES, num_particles=2),
    "encode": lambda m, g: encode(m, g, IMAGES),
    "reconstruct": lambda m, g: reconstruct(m, g, IMAGES),
    "posterior_predictive": lambda m, g: posterior_predictive(m, g, IMAGES, num_samples=2),
    "sample": lambda m, g: sample(m, 3),
    "infer": lambda m, g: mean_images(m, 3, infer(g, IMAGES), images=IMAGES),
    "latents": lambda m, g: latents(g, IMAGES, [g.covers[0]]),
    "refine": lambda m, g: refine(m, g, IMAGES, steps=1),
    "fill_in": lambda m, g: fill_in(m, g, IMAGES, IMAGES > 0.5, num_particles=2),
}
CLASSIFY = {
    "classify": lambda m, g: classify(m, g, IMAGES),
    "error_rate": lambda m, g: error_rate(m, g, Split(IMAGES, LABELS)),
    "infer": lambda m, g: infer(g, IMAGES),
    **{verb: DRAW[verb] for verb in ("encode", "latents")},
}
CASES = [(name, verb, call) for name in ("vae", "part-whole") for verb, call in DRAW.items()] + [
    ("cnn", verb, call) for verb, call in CLASSIFY.items()
]


@pytest.mark.parametrize(("name", "verb", "call"), CASES, ids=[f"{n}-{v}" for n, v, _ in CASES])
def test_nothing_runs_in_training_mode(name, verb, call):
    model, guide = pair(name)
    modes = []

    def note(module, arguments):
        if isinstance(module, (type(model), type(guide))):
            modes.append(any(part.training for part in module.modules()))

    hook = register_module_forward_pre_hook(note)
    try:
        call(model, guide)
    finally:
        hook.remove()
    assert modes or verb in CLASSIFY
    assert not any(modes)
    assert model.training and guide.training


def test_error_rates_are_those_of_evaluation_mode():
    """Training mode drops half of the units, and would answer at random."""
    model, guide = pair("cnn")
    expected = model.eval().scores(IMAGES).argmax(-1)
    model.train()
    for _ in range(8):
        assert torch.equal(classify(model, guide, IMAGES), expected)
    assert model.training


class Reader(nn.Module):
    """A network whose values in training depend on the batch and on chance."""

    def __init__(self, latent):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(64, latent), nn.BatchNorm1d(latent), nn.Dropout(0.5))
        self.head[1].running_mean.fill_(0.3)

    def guide(self, images=None, labels=None):
        pyro.module("reader", self)
        with pyro.plate("images", len(images)):
            mean = self.head(images.flatten(1))
            pyro.sample("image_code", dist.Normal(mean, 1.0).to_event(1))


@pytest.mark.parametrize("form", ["function", "method"])
@pytest.mark.parametrize("verb", ["evaluate", "compare", "encode"])
def test_modules_that_a_function_calls_are_in_evaluation_mode_too(form, verb):
    model, _ = pair("vae")
    torch.manual_seed(1)
    reader = Reader(model.latent)
    guide = reader.guide
    if form == "function":

        def guide(images=None, labels=None):
            reader.guide(images)

    buffers = [b.clone() for b in reader.buffers()]
    guide = as_module(guide, IMAGES)

    torch.manual_seed(2)
    answer = DRAW[verb](model, guide)
    assert reader.training and reader.head[2].training
    for now, before in zip(reader.buffers(), buffers, strict=True):
        assert torch.equal(now, before)
    reader.eval()
    torch.manual_seed(2)
    expected = DRAW[verb](model, guide)
    assert not reader.training
    if verb == "evaluate":
        answer, expected = answer.sample_stats, expected.sample_stats
    if verb == "compare":
        answer, expected = (x.drop(columns="seconds_per_image") for x in (answer, expected))
    for name in expected:
        np.testing.assert_array_equal(np.asarray(answer[name]), np.asarray(expected[name]))
