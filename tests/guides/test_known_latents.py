"""Known values: they are what the guide draws, and what is missing is named."""

import pytest
import torch
from pyro import poutine

from capsule_zoo.guides import KnownLatents
from capsule_zoo.inference import evaluate
from capsule_zoo.inference.evaluation.ancestral import infer
from capsule_zoo.registry import create, small_settings

IMAGES = 3


def draw_latents(name):
    """Return a discrete model, images, and the values that the entry's guide drew for them."""
    torch.manual_seed(0)
    entry = create(name, **small_settings(name))
    images = torch.rand(IMAGES, *entry.model.image_shape).round()
    return entry.model.discretize(), images, infer(entry.guide, images)


@pytest.mark.parametrize("name", ["part-whole", "shape-codes", "vae", "recurrent-capsules"])
def test_it_draws_the_values(name):
    model, images, values = draw_latents(name)
    drawn = KnownLatents(model, values)(images)
    assert drawn.keys() == {site.name for site in model.latent_sites}
    for site, value in drawn.items():
        assert torch.equal(value, values[site])


@pytest.mark.parametrize("name", ["vae", "generative-capsnet", "recurrent-capsules"])
def test_its_bound_is_the_joint_density_of_its_values(name):
    model, images, values = draw_latents(name)
    trace = poutine.trace(poutine.condition(model, values)).get_trace(images)
    idata = evaluate(model, KnownLatents(model, values), images, num_particles=1)
    joint = trace.log_prob_sum().item()
    assert float(idata["sample_stats"]["log_weight"].sum()) == pytest.approx(joint, rel=1e-5)
