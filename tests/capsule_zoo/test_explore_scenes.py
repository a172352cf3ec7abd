"""The view of scenes: objects are read, moved, hidden, taken away and added from the prior."""

import math

import pytest
import torch
from terminal import run
from torch.testing import assert_close

from capsule_zoo.data import load_dataset, scenes
from capsule_zoo.data.datasets import load_tests
from capsule_zoo.explore import sources
from capsule_zoo.explore.explorer import Explorer
from capsule_zoo.explore.sources import view_of
from capsule_zoo.registry import create, load, small_settings


def read_view(**sizes):
    torch.manual_seed(0)
    entry = create("scenes", **{**small_settings("scenes"), "slots": 3, **sizes})
    view = view_of(entry)
    view.read(torch.rand(2, *view.image_shape)[:1])
    for slot in range(3):
        view.change(slot, "presence", 1.0)
    return view


@pytest.fixture(params=["gray", "color"])
def view(request):
    if request.param == "gray":
        return read_view()
    return read_view(image_shape=(3, 12, 10), ground="color", rotation=0.3)


def test_the_picture_is_that_of_the_model_with_the_sites_of_the_state(view):
    from pyro import poutine

    conditional = poutine.condition(view.model, view.state)
    mean = poutine.trace(conditional).get_trace(batch_size=1).nodes["image"]["fn"].mean
    assert_close(view.mean_image(), mean.reshape(1, *view.image_shape))
    distribution = view.model.image_distribution(view.mean_image())
    assert view.log_likelihood() == pytest.approx(
        distribution.log_prob(view.image).item(), rel=1e-4
    )


def test_an_object_that_is_taken_away_paints_nothing_and_comes_back(view):
    before = view.mean_image()
    assert view.act("remove object", 1) == 1
    assert view.handles()[1] == "object 2 (absent)" and view.outline(1) is None
    assert not torch.equal(view.mean_image(), before)
    away = view.mean_image()
    view.change(1, "x", 0.9)
    assert torch.equal(view.mean_image(), away)
    view.reset()
    for slot in range(3):
        view.change(slot, "presence", 1.0)
    assert torch.equal(view.mean_image(), before)


def test_one_is_added_from_the_prior_where_a_slot_is_free(view):
    with pytest.raises(ValueError, match="action must be one of 'remove object'"):
        view.act("remove", 0)
    with pytest.raises(ValueError, match="all slots hold an object; remove one"):
        view.act("add object from prior", 0)
    view.act("remove object", 2)
    others = [view.controls(0), view.controls(1)]
    poses = set()
    for _ in range(20):
        view.act("remove object", 2)
        assert view.act("add object from prior", 0) == 2
        poses.add(view.controls(2)["x"].value)
    assert [view.controls(0), view.controls(1)] == others
    assert len(poses) == 20 and 0.3 < torch.tensor(list(poses)).std() < 1.2  # prior: .7


def test_a_drag_moves_the_object_and_its_window_alone(view):
    before, others = view.outline(1), view.outline(0)
    view.drag(1, (0.0, 0.0), (0.25, -0.5))
    assert_close(view.outline(1), before + torch.tensor([0.25, -0.5]))
    assert torch.equal(view.outline(0), others)
    side = before.amax(0) - before.amin(0)
    view.change(1, "log size", math.log(2) + view.controls(1)["log size"].value)
    assert_close(view.outline(1).amax(0) - view.outline(1).amin(0), 2 * side)


def test_refining_never_loses_what_was_inferred(view):
    view.reset()
    first = view.read_state["log_weight"]
    assert "-" not in view.refine(steps=12) and view.state["log_weight"] >= first


def test_digits_that_were_found_are_grabbed_where_they_are():
    entry = load("scenes-mnist")
    view = view_of(entry)
    image = torch.zeros(1, 1, 50, 50)
    image[..., 8:22, 11:13] = 1  # a one at the left
    image[..., 28:42, 36:38] = 1  # and another
    view.read(image)
    on = [slot for slot, name in enumerate(view.handles()) if "absent" not in name]
    assert len(on) == 2
    left, right = view.grab((-0.52, -0.4), part=True), view.grab((0.48, 0.4), part=True)
    assert {left, right} == set(on) and view.grab((-0.9, 0.9), part=True) is None
    assert view.color_parts().shape == (200, 200, 3)
    view.act("remove object", left)
    assert view.grab((-0.52, -0.4), part=True) is None


def test_buttons_of_the_explorer_take_away_and_add():
    view = read_view()
    explorer = Explorer(view, view.image)
    take, add = explorer.actions
    assert (take.description, add.description) == view.actions
    explorer.handle = 1
    view.change(1, "presence", 1.0)
    take.click()
    assert explorer.selection.options[1][0] == "object 2 (absent)"
    view.change(0, "presence", 1.0)
    add.click()
    assert explorer.handle == 1 and "absent" not in explorer.selection.options[1][0]
    view.change(2, "presence", 1.0)
    add.click()
    assert "slots hold an object" in explorer.status.value


@pytest.mark.parametrize("command", ["explore", "segment", "evaluate", "figure objects"])
def test_no_training_scenes_are_drawn_to_read_test_scenes(command, tmp_path, monkeypatch):
    data, drawn, draw = "multi-sprites:test=5,train=40", [], scenes.scene_source
    whole = load_dataset(data)

    def record(of, train, test):
        drawn.append((train, test))
        return draw(of, train, test)

    monkeypatch.setattr(scenes, "scene_source", record)
    monkeypatch.chdir(tmp_path)
    if command == "explore":
        assert torch.equal(sources.open_source("scenes", data)[1], whole.test.images)
    else:
        arguments = [*command.split(), "scenes-sprites", "--data", data]
        arguments += ["--particles", "2"] * (command == "evaluate")
        assert run(*arguments) == 0
    assert drawn == [(20, 5)]


@pytest.mark.parametrize(
    ("source", "shape"),
    [("scenes", (1, 50, 50)), ("scenes-mnist", (1, 50, 50)), ("part-whole-mnist", (1, 28, 28))],
)
def test_what_needs_no_file_stands_in_for_images_that_are_not_there(
    source, shape, tmp_path, monkeypatch
):
    monkeypatch.setenv("CAPSULE_ZOO_DATA", str(tmp_path))
    view, images, title = sources.open_source(source)
    data = load_tests("digits" if source == "part-whole-mnist" else "multi-digits")
    assert torch.equal(images, data.test.images) and images.shape[1:] == view.image_shape == shape
    assert ("its own images are not there" in title) == (source != "scenes")


def test_test_scenes_are_the_same_without_training_scenes():
    whole, subset = (
        load_dataset("tetrominoes:test=5,train=40"),
        load_tests("tetrominoes:test=5,train=40"),
    )
    assert torch.equal(subset.test.images, whole.test.images) and len(subset.train) < len(
        whole.train
    )
    assert subset.name == whole.name and subset.test.name == whole.test.name
    assert len(load_tests("digits").train) == len(load_dataset("digits").train)
