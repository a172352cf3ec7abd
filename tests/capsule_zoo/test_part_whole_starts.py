"""Training starts: at every seed, at every width, from the constructors as from the registry."""

import inspect

import pyro
import pytest
import torch
from torch.distributions import Normal

from capsule_zoo.data import load_dataset
from capsule_zoo.guides import EMObjects, PartWholeGuide
from capsule_zoo.inference import Checks, Pace, fit
from capsule_zoo.inference.training.settings import pace_arguments
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.models.specification import spec
from capsule_zoo.registry import create
from capsule_zoo.settings import configure

WIDE = dict(channels=128, width=128, blocks=3)


def start_small(seed: int, wide: bool, **settings) -> tuple[list[float], float]:
    """Train briefly on digits of 14 pixels; return all losses, and the loss of a blank canvas."""
    images = load_dataset("digits", size=14).train.images[:512]
    pyro.set_rng_seed(seed)
    model = PartWholeCapsules((1, 14, 14), objects=16, parts=12, painting=Painting(template_size=7))
    guide = configure(PartWholeGuide, model, **WIDE if wide else {})
    short = dict(steps=45, pace=Pace("constant"), batch_size=32, checks=Checks(progress=False))
    run = fit(model, guide, images, seed=seed, **short, **settings)
    blank = -Normal(torch.zeros(()), model.sigma_image).log_prob(images).sum((1, 2, 3)).mean()
    return run.history["loss"].tolist(), blank.item()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_it_paints_within_45_steps(seed):
    """Wide networks move the poses most in a step; without warm-up they started at no seed."""
    losses, blank = start_small(seed, wide=True)
    assert sum(losses[-10:]) / 10 < blank / 2 and min(losses[:-1]) < blank / 2


def test_constructors_and_registry_give_one_pair():
    """The pairs are equal to the bit in sizes, settings of the story, and training."""
    entry = create("part-whole")
    torch.manual_seed(0)
    again = create("part-whole")
    torch.manual_seed(0)
    model = PartWholeCapsules()
    guide = PartWholeGuide(model)
    for ours, theirs in ((model, again.model), (guide, again.guide)):
        mine, its = ours.state_dict(), theirs.state_dict()
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name], its[name]) for name in mine)
    selections = zip(model.selections, again.model.selections, strict=True)
    assert all(a.sigma_min == b.sigma_min for a, b in selections)
    assert spec(model) == spec(again.model)
    assert spec(guide, model=model) == spec(again.guide, model=again.model)
    assert guide.fit_settings == PartWholeGuide(model, above=EMObjects).fit_settings
    assert entry.training == pace_arguments(guide.fit_settings)
    assert entry.training.keys() <= inspect.signature(fit).parameters.keys()
