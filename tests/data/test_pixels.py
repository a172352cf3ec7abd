"""Binarization is a Bernoulli draw; standard scores have mean 0, variance 1 and an inverse."""

import pytest
import torch

from capsule_zoo.data import Binarize, Dataset, Split, Standardize, hide


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_binarization_has_the_mean_of_the_pixels_and_leaves_binary_images_alone():
    pixels = torch.linspace(0, 1, 4).view(1, 1, 2, 2)
    drawn = Binarize()(pixels.expand(20_000, -1, -1, -1), generator=generator())
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert ((drawn.mean(0) - pixels[0]).abs() < 5.5 * 0.5 / 20_000**0.5).all()
    again = Binarize()(drawn, generator=generator(1))
    assert torch.equal(again, drawn) and again.dtype == pixels.dtype


def test_binarization_keeps_missing_pixels():
    gray = torch.rand(50, 1, 4, 4)
    observed = torch.rand(4, 4) > 0.5
    hidden = Binarize()(hide(gray, observed), generator=generator())
    assert torch.equal(hidden.isnan(), ~observed.expand_as(hidden))
    assert torch.equal(
        hidden[..., observed], Binarize()(gray, generator=generator())[..., observed]
    )


def test_standard_scores_and_back():
    pixels = torch.rand(30, 1, 4, 4, dtype=torch.float64)
    standard = Standardize.of(pixels)
    scores = standard(pixels)
    assert abs(scores.mean()) < 1e-12 and scores.std(correction=0) == pytest.approx(1)
    torch.testing.assert_close(standard.inverse(scores), pixels)


def test_a_transformed_data_set_is_so_in_every_split():
    splits = [Split(torch.rand(n, 1, 2, 2), torch.arange(n)) for n in (5, 3, 4)]
    data = Dataset("toy", *splits)
    changed = data.transform_images(Standardize(0.5, 2.0))
    for before, after in zip(
        splits, (changed.train, changed.validation, changed.test), strict=True
    ):
        assert torch.equal(after.images, (before.images - 0.5) / 2)
        assert torch.equal(after.labels, before.labels)
