"""Guides that try several rotations: equivariance, the best one wins, nothing is disturbed."""

import math
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pyro
import pytest
import torch
from machines import values_of
from pyro.infer import SVI, Trace_ELBO

from capsule_zoo.guides import EMObjects, PartReader, PartWholeGuide, SetTransformers
from capsule_zoo.guides.parts.rotations import best_rotation, center_images, rotate_images
from capsule_zoo.inference import check_pair
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.painted_parts import ObjectPose, Painting
from capsule_zoo.models.parts.parent_selection import Belonging
from capsule_zoo.settings import configure

SMALL = dict(channels=8, width=16, heads=2, blocks=1, inducing=4)
QUARTER = math.pi / 2


@pytest.fixture(params=[(3, 4), (2, 3, 4)], ids=["two levels", "three levels"])
def model(request):
    """Return a model invariant under 90-degree rotations; its upright dummy has no weight."""
    model = PartWholeCapsules(
        (1, 12, 12),
        layers=request.param,
        painting=Painting(template_size=5),
        pose=ObjectPose(rotations=4),
        belonging=Belonging(epsilon=1e-300),
    )
    return model.double()


def rotate_poses(values, angle):
    """Return the same parse for the image rotated counter-clockwise by `angle`."""
    by = poses.rotation(torch.tensor(-angle, dtype=torch.float64))
    return {k: poses.compose(by, v) if k.endswith("pose") else v for k, v in values.items()}


@pytest.mark.parametrize("rotations", [4, 8])
def test_an_untrained_guide_is_equivariant_under_its_turns(model, images, rotations):
    guide = configure(PartWholeGuide, model, rotations=rotations, **SMALL).double().eval()
    expected = rotate_poses(values_of(guide, images), QUARTER)
    values = values_of(guide, images.rot90(1, (2, 3)))
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-9)
    upright = deepcopy(guide)
    upright.read_parts.rotations = 1
    without = values_of(upright, images.rot90(1, (2, 3)))["part_pose"]
    assert not torch.allclose(without, expected["part_pose"], atol=1e-3)


def test_the_turn_that_the_model_explains_best_is_chosen(model, images):
    guide = configure(PartWholeGuide, model, "normal", **SMALL).double().eval()
    torch.nn.init.normal_(guide.pose_heads[-1].weight, std=3)  # log q differs from turn to turn
    torch.manual_seed(0)
    seed = int(torch.randint(2**31, ()))
    scores = []
    for k in range(4):
        torch.manual_seed(seed)
        at_rotation = partial(guide, angle=torch.full((6,), k * QUARTER, dtype=torch.float64))
        scores.append(log_weights(model, at_rotation, images)[0])
    best = torch.stack(scores).argmax(0)
    assert len(best.unique()) > 1
    torch.manual_seed(0)
    torch.testing.assert_close(best_rotation(guide, images, 4), best.double() * QUARTER)


def test_upright_objects_are_scored_fairly_by_a_model_of_turned_ones(images):
    """However the images are held, the same views are chosen; not so by a model of upright ones."""
    model = PartWholeCapsules(
        (1, 12, 12),
        objects=3,
        parts=4,
        painting=Painting(template_size=5),
        belonging=Belonging(epsilon=1e-300),
    ).double()
    guide = configure(PartWholeGuide, model, **SMALL).double().eval()
    fewer = {}
    for rotations in (1, 4):
        scored_by = model.sharing_parameters(pose=replace(model.pose, rotations=rotations))
        angles = []
        for held in (images, images.rot90(1, (2, 3))):
            torch.manual_seed(1)
            angles.append(best_rotation(guide, held, 4, scored_by))
        fewer[rotations] = (angles[0] - angles[1]).remainder(4 * QUARTER)
    torch.testing.assert_close(fewer[4], torch.full_like(fewer[4], QUARTER))
    assert not torch.allclose(fewer[1], fewer[4])


def test_no_turn_is_what_the_guide_does_without_turns(model, images):
    guide = configure(PartWholeGuide, model, "normal", **SMALL).double()
    still = values_of(guide, images, angle=torch.zeros(6, dtype=torch.float64))
    for name, value in values_of(guide, images).items():
        torch.testing.assert_close(still[name], value)


@pytest.mark.parametrize("pose", ["delta", "normal"])
@pytest.mark.parametrize("rotations", [1, 3])
def test_a_centered_guide_is_equivariant_under_shifts(pose, rotations):
    """No ink is lost here; the model is not equivariant, so both use the same rotation."""
    torch.manual_seed(0)
    model = PartWholeCapsules(
        (1, 16, 16), layers=(2, 3, 4), painting=Painting(template_size=5)
    ).double()
    guide = (
        configure(PartWholeGuide, model, pose, rotations=rotations, centered=True, **SMALL)
        .double()
        .eval()
    )
    images = torch.zeros(5, 1, 16, 16, dtype=torch.float64)
    images[..., 5:10, 4:10] = torch.rand(5, 1, 5, 6, dtype=torch.float64)
    angle = torch.linspace(0, 2, 5, dtype=torch.float64) if rotations > 1 else None
    before = values_of(guide, images, angle=angle)
    after = values_of(guide, images.roll((4, -3), (2, 3)), angle=angle)
    for name, value in before.items():
        if name.endswith("pose"):
            value = value + torch.tensor([0, 0, -3 / 8, 0, 0, 4 / 8])
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-9)


def test_ink_in_the_middle_stays_and_an_empty_image_too(images):
    blank = torch.zeros_like(images[:1])
    for still in (images + images.flip(2, 3), blank):
        moved, back = center_images(still / 2)
        torch.testing.assert_close(moved, still / 2, rtol=0, atol=1e-12)
        torch.testing.assert_close(back, poses.identity_like(back).expand(len(back), 6))


def test_quarter_turns_of_images_are_exact(images):
    angle = torch.tensor([0, 1, 2, 3, 1, 2], dtype=torch.float64) * QUARTER
    expected = [x.rot90(int(k), (1, 2)) for x, k in zip(images, angle / QUARTER, strict=True)]
    torch.testing.assert_close(rotate_images(images, angle), torch.stack(expected))


def test_choosing_leaves_the_running_statistics_alone(model, images):
    torch.manual_seed(0)
    guide = configure(PartWholeGuide, model, rotations=3, **SMALL).double().train()
    before = [buffer.clone() for buffer in guide.buffers()]
    best_rotation(guide, images, 3)
    assert guide.training and before
    assert all(torch.equal(a, b) for a, b in zip(before, guide.buffers(), strict=True))


@pytest.mark.parametrize("above", [SetTransformers, EMObjects], ids=["network", "em"])
@pytest.mark.parametrize("pose", ["delta", "normal", "low_rank"])
def test_guides_that_turn_fit_and_train(model, images, above, pose):
    reader = partial(PartReader, channels=8, rotations=3)
    guide = PartWholeGuide(model, pose, reader=reader, above=above).double()
    check_pair(model, guide, images)
    check_pair(model.discretize(), guide.discretize(), images)
    before = {name: p.detach().clone() for name, p in guide.named_parameters()}
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), Trace_ELBO())
    svi.step(images)
    assert any(not torch.equal(p, before[name]) for name, p in guide.named_parameters())
    assert guide.with_poses("normal").read_parts.rotations == 3


def test_coordinates_tell_places_apart_that_convolutions_cannot():
    """The images are a blob far from the edges and the same blob four pixels further."""
    model = PartWholeCapsules(
        (1, 64, 64), objects=2, parts=3, painting=Painting(template_size=5)
    ).double()
    blob = torch.zeros(1, 1, 64, 64, dtype=torch.float64)
    blob[..., 28:34, 28:33] = torch.rand(6, 5)
    poses_found = {}
    for with_coordinates in (False, True):
        guide = configure(PartWholeGuide, model, coordinates=with_coordinates, **SMALL).double()
        parts = [values_of(guide, x)["part_pose"] for x in (blob, blob.roll(4, 3))]
        poses_found[with_coordinates] = parts[1] - parts[0]
    assert poses_found[False].abs().max() < 1e-12
    assert poses_found[True].abs().max() > 1e-5
