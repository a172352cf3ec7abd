"""Whole pictures: their objects, masks and numbers, with an untrained and a trained model."""

import warnings

import pyro
import pytest
import torch
from small_scenes import SMALL_WINDOWS, disks
from torch.nn.functional import interpolate

from capsule_zoo import create
from capsule_zoo.data.leveling import fit_leveling, warn_of_other_objects
from capsule_zoo.data.tiles import SETTINGS, tiles_of_pictures
from capsule_zoo.inference import Checks, SummedPresences, fit
from capsule_zoo.inference.whole_pictures import read_pictures


def untrained(picture, **options):
    pyro.set_rng_seed(0)
    leveling = fit_leveling([picture], width=16)
    settings = {**SETTINGS, **SMALL_WINDOWS, "leveling": leveling, **options}
    entry = create("scenes", image_shape=(1, 64, 64), **settings)
    return entry.model.eval(), entry.guide.eval()


@pytest.mark.long
def test_pictures_of_several_sizes_are_read():
    pictures = [disks(6)[0], disks(3, 70, 100)[0]]
    model, guide = untrained(pictures[0])
    results = read_pictures(model, guide, pictures)
    again = read_pictures(model, guide, pictures)
    for picture, result, same in zip(pictures, results, again, strict=True):
        assert result.count_probabilities.sum() == pytest.approx(1, abs=1e-5)
        assert result.numbers.shape == picture.shape[1:]
        assert result.masks.shape == (len(result.presence), *picture.shape[1:])
        assert result.numbers.max() <= len(result.presence)
        assert 0.25 <= result.likelihood_power <= 1
        torch.testing.assert_close(result.count_probabilities, same.count_probabilities)


@pytest.mark.parametrize("power", [0.3, 1.0])
def test_a_power_that_is_given_stays(power):
    picture, _ = disks(6)
    model, guide = untrained(picture)
    (result,) = read_pictures(model, guide, [picture], likelihood_power=power)
    assert result.likelihood_power == power


def test_a_picture_without_objects_has_none():
    picture, _ = disks(6)
    model, guide = untrained(picture)
    (result,) = read_pictures(model, guide, [torch.full_like(picture, 0.2)])
    assert result.count == 0 and len(result.presence) == 0
    assert result.count_probabilities[0] == pytest.approx(1)
    assert not result.numbers.any()


def test_pictures_of_another_precision_are_read():
    picture, _ = disks(6)
    model, guide = untrained(picture)
    counts = [read_pictures(model, guide, [picture.to(t)])[0].count for t in (None, torch.double)]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(sweeps=-1), "sweeps"),
        (dict(likelihood_power=0.0), "likelihood_power"),
        (dict(pictures=[torch.zeros(3, 40, 40)]), r"\(1, height, width\)"),
        (dict(pictures=[255 * torch.rand(1, 40, 40)]), r"must lie in \[0, 1\]"),
        (dict(pictures=[torch.zeros(1, 40, 40, dtype=torch.uint8)]), "255"),
        (dict(pictures=[torch.zeros(40, 40)]), r"\(channels, height, width\) each"),
    ],
)
def test_refusals(arguments, message):
    picture, _ = disks(6)
    model, guide = untrained(picture)
    with pytest.raises(ValueError, match=message):
        read_pictures(model, guide, **{"pictures": [picture], **arguments})


def test_objects_of_another_tone_or_width_are_pointed_out():
    picture, _ = disks(6)
    leveling = fit_leveling([picture])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_objects(leveling, picture)
        warn_of_other_objects(leveling, torch.full_like(picture, 0.2))
        warn_of_other_objects(fit_leveling([picture], 40.0), picture)  # the user knows better
        warn_of_other_objects(leveling, disks(1, seed=101)[0])  # one threshold takes noise for it
    with pytest.warns(UserWarning, match="picture 3 seem darker than its ground"):
        warn_of_other_objects(leveling, 1 - picture, 2)
    large = interpolate(picture[None], scale_factor=2)[0]
    with pytest.warns(UserWarning, match="picture 1 seem 3[0-9] pixels wide, and in training"):
        warn_of_other_objects(leveling, large)


def test_a_model_with_slots_is_refused():
    entry = create("scenes", image_shape=(1, 12, 12), window=5, size=6.0, slots=2)
    with pytest.raises(ValueError, match="poisson"):
        read_pictures(entry.model, entry.guide, [torch.zeros(1, 12, 12)])


@pytest.mark.slow  # trains for about three minutes
def test_disks_are_counted():
    """Twelve new pictures of 0 to 20 disks: at most one number is wrong, by one."""
    pictures = [disks(12, seed=seed)[0] for seed in range(6)]
    leveling = fit_leveling(pictures)
    tiles = tiles_of_pictures([leveling(p) for p in pictures], 64, 2000)
    pyro.set_rng_seed(0)
    entry = create("scenes", image_shape=(1, 64, 64), **{**SETTINGS, "leveling": leveling})
    fit(
        entry.model,
        entry.guide,
        tiles,
        objective=SummedPresences(),
        steps=500,
        batch_size=24,
        checks=Checks(progress=False),
    )
    numbers = [0, 1, 2, 4, 7, 9, 12, 14, 15, 17, 18, 20]
    tests = [disks(n, seed=100 + n) for n in numbers]
    results = read_pictures(entry.model, entry.guide, [picture for picture, _ in tests])
    errors = [result.count - n for result, n in zip(results, numbers, strict=True)]
    assert sum(map(abs, errors)) <= 1
    for result, (_, centers) in zip(results[2:], tests[2:], strict=True):
        distance = torch.cdist(centers, result.centers).amin(1)
        assert (distance < 3).float().mean() > 0.9
