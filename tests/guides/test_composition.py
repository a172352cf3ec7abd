"""A part-whole guide is made of two objects: each can be exchanged, copied or used alone."""

from functools import partial

import pytest
import torch
from machines import values_of

from capsule_zoo.guides import (
    EMObjects,
    KindNetwork,
    PartReader,
    PartWholeGuide,
    PerceptronObjects,
    SetTransformers,
)
from capsule_zoo.inference import check_pair
from capsule_zoo.inference.training.checkpoint import load_checkpoint
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.registry import WEIGHTS, load
from capsule_zoo.settings import configure

READER = partial(PartReader, channels=4)
ABOVE = partial(SetTransformers, width=8, heads=2, blocks=1, inducing=2)
ROUTED = partial(EMObjects, iterations=2)


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
        (lambda: configure(PartWholeGuide, model, above=ROUTED, channels=4), ROUTED),
        (
            lambda: configure(
                PartWholeGuide, model, channels=4, above={"class": "EMObjects", "iterations": 2}
            ),
            ROUTED,
        ),
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
    routed = guide.with_above(ROUTED)
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
    """A new family needs no guide to read parts."""
    model = PartWholeCapsules((3, 10, 14), objects=2, parts=6)
    reader = PartReader(model, 9, channels=4, coordinates=True, centered=True)
    seen, frame = reader.view(torch.rand(2, 3, 10, 14))
    proposal = reader(seen)
    shapes = tuple(proposal.logits.shape), tuple(proposal.pose.shape)
    assert shapes == ((2, 6), (2, 6, 6)) and frame.shape == (2, 6)
    proposal.pose.sum().backward()
    assert all(p.grad is not None for p in reader.encoder.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(reader=partial(PartReader, channels=0)), "channels must be at least 1"),
        (dict(reader=partial(PartReader, max_scale=0.0)), "max_scale must be positive"),
        (dict(reader=partial(PartReader, turns=2)), "need square images, not 12x16"),
        (dict(above=partial(SetTransformers, width=0)), "width must be at least 1"),
        (dict(above=partial(SetTransformers, blocks=-1)), "blocks must be at least 0"),
        (dict(above=torch.nn.Linear), "above must be Submodule, a subclass .*Linear"),
        (dict(reader=SetTransformers), "reader must be PartReader, .*SetTransformers"),
        (dict(above=KindNetwork), "above is KindNetwork, which serves ShapeCodes, not PartWholeC"),
        (dict(above=PerceptronObjects), "which serves StackedCapsuleAutoencoder, not PartWhole"),
        (dict(reader=64), "reader must be PartReader, a subclass .*not 64"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PartWholeGuide(PartWholeCapsules((1, 12, 16), objects=2, parts=3), **arguments)


def test_a_setting_of_another_class_is_refused():
    model = PartWholeCapsules((1, 12, 12), objects=2, parts=3)
    for reader in ("EMObjects", EMObjects, {"class": "EMObjects"}, 3):
        with pytest.raises(ValueError, match=r"reader of .* must be a class such as PartReader"):
            configure(PartWholeGuide, model, reader=reader)
    with pytest.raises(ValueError, match=r"PartReader.*chanels.*channels"):
        configure(PartWholeGuide, model, reader={"class": "PartReader", "chanels": 3})


@pytest.mark.parametrize("name", ["part-whole-mnist", "part-whole-affnist"])
def test_published_weights_are_read_to_the_last_tensor(name):
    saved = load_checkpoint(WEIGHTS / f"{name}.safetensors")["guide"]
    state = load(name).guide.state_dict()
    assert len(saved) == len(state)
    assert all(torch.equal(state[key], value) for key, value in saved.items())
