"""Decoders on request: the effect of a request, and the identity without one."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from capsule_zoo.models import ConditionalAutoencoder

SHAPE = (1, 9, 6)  # not a multiple of four


def small(decoder="convolutional", **options):
    torch.manual_seed(0)
    return ConditionalAutoencoder(
        SHAPE, 3, decoder=decoder, hidden=5, channels=4, **options
    ).double()


@pytest.mark.parametrize("decoder", ["convolutional", "linear", "broadcast"])
def test_code_and_request_both_reach_the_image(decoder):
    model = small(decoder)
    code = torch.randn(4, 3).double().requires_grad_()
    request = torch.randn(4, 2).double().requires_grad_()
    mean = model.mean_image({"image_code": code}, request)
    assert mean.shape == (4, *SHAPE)
    slopes = torch.autograd.grad(mean[0].sum(), (code, request))
    for slope in slopes:
        assert (slope[0] != 0).all() and (slope[1:] == 0).all()


def test_hidden_units_of_the_linear_decoder_are_affine_in_code_and_in_request():
    decoder, inputs = small("linear").decoder, []
    decoder.decoder.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    code, other = torch.randn(2, 4, 3).double()
    request, rotated = torch.randn(2, 4, 2).double()
    with torch.no_grad():
        for c, r in ((code, request), (code, rotated), (code, 0.3 * request + 0.7 * rotated)):
            decoder(c, r)
        for c in (other, 0.3 * code + 0.7 * other):
            decoder(c, request)
    units = [torch.where(x > 0, x, torch.log1p(x)) for x in inputs]  # without the ELU
    assert (inputs[0] < 0).any() and (inputs[0] > 0).any()
    torch.testing.assert_close(units[2], 0.3 * units[0] + 0.7 * units[1])
    torch.testing.assert_close(units[4], 0.3 * units[0] + 0.7 * units[3])


def test_a_broadcast_code_is_told_apart_by_coordinates_alone():
    decoder, maps = small("broadcast").decoder, []
    decoder.upsample.register_forward_pre_hook(lambda _, arguments: maps.append(arguments[0]))
    with torch.no_grad():
        decoder.spread.weight.mul_(torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0]]))
        code, request = torch.randn(2, 3).double(), torch.randn(2, 2).double()
        decoder(code, request)
        decoder.mix.weight[:, -2:] = 0
        decoder(code, request)
    told, same = maps
    assert told.shape == (2, 8, 3, 2)
    assert len(told[0].flatten(1).T.unique(dim=0)) == 6
    torch.testing.assert_close(same, same[..., :1, :1].expand_as(same))


def test_without_a_request_it_paints_the_identity():
    model = small(identity=(0.3, -0.7))
    code = {"image_code": torch.randn(2, 3).double()}
    asked = torch.tensor([[0.3, -0.7]]).double()
    torch.testing.assert_close(model.mean_image(code), model.mean_image(code, asked))
    assert not torch.allclose(model.mean_image(code), model.mean_image(code, -asked))


def test_the_image_is_normal_about_what_was_asked_for():
    model = small(sigma_image=0.3)
    images, request = torch.rand(2, *SHAPE).double(), torch.randn(2, 2).double()
    trace = poutine.trace(model).get_trace(images, request=request)
    trace.compute_log_prob()
    code = {"image_code": trace.nodes["image_code"]["value"]}
    expected = dist.Normal(model.mean_image(code, request), 0.3).log_prob(images).sum((1, 2, 3))
    torch.testing.assert_close(trace.nodes["image"]["log_prob"], expected)
