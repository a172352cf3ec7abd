"""Pictures of energy models show what they claim, and leave the random state alone."""

import numpy as np
import pytest
import torch
from variants import create, small_settings

from capsule_zoo.figures import curves, energy, generic, grids
from capsule_zoo.inference.evaluation.ancestral import mean_images


def shown(figure):
    """Return the pictures of a figure, row by row."""
    return [np.asarray(each.get_array()) for axis in figure.axes for each in axis.images]


@pytest.mark.parametrize("name", ["capsule-rbm", "rbm", "capsule-helmholtz"])
def test_every_picture_of_an_entry_is_drawn(name):
    entry = create(name, **small_settings(name))
    images = torch.rand(3, *entry.model.image_shape)
    state = torch.get_rng_state()
    for draw in entry.figures.values():
        assert shown(draw(entry, images))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, {}) for name in ("capsule-rbm", "capsule-helmholtz", "vae")),
        ("vae", {"likelihood": "bernoulli"}),
        *((name, {}) for name in ("generative-capsnet", "generative-capsnet:continuous")),
        *((name, {}) for name in ("conditional-autoencoder", "conditional-autoencoder:broadcast")),
    ],
)
def test_reconstructions_are_of_what_the_guide_expects_and_samples_of_the_model(name, sizes):
    entry = create(name, **{**small_settings(name), **sizes})
    images = torch.rand(4, *entry.model.image_shape)
    images.view(-1)[:2] = torch.tensor([0.0, 1.0])  # pictures are on the images' own scale
    with torch.no_grad():
        for name, bias in entry.model.named_parameters():
            if name.endswith("paint.bias"):
                bias.zero_()  # some models start dark, and black pictures are all alike
        expected = entry.model.mean_image(entry.guide.expectations(images))[:, 0]
    rows = shown(entry.figures["reconstructions"](entry, images))
    np.testing.assert_allclose(rows, torch.cat([images[:, 0], expected]).clamp(0, 1), atol=1e-6)
    drawn = shown(entry.figures["samples"](entry, images))
    np.testing.assert_allclose(drawn, mean_images(entry.model, 32)[:, 0].clamp(0, 1), atol=1e-6)


def test_fields_are_one_for_each_capsule():
    entry = create("capsule-rbm", **{**small_settings("capsule-rbm"), "capsules": 12})
    images = torch.rand(3, *entry.model.image_shape)
    assert len(shown(energy.fields(entry, images))) == 12


def test_pictures_of_standard_scores_are_on_the_scale_of_the_images():
    entry = create("capsule-rbm", **small_settings("capsule-rbm"), visible_family="gaussian")
    pixels = torch.rand(4, *entry.model.image_shape)
    pixels.view(-1)[:2] = torch.tensor([0.0, 1.0])
    rows = shown(generic.reconstructions(entry, 3 * pixels - 1))
    np.testing.assert_allclose(rows[0], pixels[0, 0], atol=1e-6)
    assert all(row.min() >= 0 and row.max() <= 1 for row in rows)


def test_a_sum_of_all_capsules_is_the_reconstruction():
    torch.manual_seed(0)
    entry = create("capsule-rbm", **small_settings("capsule-rbm"))
    with torch.no_grad():
        for parameter in entry.model.parameters():
            parameter.normal_()
    images = torch.rand(2, *entry.model.image_shape)
    images.view(-1)[:2] = torch.tensor([0.0, 1.0])
    rows = shown(energy.sums(entry, images))
    assert len(rows) == 2 * 2 * (1 + 3)  # the image or the sum, and three capsules
    expected = entry.model.reconstruct(images)[0, 0].detach().numpy()
    for whole in (rows[4], rows[7]):  # below the image, and after the weakest capsule
        np.testing.assert_allclose(whole, np.repeat(expected[..., None], 3, 2), atol=1e-6)
    np.testing.assert_allclose(rows[0][..., 0], images[0, 0], atol=1e-6)


def test_spectra_hold_each_class_in_a_panel_of_its_own():
    labels = np.array([0, 1, 0, 2, 1, 0])
    features = np.eye(6)
    figure = energy.spectra({"one": features, "five": 5 * features}, labels, each=2)
    panels = shown(figure)
    for panel, rows in zip(panels, 2 * ([0, 2], [1, 4], [3]), strict=True):
        np.testing.assert_array_equal(panel > 0, features[rows] > 0)
    limits = [axis.images[0].get_clim() for axis in figure.axes]
    assert limits == 3 * [(0, 1)] + 3 * [(0, 5)]


def test_curves_are_drawn_on_a_log_scale_beside_published_points():
    ours, theirs = {"ours": ((10, 100), (0.3, 0.1))}, {"theirs": ((10,), (0.2,))}
    (axis,) = curves.curves_on_log_scale(ours, "updates", "error", theirs).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    assert lines == {"ours": [[10, 0.3], [100, 0.1]], "theirs": [[10, 0.2]]}


def test_colors_are_red_above_zero_and_blue_below():
    red, white, blue = grids.signed_colors(torch.tensor([[1.0, 0.0, -1.0]]))[0]
    assert red[0] > red[2] and blue[2] > blue[0] and white.min() > 0.9
