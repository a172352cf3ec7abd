"""NaN where a pixel is hidden, and masks that hide halves."""

import pytest
import torch

from capsule_zoo.data import half_mask, hide


def test_a_half_is_hidden_on_the_side_that_is_named():
    expected = {
        "left": [[0, 0, 1, 1]] * 2,
        "right": [[1, 1, 0, 0]] * 2,
        "top": [[0] * 4, [1] * 4],
        "bottom": [[1] * 4, [0] * 4],
    }
    for side, rows in expected.items():
        assert torch.equal(half_mask((2, 4), side), torch.tensor(rows, dtype=torch.bool)), side
    assert half_mask((3, 3), "top").sum() == 3  # the middle row is hidden too


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6), (2, 1, 4, 6), (2, 3, 4, 6)])
def test_masks_of_every_shape_hide_their_pixels_alone(shape):
    images = torch.rand(2, 3, 4, 6)
    observed = torch.rand(shape) < 0.5
    hidden = hide(images, observed)
    assert torch.equal(hidden.isnan(), ~observed.expand(images.shape))
    assert torch.equal(hidden[~hidden.isnan()], images[observed.expand(images.shape)])
    assert not images.isnan().any()
