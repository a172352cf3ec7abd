"""Pictures of energy models show what they claim, and leave the random state alone."""

import numpy as np
import pytest
import torch

from capsule_zoo.figures import energy, generic
from capsule_zoo.inference.evaluation.ancestral import mean_images
from capsule_zoo.registry import create, small_settings


def shown(figure):
    """Return the pictures of a figure, row by row."""
    return [np.asarray(each.get_array()) for axis in figure.axes for each in axis.images]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, {}) for name in ("capsule-rbm", "capsule-helmholtz", "vae")),
        ("vae", {"likelihood": "bernoulli"}),
        *((name, {}) for name in ("generative-capsnet", "generative-capsnet-continuous")),
        *((name, {}) for name in ("conditional-autoencoder", "broadcast-autoencoder")),
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
