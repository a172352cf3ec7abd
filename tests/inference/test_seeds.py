"""A seed decides what is drawn, and the random state of the caller is left alone."""

import pytest
import torch
from small_entries import images_for, small_entry
from small_rbms import small as small_rbm
from toys import conjugate_images, pair

from capsule_zoo.data import Split, half_mask
from capsule_zoo.inference import evaluate, fill_in, infer, intervene, log_partition, mean_images
from capsule_zoo.inference.annealing import annealed_log_likelihood
from capsule_zoo.inference.calibration import check_calibration
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.inference.sample_quality import train_classifier


def of_vae(call):
    """Return a function of a seed that calls with a small pair, and three images."""
    entry = small_entry("vae")
    return lambda seed: call(entry.model, entry.guide, images_for(entry), seed)


def of_toys(call):
    pairs, images = pair(), conjugate_images(3)
    return lambda seed: call(*pairs, images, seed)


def annealed(model, guide, images, seed):
    settings = dict(temperatures=3, leapfrogs=2, pilot_chains=2, chains=3, simulated=2)
    stats = annealed_log_likelihood(model, guide, images, seed=seed, **settings).sample_stats
    names = "log_weight", "simulated_log_weight", "reverse_log_weight"
    return torch.cat([torch.from_numpy(stats[name].values).flatten() for name in names])


def of_machine():
    model = small_rbm()
    return lambda seed: torch.tensor(log_partition(model, "ais", temperatures=5, seed=seed).value)


def classifier(model, guide, images, seed):
    trained = train_classifier(Split(images, torch.arange(3) % 2), 2, epochs=1, seed=seed)
    return next(iter(trained.parameters())).detach()


CALLS = {
    "evaluate": lambda: of_toys(
        lambda *p: torch.from_numpy(evaluate(*p[:3], seed=p[3]).sample_stats.log_weight.values)
    ),
    "annealed": lambda: of_toys(annealed),
    "infer": lambda: of_vae(lambda m, g, x, seed: infer(g, x, seed=seed)["image_code"]),
    "mean_images": lambda: of_vae(lambda m, g, x, seed: mean_images(m, 3, seed=seed)),
    "fill_in": lambda: of_vae(
        lambda m, g, x, seed: fill_in(m, g, x, half_mask((5, 6), "left"), seed=seed).drawn
    ),
    "intervene": lambda: of_vae(
        lambda m, g, x, seed: intervene(m, g, x, {"image_code": lambda z: z + 1}, seed=seed).images
    ),
    "refine": lambda: of_vae(
        lambda m, g, x, seed: (
            refine(m, g, x, steps=2, distribution="normal", seed=seed).refinement.end
        )
    ),
    "calibration": lambda: of_toys(
        lambda m, g, x, seed: check_calibration(m, g, number=100, seed=seed).ranks
    ),
    "log_partition": of_machine,
    "classifier": lambda: of_vae(classifier),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_seed_decides_what_is_drawn_and_the_random_state_stays(name):
    call = CALLS[name]()
    before = torch.get_rng_state()
    first = call(3)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(7)
    again, other = call(3), call(4)
    assert torch.equal(first, again) and not torch.equal(first, other)
