"""With one batch dim or several, networks give equal numbers; tensors are joined as if expanded."""

import pytest
import torch
from torch import nn

from capsule_zoo.models.networks.leading import join_broadcast, over_leading


@pytest.mark.parametrize("batch", [(5,), (3, 5), (2, 1, 5)])
def test_a_network_gives_each_row_what_it_gives_it_alone(batch):
    torch.manual_seed(0)
    network = nn.Conv2d(2, 3, 3).double()
    inputs = torch.randn(*batch, 2, 4, 5, dtype=torch.float64)
    outputs = over_leading(network, inputs, event_dim=3)
    assert outputs.shape == (*batch, 3, 2, 3)
    alone = [network(x[None])[0] for x in inputs.flatten(0, -4)]
    torch.testing.assert_close(outputs.flatten(0, -4), torch.stack(alone))


@pytest.mark.parametrize("dim", [-1, -3])
def test_tensors_that_lack_a_plate_are_joined_as_if_they_had_it(dim):
    shared, batch = torch.randn(5, 2, 3, 4), torch.randn(6, 5, 2, 3, 4)
    expected = torch.cat([shared.expand(6, -1, -1, -1, -1), batch], dim)
    assert torch.equal(join_broadcast([shared, batch], dim), expected)
    assert torch.equal(join_broadcast([batch, batch], dim), torch.cat([batch, batch], dim))
    flat = shared[:1]  # one for all images
    assert torch.equal(
        join_broadcast([flat, batch], dim), torch.cat([flat.expand_as(batch), batch], dim)
    )
