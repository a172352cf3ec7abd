"""The view of a whole picture: a click takes an object away or adds one, and the number follows."""

import pyro
import pytest
import torch
from small_scenes import SMALL_WINDOWS, disks
from torch.testing import assert_close

from capsule_zoo import create
from capsule_zoo.data.leveling import fit_leveling
from capsule_zoo.data.tiles import SETTINGS
from capsule_zoo.explore.explorer import Explorer
from capsule_zoo.explore.sources import view_of
from capsule_zoo.guides.scenes.clusters import best_of, distribution_of_number
from capsule_zoo.inference.whole_pictures import SAME


@pytest.fixture
def picture():
    return disks(6)[0]


@pytest.fixture
def view(picture):
    pyro.set_rng_seed(0)
    settings = {**SETTINGS, **SMALL_WINDOWS, "leveling": fit_leveling([picture], width=16)}
    view = view_of(create("scenes", image_shape=(1, 64, 64), **settings))
    view.read(picture[None])
    return view


def middle_of(view, handle):
    return tuple(view.outline(handle).mean(0).tolist())


@pytest.mark.long
def test_a_click_adds_an_object_and_a_click_on_it_takes_it_away(view):
    before, count = view.mean_image(), int(view.state["presence"].sum())
    handle = view.grab((-0.5, 0.4), part=True)
    assert view.state["presence"][handle] == 1
    assert int(view.state["presence"].sum()) == count + 1
    assert not torch.equal(view.mean_image(), before)
    assert view.summary().startswith(f"{count + 1} objects are present")
    assert view.grab(middle_of(view, handle), part=True) == handle
    assert view.outline(handle) is None
    assert_close(view.mean_image(), before)
    view.reset()
    assert int(view.state["presence"].sum()) == count


def test_the_posterior_counts_no_object_that_was_taken_away(view):
    handle = int(view.state["presence"].argmax())
    centers = view.state["patches"].pose[:, 1:3]
    near = (centers - centers[handle]).norm(dim=1) <= SAME * view.model.size
    with_it = view.count_probabilities()
    view.change(handle, "presence", 0.0)
    without = view.count_probabilities()
    assert len(without) == len(with_it) - int(near.sum())
    others = view.state["patches"][(~near).nonzero()[:, 0]]
    exact = distribution_of_number(view.reader.clusters(others))
    assert_close(without, exact, atol=0.02, rtol=0)
    view.change(handle, "presence", 1.0)
    assert len(view.count_probabilities()) == len(without) + 1


def test_a_drag_moves_an_object_by_pixels_in_the_second_mode(view):
    for handle in range(len(view.handles())):
        view.change(handle, "presence", 0.0)
    handle = view.grab((0.0, 0.0), part=True)
    view.set_mode(view.modes[0])
    still = view.mean_image()
    view.drag(handle, (0.0, 0.0), (0.2, -0.2))
    assert torch.equal(view.mean_image(), still)
    view.set_mode(view.modes[1])
    _, height, width = view.image_shape
    view.drag(handle, (0.0, 0.0), (4.0 / width, -6.0 / height))
    moved = torch.roll(still, (-3, 2), (2, 3))
    inner = slice(20, -20)
    assert_close(view.mean_image()[..., inner, inner], moved[..., inner, inner])
    assert view.grab(middle_of(view, handle), part=True) == handle


@pytest.mark.long
def test_refining_never_lowers_the_weight(view):
    view.grab((-0.5, 0.4), part=True)
    before = view._log_weight(view.state)
    assert "nats higher" in view.refine()
    assert view._log_weight(view.state) >= before
    for handle in range(len(view.handles())):
        view.change(handle, "presence", 0.0)
    assert "0.0 nats higher" in view.refine()
    assert not view.state["presence"].any()


@pytest.mark.long
def test_the_explorer_shows_pictures_of_several_sizes(view, picture):
    others = [picture, disks(3, 70, 100)[0]]
    explorer = Explorer(view, others)
    explorer.number.value = 1
    assert view.image_shape[1:] == tuple(view.leveling(others[1]).shape[1:])
    assert "objects are present" in explorer.status.value
    present = best_of(view.reader.clusters(view.state["patches"], view.state["presence"]))
    assert int(present.sum()) == int(view.state["presence"].sum())
