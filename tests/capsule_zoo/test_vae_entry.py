"""The baseline's entry: its pictures are of its own draws and of its own reconstructions."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from capsule_zoo.registry import create, small_sizes
from capsule_zoo.runs import sample_means


@pytest.mark.parametrize("likelihood", ["normal", "bernoulli"])
def test_pictures_show_draws_and_reconstructions(likelihood):
    torch.manual_seed(0)
    entry = create("vae", likelihood=likelihood, **small_sizes("vae"))
    images = torch.rand(4, *entry.model.image_shape)
    images[0, 0, 0, 0], images[0, 0, 0, 1] = 0.0, 1.0  # pictures are on the images' own scale
    samples = entry.figures["samples"](entry, images)
    first = sample_means(entry, 36, 0)[0, 0].numpy()
    np.testing.assert_allclose(samples.axes[0].images[0].get_array(), first, atol=1e-6)
    rebuilt = entry.figures["reconstructions"](entry, images)
    with torch.no_grad():
        expected = entry.model.mean_image(entry.guide.expectations(images))[1, 0].numpy()
    np.testing.assert_allclose(rebuilt.axes[5].images[0].get_array(), expected, atol=1e-6)
    plt.close("all")
