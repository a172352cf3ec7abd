"""Set layers do not see the order of a set; attention pooling is a weighted mean."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from capsule_zoo.models.networks.layers import (
    ELU,
    AttentionPooling,
    BalancedLogits,
    MultiheadAttentionBlock,
    SetTransformer,
    elu,
)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1.2e-7), (torch.float64, 2.3e-16)])
def test_the_exponential_linear_unit_is_torchs_to_the_rounding_of_one(dtype, rounding):
    x = torch.cat([torch.linspace(-90, 90, 1001), torch.tensor([-1e-9, 0.0, 1e-9])]).to(dtype)
    assert (elu(x) - F.elu(x)).abs().max() <= rounding
    assert elu(torch.tensor([torch.nan]))[0].isnan()
    torch.testing.assert_close(ELU()(x), elu(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")  # torch scripts its own formulas
def test_the_exponential_linear_unit_has_all_derivatives():
    x = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(elu(x).sum(), x)
    torch.testing.assert_close(slope, torch.where(x > 0, 1.0, x.exp()))
    away = x.detach()[[0, 1, 3, 4]].requires_grad_()
    assert gradcheck(elu, away) and gradgradcheck(elu, away)
    _, forward = torch.func.jvp(elu, (x.detach(),), (torch.ones_like(x),))
    torch.testing.assert_close(forward, slope)
    derivative = torch.func.vmap(torch.func.grad(lambda y: elu(y)))(x.detach())
    torch.testing.assert_close(derivative, slope)


def test_what_is_compiled_or_of_sixteen_bits_is_torchs_own():
    with torch.autocast("cpu", torch.bfloat16):
        half = torch.randn(100).bfloat16()
        torch.testing.assert_close(elu(half), F.elu(half), rtol=0, atol=0)
    program = torch.export.export(ELU(), (torch.randn(3),))
    assert torch.ops.aten.elu.default in {node.target for node in program.graph.nodes}


def test_a_set_transformer_does_not_see_the_order():
    torch.manual_seed(0)
    network = SetTransformer(5, capsules=3, outputs=4, width=16, heads=2, inducing=4).double()
    items = torch.randn(2, 7, 5, dtype=torch.float64)
    shuffled = items[:, torch.randperm(7)]
    assert network(items).shape == (2, 3, 4)
    torch.testing.assert_close(network(shuffled), network(items))
    assert not torch.allclose(network(items + 0.1), network(items))


def test_attention_block_against_one_head_written_out():
    torch.manual_seed(0)
    block = MultiheadAttentionBlock(8, heads=1).double()
    x, y = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    key, value = block.key_value(y).chunk(2, dim=-1)
    weights = (block.query(x) @ key.transpose(1, 2) / 8**0.5).softmax(-1)
    hidden = block.norm_attention(x + block.mix(weights @ value))
    expected = block.norm_feed(hidden + block.feed(hidden).relu())
    torch.testing.assert_close(block(x, y), expected)
    shared = block(x[:1], y)  # one set for all images
    torch.testing.assert_close(shared, block(x[:1].expand_as(x), y))


def test_attention_pooling_is_a_weighted_mean_of_what_is_read_at_each_place():
    torch.manual_seed(0)
    pooling = AttentionPooling(6, capsules=4, outputs=3).double()
    features = torch.randn(2, 6, 5, 5, dtype=torch.float64)
    maps = pooling.read(features).flatten(2).unflatten(1, (4, 4))
    expected = (maps[:, :, :3] * maps[:, :, 3:].softmax(-1)).sum(-1)
    torch.testing.assert_close(pooling(features), expected)


def test_balanced_logits_have_the_same_mean_and_spread_whatever_comes_in():
    balance = BalancedLogits(3, spread=2.0).double()
    shifted = torch.randn(4000, 3, dtype=torch.float64) * torch.tensor([0.01, 1.0, 30.0]) + 50
    for _ in range(200):
        out = balance(shifted)
    torch.testing.assert_close(out.mean(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-6)
    variance = shifted.var(0, correction=0)
    expected = 2.0 * (variance / (variance + 1e-5)).sqrt()
    torch.testing.assert_close(out.std(0, correction=0), expected, rtol=1e-10, atol=0)
    assert expected[0] < 1.95 and (expected[1:] > 1.99).all()  # the first is near the floor
    balance.eval()  # the running statistics have converged to those of the batch
    torch.testing.assert_close(balance(shifted)[:5], out[:5], rtol=1e-2, atol=1e-2)
    alone = balance(shifted[:1])
    torch.testing.assert_close(balance.train()(shifted[:1]), alone)  # one image has no spread
