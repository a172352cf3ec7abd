"""Widgets: a person's actions change the model's rendering, pixel by pixel."""

import io
import json
from datetime import datetime

import numpy as np
import pytest
import torch
from PIL import Image
from test_explore_views import part_whole_view, request_view

from capsule_zoo.explore.pictures import WIDTH, as_png, image_from_file

pytest.importorskip("ipywidgets")
explorer = pytest.importorskip("capsule_zoo.explore.explorer")


def pixels(png: bytes) -> torch.Tensor:
    """Return the pixels that a browser shows, (H, W) or (H, W, 3), in bytes."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(png))))


def on_screen(image: torch.Tensor) -> torch.Tensor:
    """Return a model's image (1, 1, H, W) in bytes, at the picture's size on the screen."""
    scale = round(WIDTH / image.shape[-1])
    levels = (image[0, 0] * 255).round().to(torch.uint8)
    return levels.repeat_interleave(scale, 0).repeat_interleave(scale, 1)


def file_of(image: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray((image[0, 0] * 255).round().byte().numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def uploaded(name: str, content: bytes) -> tuple:
    """Return the value of a FileUpload."""
    today = datetime(2026, 1, 1)
    file = {"name": name, "type": "", "size": len(content), "last_modified": today}
    return ({**file, "content": memoryview(content)},)


@pytest.fixture(params=[part_whole_view, request_view])
def panel(request):
    view = request.param()
    images = (torch.rand(3, *view.image_shape) * 255).round() / 255
    if request.param is part_whole_view:  # its guide belongs to one image
        images[0] = view.image[0]
    return explorer.Explorer(view, images, "a <title>")


def test_a_slider_that_is_moved_changes_the_picture_as_the_model_renders_it(panel):
    before = panel.painted.png
    name = "x" if "x" in panel.sliders else "angle"
    panel.sliders[name].value = 0.6 * panel.sliders[name].max
    assert panel.view.controls(panel.handle)[name].value == pytest.approx(
        panel.sliders[name].value, abs=1e-4
    )
    assert panel.painted.png != before
    assert torch.equal(pixels(panel.painted.png), on_screen(panel.view.mean_image()))
    panel.reset.click()
    assert panel.painted.png == before


def test_a_slider_moves_the_selected_handle(panel):
    last = len(panel.view.handles()) - 1
    panel.selection.value = last
    assert list(panel.sliders) == list(panel.view.controls(last))
    name, slider = next(iter(panel.sliders.items()))
    slider.value = 0.5
    assert panel.view.controls(last)[name].value == pytest.approx(0.5)


def test_a_drag_moves_what_was_grabbed_and_the_sliders_along(panel):
    before, controls = panel.painted.png, panel.view.controls(panel.handle)
    panel.painted.drag = {"number": 1, "start": [0.3, 0.0], "end": [0.3, 0.1]}
    panel.painted.drag = {"number": 1, "start": [0.3, 0.0], "end": [0.0, 0.4]}
    moved = panel.view.controls(panel.handle)
    assert panel.painted.png != before and moved != controls
    for name, control in moved.items():
        assert panel.sliders[name].value == pytest.approx(control.value, abs=0.51 * control.step)


def test_a_browser_that_rounds_to_steps_changes_nothing(panel):
    before, message = panel.view.state, "nothing happened"
    for handle in range(len(panel.view.handles())):
        panel.selection.value = handle
        panel.status.value = message
        for slider in panel.sliders.values():
            steps = (slider.value - slider.min) / slider.step
            assert steps == pytest.approx(round(steps), abs=1e-3)
            slider.value += 1e-9
    assert panel.view.state is before and panel.status.value == message


def test_the_moves_of_one_drag_add_up_however_many_arrive():
    pictures = []
    for stops in ([0.1, 0.2, 0.3, 0.4], [0.4]):
        torch.manual_seed(0)
        view = part_whole_view()
        panel = explorer.Explorer(view, view.image)
        for x in stops:
            panel.colored.drag = {"number": 7, "start": [0.0, 0.0], "end": [x, 0.0]}
        pictures.append(pixels(panel.painted.png).int())
    assert (pictures[0] - pictures[1]).abs().max() <= 1  # a rounded gray


def test_another_test_image_is_read():
    view = request_view()
    images = (torch.rand(3, *view.image_shape) * 255).round() / 255
    panel = explorer.Explorer(view, images)
    panel.number.value = 2
    assert torch.equal(view.image, images[2:]) and panel.number.max == 2
    assert torch.equal(pixels(panel.image.png), on_screen(images[2:]))


@pytest.mark.filterwarnings("ignore:.*was fitted to other images")  # the guide of a view here
def test_a_file_is_read_whether_chosen_or_dropped_and_inverted_on_demand(panel):
    image = (torch.rand(1, *panel.view.image_shape) * 255).round() / 255
    panel.upload.value = uploaded("seven.png", file_of(image))
    assert torch.equal(panel.view.image, image) and "seven.png" in panel.status.value
    panel.inverted.value = True
    torch.testing.assert_close(panel.view.image, 1 - image)
    panel.number.value = 1
    panel.image._handle_custom_msg({"dropped": "nine.png"}, [memoryview(file_of(image))])
    torch.testing.assert_close(panel.view.image, 1 - image)
    assert torch.equal(pixels(panel.image.png), on_screen(1 - image))


def test_a_bad_file_is_told_and_nothing_else_happens(panel):
    before = panel.image.png, panel.painted.png
    panel.upload.value = uploaded("<notes>.txt", b"no picture")
    assert "&lt;notes&gt;.txt is not a readable image" in panel.status.value
    panel.upload.value = uploaded("blank.png", file_of(torch.ones(1, 1, 9, 9)))
    assert "blank.png is blank" in panel.status.value
    assert (panel.image.png, panel.painted.png) == before


def test_refining_tells_what_it_gained(panel, monkeypatch):
    monkeypatch.setattr(panel.view, "refine", lambda: type(panel.view).refine(panel.view, 2))
    panel.refine.click()
    assert "refined by 2 steps" in panel.status.value and not panel.refine.disabled


def test_the_way_parts_follow_can_be_chosen():
    view = part_whole_view()
    panel = explorer.Explorer(view, view.image)
    before = panel.painted.png
    panel.mode.value = "prior mean"
    assert view.mode == "prior mean" and panel.painted.png != before
    panel.reset.click()
    assert panel.mode.value == "posterior" and panel.painted.png == before


def test_the_selected_object_is_outlined_on_the_colored_picture():
    view = part_whole_view()
    panel = explorer.Explorer(view, view.image)
    plain = pixels(as_png(view.color_parts()))
    outlined = pixels(panel.colored.png)
    changed = (plain != outlined).any(-1)
    assert changed.any() and (outlined[changed] == 255).all()


def test_a_picture_file_is_fitted_in_whole():
    wide = torch.ones(1, 1, 4, 8)
    wide[..., 0] = 0  # not blank
    image = image_from_file(file_of(wide), "wide.png", (3, 8, 8))
    assert image.shape == (1, 3, 8, 8) and image.dtype == torch.float32
    assert image[..., :2, :].max() == 0 and image[..., 6:, :].max() == 0
    assert torch.equal(image[0, 0, 2:6], wide[0, 0])


def test_the_state_of_all_widgets_can_be_sent(panel):
    def only_bytes(value: object) -> str:
        assert isinstance(value, bytes), f"{value!r} is neither JSON nor bytes"
        return "sent apart"

    widgets = (panel, panel.painted, *panel.sliders.values(), panel.upload, panel.selection)
    for widget in widgets:
        json.dumps(widget.get_state(), default=only_bytes)
    assert "&lt;title&gt;" in panel.children[0].value
