"""Classifiers and an encoder go through `torch.export`, and the program gives the same numbers."""

import pyro
import pytest
import torch
from pyro import poutine
from torch import nn

from capsule_zoo import create, load
from capsule_zoo.models.parts.templates import warp_templates
from capsule_zoo.registry import small_settings

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LEVELS = ("object", "part")
IMAGES = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))


class Call(nn.Module):
    """A module of tensors only, which calls one method of a model or a guide."""

    def __init__(self, program: nn.Module, name: str) -> None:
        super().__init__()
        self.program = program
        self.name = name

    def forward(self, images):
        return getattr(self.program, self.name)(images)


class Encoder(nn.Module):
    """The logits of presences and the poses that a guide of points infers."""

    def __init__(self, guide: nn.Module) -> None:
        super().__init__()
        self.guide = guide

    def forward(self, images):
        nodes = poutine.trace(self.guide).get_trace(images).nodes
        pairs = [(nodes[f"{x}_presence"]["fn"], nodes[f"{x}_pose"]["value"]) for x in LEVELS]
        return torch.cat(
            [torch.cat([distribution.logits[..., None], pose], -1) for distribution, pose in pairs],
            1,
        )


def exported(module: nn.Module, images: torch.Tensor) -> nn.Module:
    with torch.no_grad(), pyro.validation_enabled(False):
        return torch.export.export(module.eval(), (images,)).module()


@pytest.mark.long
@pytest.mark.parametrize("name", ["capsule-network-mnist", "matrix-capsules-mnist"])
def test_a_classifier_is_exported(name):
    entry = load(name)
    program = entry.model if entry.model.supervised else entry.guide
    call = Call(program, "scores")
    with torch.no_grad():
        torch.testing.assert_close(exported(call, IMAGES)(IMAGES), call(IMAGES))


@pytest.mark.parametrize("name", ["cnn", "capsule-network", "matrix-capsules"])
def test_a_classifier_is_written_as_onnx_and_runs_without_torch(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    entry = create(name, **small_settings(name))
    program = entry.model if entry.model.supervised else entry.guide
    call, images = Call(program, "scores").eval(), torch.rand(4, *entry.model.image_shape)
    path = tmp_path / "classifier.onnx"
    with torch.no_grad(), pyro.validation_enabled(False):
        whole = torch.export.export(call, (images,))
        torch.onnx.export(whole, (images,), path, dynamo=True, verbose=False)
        expected = call(images)
    session = runtime.InferenceSession(path)
    (output,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), expected)


@pytest.mark.long
def test_the_encoder_of_part_whole_capsules_is_exported():
    entry = create("part-whole", **small_settings("part-whole"))
    images = torch.rand(4, *entry.model.image_shape)
    encoder = Encoder(entry.guide.discretize())
    program = exported(encoder, images)
    outputs = []
    for network in (program, encoder):
        torch.manual_seed(0)  # presences are drawn
        with torch.no_grad():
            outputs.append(network(images))
    torch.testing.assert_close(*outputs)


def test_images_are_checked_again_after_an_export():
    model = create("cnn", **small_settings("cnn")).model
    images = torch.rand(4, *model.image_shape)
    call = Call(model, "predict")
    assert torch.equal(exported(call, images)(images), call(images))
    with pytest.raises(ValueError, match="images must lie in"):
        model.predict(2 + images)


class Draw(nn.Module):
    """The mean images of parts, on a canvas that no other test has."""

    def forward(self, pose):
        return warp_templates(torch.ones(3, 1, 4, 4), pose, (6, 11)).sum(0)


def test_an_export_leaves_nothing_behind():
    """The places of pixels that it made had no numbers, and were kept."""
    pose = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    program = exported(Draw(), pose)
    torch.testing.assert_close(program(pose), Draw()(pose))
