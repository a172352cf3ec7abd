"""Widgets: a person's actions change the model's rendering, pixel by pixel."""

import html
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
def shown(request):
    view = request.param()
    images = (torch.rand(3, *view.image_shape) * 255).round() / 255
    if request.param is part_whole_view:  # its guide belongs to one image
        images[0] = view.image[0]
    return explorer.Explorer(view, images, "a <title>")


def test_a_slider_that_is_moved_changes_the_picture_as_the_model_renders_it(shown):
    before = shown.painted.png
    name = "x" if "x" in shown.sliders else "angle"
    shown.sliders[name].value = 0.6 * shown.sliders[name].max
    assert shown.view.controls(shown.handle)[name].value == pytest.approx(
        shown.sliders[name].value, abs=1e-4
    )
    assert shown.painted.png != before
    assert torch.equal(pixels(shown.painted.png), on_screen(shown.view.painted()))
    shown.reset.click()
    assert shown.painted.png == before


def test_a_slider_moves_the_selected_handle(shown):
    last = len(shown.view.handles()) - 1
    shown.selection.value = last
    assert list(shown.sliders) == list(shown.view.controls(last))
    name, slider = next(iter(shown.sliders.items()))
    slider.value = 0.5
    assert shown.view.controls(last)[name].value == pytest.approx(0.5)


def test_a_drag_moves_what_was_grabbed_and_the_sliders_along(shown):
    before, controls = shown.painted.png, shown.view.controls(shown.handle)
    shown.painted.drag = {"number": 1, "start": [0.3, 0.0], "end": [0.3, 0.1]}
    shown.painted.drag = {"number": 1, "start": [0.3, 0.0], "end": [0.0, 0.4]}
    moved = shown.view.controls(shown.handle)
    assert shown.painted.png != before and moved != controls
    for name, control in moved.items():
        assert shown.sliders[name].value == pytest.approx(control.value, abs=0.51 * control.step)


def test_a_browser_that_rounds_to_steps_changes_nothing(shown):
    before, said = shown.view.state, "nothing happened"
    for handle in range(len(shown.view.handles())):
        shown.selection.value = handle
        shown.status.value = said
        for slider in shown.sliders.values():
            steps = (slider.value - slider.min) / slider.step
            assert steps == pytest.approx(round(steps), abs=1e-3)
            slider.value += 1e-9
    assert shown.view.state is before and shown.status.value == said


def test_the_moves_of_one_drag_add_up_however_many_arrive():
    found = []
    for stops in ([0.1, 0.2, 0.3, 0.4], [0.4]):
        torch.manual_seed(0)
        view = part_whole_view()
        shown = explorer.Explorer(view, view.image)
        for x in stops:
            shown.colored.drag = {"number": 7, "start": [0.0, 0.0], "end": [x, 0.0]}
        found.append(pixels(shown.painted.png).int())
    assert (found[0] - found[1]).abs().max() <= 1  # a rounded gray


def test_another_test_image_is_read():
    view = request_view()
    images = (torch.rand(3, *view.image_shape) * 255).round() / 255
    shown = explorer.Explorer(view, images)
    shown.number.value = 2
    assert torch.equal(view.image, images[2:]) and shown.number.max == 2
    assert torch.equal(pixels(shown.image.png), on_screen(images[2:]))


def test_a_file_is_read_whether_chosen_or_dropped_and_inverted_on_demand(shown):
    image = (torch.rand(1, *shown.view.image_shape) * 255).round() / 255
    shown.upload.value = uploaded("seven.png", file_of(image))
    assert torch.equal(shown.view.image, image) and "seven.png" in shown.status.value
    shown.inverted.value = True
    torch.testing.assert_close(shown.view.image, 1 - image)
    shown.number.value = 1
    shown.image._handle_custom_msg({"dropped": "nine.png"}, [memoryview(file_of(image))])
    torch.testing.assert_close(shown.view.image, 1 - image)
    assert torch.equal(pixels(shown.image.png), on_screen(1 - image))


def test_a_bad_file_is_told_and_nothing_else_happens(shown):
    before = shown.image.png, shown.painted.png
    shown.upload.value = uploaded("<notes>.txt", b"no picture")
    assert "&lt;notes&gt;.txt is not a readable image" in shown.status.value
    shown.upload.value = uploaded("blank.png", file_of(torch.ones(1, 1, 9, 9)))
    assert "blank.png is blank" in shown.status.value
    assert (shown.image.png, shown.painted.png) == before


def test_an_error_while_the_view_is_shown_is_told(shown, monkeypatch):
    def painted():
        raise ValueError("no <picture>")

    monkeypatch.setattr(shown.view, "painted", painted)
    shown.reset.click()
    assert "no &lt;picture&gt;" in shown.status.value


def test_refining_tells_what_it_gained(shown, monkeypatch):
    monkeypatch.setattr(shown.view, "refine", lambda: type(shown.view).refine(shown.view, 2))
    shown.refine.click()
    assert "refined by 2 steps" in shown.status.value and not shown.refine.disabled


def test_reset_undoes_a_refinement(shown, monkeypatch):
    monkeypatch.setattr(shown.view, "refine", lambda: type(shown.view).refine(shown.view, 3))
    before = shown.painted.png
    shown.refine.click()
    assert shown.view.state is not shown.view.read_state
    shown.reset.click()
    assert shown.view.state is shown.view.read_state and shown.painted.png == before


def test_the_help_and_the_buttons_are_those_of_the_view(shown):
    assert shown.view.help in html.unescape(shown.children[0].value)
    assert shown.refine.tooltip == shown.view.improves
    labels = [box.children[0].value for box in shown.children[1].children]
    assert labels == list(shown.view.names)


def test_the_way_parts_follow_can_be_chosen():
    view = part_whole_view()
    shown = explorer.Explorer(view, view.image)
    before = shown.painted.png
    shown.mode.value = "prior mean"
    assert view.mode == "prior mean" and shown.painted.png != before
    shown.reset.click()
    assert shown.mode.value == "posterior" and shown.painted.png == before


def test_labels_say_what_a_person_selects_and_sees(shown):
    assert shown.selection.description == "selected"
    words = f"log p(image | model's picture) = {shown.view.log_likelihood():.1f} nats"
    assert html.unescape(shown.status.value) == words
    for handle in range(len(shown.view.handles())):
        shown.selection.value = handle
        degrees = [s.description for s in shown.sliders.values() if "angle" in s.description]
        assert degrees in ([], ["angle (degrees)"])


def test_the_selected_object_is_outlined_on_the_colored_picture():
    view = part_whole_view()
    shown = explorer.Explorer(view, view.image)
    plain = pixels(as_png(view.colored()))
    outlined = pixels(shown.colored.png)
    changed = (plain != outlined).any(-1)
    assert changed.any() and (outlined[changed] == 255).all()


def test_a_picture_file_is_fitted_in_whole():
    wide = torch.ones(1, 1, 4, 8)
    wide[..., 0] = 0  # not blank
    found = image_from_file(file_of(wide), "wide.png", (3, 8, 8))
    assert found.shape == (1, 3, 8, 8) and found.dtype == torch.float32
    assert found[..., :2, :].max() == 0 and found[..., 6:, :].max() == 0
    assert torch.equal(found[0, 0, 2:6], wide[0, 0])


def test_the_state_of_all_widgets_can_be_sent(shown):
    def only_bytes(value: object) -> str:
        assert isinstance(value, bytes), f"{value!r} is neither JSON nor bytes"
        return "sent apart"

    widgets = (shown, shown.painted, *shown.sliders.values(), shown.upload, shown.selection)
    for widget in widgets:
        json.dumps(widget.get_state(), default=only_bytes)
    assert "&lt;title&gt;" in shown.children[0].value
