"""Every entry works on the device of its parameters, and on one that a variable names.

    CAPSULE_ZOO_TEST_DEVICE=cuda pytest tests/test_device.py

Without the variable no test here needs an accelerator.
"""

import os

import pyro
import pytest
import torch
from variants import create, list_models, small_settings

from capsule_zoo.data import Split
from capsule_zoo.inference import Checks, Inputs, evaluate, fit, loss_per_image

DEVICE = os.environ.get("CAPSULE_ZOO_TEST_DEVICE")
PAIRS = [
    (name, guide) for name in list_models() for guide in create(name, **small_settings(name)).guides
]
ELSEWHERE = {  # what makes tensors on the default device for a reason
    "constellations": "corners are counted and ordered on the CPU, wherever the points are",
    "capsule-network": "Pyro moves what is given to pyro.factor to the default device",
    "capsule-network:overlapping": "the same",
}


@pytest.mark.parametrize(("name", "guide"), [pair for pair in PAIRS if pair[0] not in ELSEWHERE])
def test_no_tensor_is_made_on_the_default_device(name, guide):
    """A tensor of the device without data would join those on the CPU, and raise an error."""
    pyro.set_rng_seed(0)
    entry = create(name, **small_settings(name)).use_guide(guide)
    images = entry.model.space.example(4, torch.float32, torch.Generator().manual_seed(1))
    has_labels = entry.model.supervised or entry.training.get("inputs", Inputs()).labels
    labels = torch.arange(4) % 2 if has_labels else None
    with torch.device("meta"):
        loss = loss_per_image(entry.objective, entry.model, entry.guide, images, labels)
        loss.backward()
    assert loss.isfinite()


@pytest.mark.skipif(DEVICE is None, reason="CAPSULE_ZOO_TEST_DEVICE names no device")
@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_steps_and_an_evaluation_are_on_the_device(name, guide):
    """Losses and gradients are finite there, and parameters stay there."""
    pyro.set_rng_seed(0)
    entry = create(name, **small_settings(name)).use_guide(guide)
    images = entry.model.space.example(6, torch.float32, torch.Generator().manual_seed(1))
    data = Split(images, torch.arange(6) % 2, "noise")
    labels = bool(entry.model.supervised or entry.training.get("inputs", Inputs()).labels)
    run = fit(
        entry.model,
        entry.guide,
        data,
        objective=entry.objective,
        inputs=Inputs(labels=labels, device=DEVICE),
        steps=2,
        batch_size=3,
        checks=Checks(progress=False),
    )
    assert run.history[["loss", "gradient_norm"]].notna().all(axis=None)
    modules = (entry.model, entry.guide)
    places = {p.device.type for module in modules for p in module.parameters()}
    assert places == {torch.device(DEVICE).type}
    targets = data.labels if entry.model.supervised else None
    idata = evaluate(entry.model, entry.guide, images, labels=targets, num_particles=2, draws=0)
    assert bool(idata.sample_stats["log_weight"].notnull().all())
