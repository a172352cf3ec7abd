"""The AIR of Pyro's tutorial, with which scenes are compared: its prior, its windows, a step."""

import torch


def test_air_of_the_tutorial(load_benchmark):
    script = load_benchmark("air")
    air = script.TutorialAir(20)
    left = torch.cat([air.more.new_ones(1), air.more.cumprod(0)])
    distribution = left - torch.cat([left[1:], left.new_zeros(1)])
    torch.testing.assert_close(distribution[1:] / distribution[:-1], torch.full((3,), 0.01))
    pictures, shift = torch.rand(2, 9, 9), torch.tensor([[0.1, -0.2], [0.0, 0.3]])
    scale = torch.tensor([3.0, 2.0])
    canvases = script.warp_pictures(pictures, scale, shift, 90)
    back = script.warp_pictures(canvases, 1 / scale, -shift / scale[:, None], 9)
    assert (back - pictures)[:, 2:-2, 2:-2].abs().mean() < 0.05
    before = [p.clone() for p in air.parameters()]
    air.svi().step(torch.rand(4, 1, 20, 20))
    assert all((p != q).any() for p, q in zip(air.parameters(), before, strict=True))
