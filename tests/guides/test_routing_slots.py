"""Routing of parts to several objects with shape codes."""

from functools import partial

import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO

from capsule_zoo.guides import PartReader
from capsule_zoo.guides.parts.routing_slots import RoutingSlots
from capsule_zoo.inference import check_pair, loss_per_image
from capsule_zoo.models import Capsules, ShapeCodes
from capsule_zoo.models.parts.part_sets import as_part_sets
from capsule_zoo.settings import configure


def made(slots: int = 2) -> ShapeCodes:
    """A model of two kinds whose parts stand clearly in other places, with codes of one number."""
    pyro.set_rng_seed(0)
    sizes = dict(image_shape=(1, 6, 6), template_size=4, sigma_min=0.02, sigma_top=0.01)
    model = configure(
        ShapeCodes, kinds=2, parts=8, codes=1, slots=slots, instances=2, **sizes
    ).double()
    with torch.no_grad():
        model.shapes.raw_scale.fill_(-20)
        model.shapes.presence_logits.fill_(8)
        model.shapes.presence_codes.zero_()
        model.shapes.log_affinity.fill_(3)
        for numbers in (model.shapes.transform, model.shapes.pose_codes):
            drawn = torch.randn(2, 4, *numbers.shape[2:]) * (1.0 if numbers.dim() == 3 else 0.3)
            numbers.copy_(drawn.double().repeat_interleave(2, dim=1))
    return model


def scenes(model: ShapeCodes, number: int = 12) -> tuple[Capsules, torch.Tensor, torch.Tensor]:
    """Scenes of two objects with one instance of each part, owners of the parts, and the kinds."""
    generator = torch.Generator().manual_seed(3)
    kind = torch.randint(2, (number, 2), generator=generator)
    code = torch.randn(number, 2, 1, generator=generator).double()
    pose = torch.tensor([1.0, 0, 0, 0, 1, 0]).double().expand(number, 2, 6)
    votes, _ = model.shapes.votes(kind, pose, code)  # (B, S, P, 6)
    owner = torch.rand(number, 4, generator=generator) < 0.5
    owner = torch.stack([owner, ~owner], dim=-1).flatten(1).long()
    rows, parts = torch.arange(number)[:, None], torch.arange(8)
    noise = 0.02 * torch.randn(number, 8, 6, generator=generator)
    place = votes[rows, owner, parts] + noise
    return Capsules(torch.ones(number, 8).double(), place.detach()), owner, kind


def test_two_objects_of_a_scene_are_found_and_their_parts_told():
    model = made()
    parts, owner, kind = scenes(model)
    proposal = RoutingSlots(model, starts=2).double().find(parts)
    assignment = model.responsibilities(*proposal[:3], parts)[..., 1:].argmax(-1)
    right = (assignment == owner).double().mean(-1)
    right = torch.where(right < 0.5, 1 - right, right)
    assert right.mean() > 0.9  # one scene in ten ends in a local optimum
    assert (proposal.kind.sort(-1).values == kind.sort(-1).values).all(-1).double().mean() > 0.85


def test_more_starts_and_rounds_never_explain_less():
    model = made()
    parts, _, _ = scenes(model)
    joint = [
        model.log_joint_of_slots(parts, *RoutingSlots(model, starts=n).double().find(parts)[:3])
        for n in (1, 2)
    ]
    assert (joint[1] >= joint[0] - 1e-9).all()


@pytest.mark.parametrize("objects", ["delta", "normal"])
def test_it_is_a_guide_to_scenes_of_several_objects(objects):
    model = made().with_scope("objects")
    guide = RoutingSlots(
        model, objects=objects, starts=1, reader=partial(PartReader, channels=2)
    ).double()
    parts, _, _ = scenes(model, 3)
    sets = as_part_sets(parts)
    check_pair(model, guide, sets)
    assert torch.isfinite(loss_per_image(Trace_ELBO(), model, guide, sets)).all()
    whole = made()
    images = torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    guide = RoutingSlots(
        whole, objects=objects, starts=1, reader=partial(PartReader, channels=2)
    ).double()
    check_pair(whole, guide, images)
