"""A part-whole guide is made of two objects: each can be exchanged, copied or used alone."""

from functools import partial

import torch
from machines import values_of

from capsule_zoo.guides import EMObjects, PartReader, PartWholeGuide, SetTransformers
from capsule_zoo.inference import check_pair
from capsule_zoo.models import Capsules, PartWholeCapsules
from capsule_zoo.settings import configure

READER = partial(PartReader, channels=4)
ABOVE = partial(SetTransformers, width=8, heads=2, blocks=1, inducing=2)
ROUTED = partial(EMObjects, iterations=2)


def drawn(guide, images):
    return values_of(guide.eval(), images)


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
    inputs, frame = reader.view(torch.rand(2, 3, 10, 14))
    proposal = reader(inputs)
    shapes = tuple(proposal.logits.shape), tuple(proposal.pose.shape)
    assert shapes == ((2, 6), (2, 6, 6)) and frame.shape == (2, 6)
    proposal.pose.sum().backward()
    assert all(p.grad is not None for p in reader.encoder.parameters())


def test_the_network_above_cannot_tell_parts_of_one_template_with_types_apart():
    """It proposes equal objects when two parts of one template are exchanged, and no others."""
    model = configure(PartWholeCapsules, (1, 12, 12), objects=3, parts=5, types=2, instances=2)
    above = ABOVE(model).double().eval()
    parts = Capsules(*(torch.randn(2, 5, *size).double() for size in ((), (6,))))

    def poses_of(order):
        moved = Capsules(*(values[:, order] for values in parts))
        return above(model, 0, moved).pose

    before = poses_of([0, 1, 2, 3, 4])
    torch.testing.assert_close(poses_of([1, 0, 3, 2, 4]), before)
    for order in ([2, 1, 0, 3, 4], [0, 1, 2, 4, 3]):  # parts of two templates
        assert not torch.allclose(poses_of(order), before)
    guide = configure(PartWholeGuide, model, channels=4, width=8, heads=2, blocks=1)
    check_pair(model.double(), guide.double(), torch.rand(2, 1, 12, 12).double())
