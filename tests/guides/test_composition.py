"""A part-whole guide is made of two objects: each can be exchanged, copied or used alone."""

from dataclasses import replace

import pytest
import torch
from machines import values_of

from capsule_zoo.guides import EMObjects, PartReader, PartWholeGuide, SetTransformers
from capsule_zoo.inference import check_pair
from capsule_zoo.inference.training.checkpoint import load_checkpoint
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.registry import WEIGHTS, load
from capsule_zoo.settings import configure

READER, ABOVE = PartReader(channels=4), SetTransformers(width=8, heads=2, blocks=1, inducing=2)


@pytest.fixture(params=[(3, 4), (2, 3, 4)], ids=["two levels", "three levels"])
def model(request):
    return PartWholeCapsules(
        (1, 12, 12), layers=request.param, painting=Painting(template_size=5)
    ).double()


@pytest.fixture
def images():
    return torch.rand(5, 1, 12, 12, dtype=torch.float64)


def drawn(guide, images):
    return values_of(guide.eval(), images)


def test_the_usual_guides_are_two_of_its_pairs(model, images):
    """The same seed gives the same guide, however it is built."""
    sizes = dict(width=8, heads=2, blocks=1, inducing=2)
    pairs = (
        (lambda: configure(PartWholeGuide, model, channels=4, **sizes), ABOVE),
        (lambda: configure(PartWholeGuide, model, above=EMObjects(2), channels=4), EMObjects(2)),
    )
    for usual, above in pairs:
        torch.manual_seed(1)
        expected = drawn(usual().double(), images)
        torch.manual_seed(1)
        guide = PartWholeGuide(model, reader=READER, above=above).double()
        found = drawn(guide, images)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_other_objects_keep_the_trained_reader(model, images):
    guide = PartWholeGuide(model, "normal", reader=READER, above=ABOVE).double()
    torch.nn.init.normal_(guide.pose_heads[-1].weight)  # as after training
    routed = guide.with_above(EMObjects(2))
    check_pair(model, routed, images)
    before, after = drawn(guide, images), drawn(routed, images)
    assert torch.equal(before["part_pose"], after["part_pose"])
    assert not torch.allclose(before["object_pose"], after["object_pose"])
    mine, theirs = (dict(g.read_parts.named_parameters()) for g in (guide, routed))
    assert all(torch.equal(p, theirs[k]) and p is not theirs[k] for k, p in mine.items())
    check_pair(model, routed.with_above(ABOVE), images)
    again = drawn(guide.with_above(ABOVE), images)  # the same settings: with their weights
    assert all(torch.equal(again[name], value) for name, value in before.items())


def test_a_reader_works_alone():
    """A new family needs no part-whole model, and no guide, to read parts."""
    reader = PartReader(channels=4, coordinates=True, centered=True)
    network = reader.build(image_shape=(3, 10, 14), parts=6)
    seen, frame = reader.view(torch.rand(2, 3, 10, 14))
    proposal = network(seen)
    shapes = tuple(proposal.logits.shape), tuple(proposal.pose.shape)
    assert shapes == ((2, 6), (2, 6, 6)) and frame.shape == (2, 6)
    proposal.pose.sum().backward()
    assert all(p.grad is not None for p in network.encoder.parameters())


def test_settings_are_values():
    assert PartReader(turns=3) == replace(PartReader(), turns=3) != PartReader()
    with pytest.raises(ValueError, match="channels must be at least 1"):
        PartReader(channels=0)
    with pytest.raises(ValueError, match="max_scale must be positive"):
        PartReader(max_scale=0.0)
    with pytest.raises(ValueError, match="width must be at least 1"):
        SetTransformers(width=0)
    with pytest.raises(ValueError, match="need square images, not 12x16"):
        PartReader(turns=2).build((1, 12, 16), 3)


@pytest.mark.parametrize("name", ["part-whole-mnist", "part-whole-affnist"])
def test_published_weights_are_read_to_the_last_tensor(name):
    saved = load_checkpoint(WEIGHTS / f"{name}.safetensors")["guide"]
    state = load(name).guide.state_dict()
    assert len(saved) == len(state)
    assert all(torch.equal(state[key], value) for key, value in saved.items())
