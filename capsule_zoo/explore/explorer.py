"""The explorer's widgets: pictures to drag on, sliders, and images to choose or to drop.

Widgets hold no state of the model: every event changes the view, and `show` then displays the view.
Pictures are `anywidget`s of a few lines of JavaScript, because ipywidgets lacks dragging and
dropping of files. They work in Jupyter, Voila and other hosts without an extension.
"""

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets
from torch import Tensor

from capsule_zoo.explore.pictures import as_png, image_from_file
from capsule_zoo.explore.sources import open_source
from capsule_zoo.explore.view import Control, View


class Picture(anywidget.AnyWidget):
    """A PNG that reports drags, and files that are dropped on it.

    Attributes:
        png: the displayed file.
        drag: the current drag: its `number`, and its first position (`start`) and last position
            (`end`), as (x, y) in the frame [-1, 1]^2.
    """

    _esm = Path(__file__).parent / "picture.js"
    png = traitlets.Bytes().tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)
    drag = traitlets.Dict().tag(sync=True)


def _row(*children: widgets.Widget) -> widgets.HBox:
    """Return a row of widgets, which becomes a column where the page is narrow."""
    layout = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="8px")
    return widgets.HBox(children, layout=layout)


class Explorer(widgets.VBox):
    """An interactive view of a model and a guide.

    Args:
        view: the state and its handles; see `capsule_zoo.explore.sources.view_of`.
        images: images to choose from, (N, C, H, W), or pictures (C, H, W) of any sizes.
        title: the title above the widgets.

    Raises:
        ValueError: the model does not take the images.

    Attributes:
        view: the state, which Python code may also read or set; call `show` afterwards.
        handle: index of the handle that the sliders move.
        image, painted, colored: the three pictures.
        actions: the buttons of the view's actions.
        sliders: the sliders of the handle's numbers, by name.
    """

    def __init__(self, view: View, images: Sequence[Tensor] | Tensor, title: str = "") -> None:
        self.view, self.images, self.handle = view, images, 0
        self.sliders: dict[str, widgets.FloatSlider] = {}
        self._showing = False
        self._dragging = 0, (0.0, 0.0)
        self._file: tuple[str, bytes] | None = None
        self._read(images[0][None])
        wide, style = widgets.Layout(width="auto"), {"description_width": "initial"}
        pictures = [Picture(label=label) for label in ("image", "model", "parts")]
        self.image, self.painted, self.colored = pictures
        last = len(images) - 1
        self.number = widgets.IntSlider(0, 0, last, description="test image", style=style)
        self.upload = widgets.FileUpload(
            accept="image/*", description="image from a file", layout=wide
        )
        inverted = "invert the file (dark ink on bright paper)"
        self.inverted = widgets.Checkbox(False, description=inverted, indent=False, layout=wide)
        self.selection = widgets.Dropdown(description="selected", style=style)
        buttons = {"button_width": "auto"}
        self.mode = widgets.ToggleButtons(options=view.modes, style=buttons, layout=wide)
        self.reset = widgets.Button(
            description="reset", tooltip="return to the values inferred from the image"
        )
        self.refine = widgets.Button(description="refine", tooltip=view.improves)
        self.actions = [widgets.Button(description=action) for action in view.actions]
        self.status = widgets.HTML()
        self.panel = widgets.HBox(layout=widgets.Layout(flex_flow="row wrap", max_width="1230px"))
        self._connect()
        labelled = zip(view.names, pictures[: 2 + (view.color_parts() is not None)], strict=False)
        modes = [self.mode] if view.modes else []
        super().__init__(
            [
                widgets.HTML(f"<b>{escape(title)}</b> {escape(view.help + view.follow)}"),
                _row(*(widgets.VBox([widgets.Label(name), p]) for name, p in labelled)),
                _row(self.number, self.upload, self.inverted),
                _row(self.selection, *modes, self.reset, self.refine, *self.actions),
                self.status,
                self.panel,
            ]
        )
        self.show()

    @classmethod
    def of(
        cls, source: str, data: str | None = None, data_root: str | Path | None = None
    ) -> "Explorer":
        """Return an explorer of a run folder, trained weights, or an untrained entry.

        Args:
            source: a run folder, or the name of weights or of an entry.
            data: data set of the images; by default the training data of the model, or digits.
            data_root: see `load_dataset`.

        Raises:
            ValueError: an unknown source, absent data, or a model without a view.
        """
        return cls(*open_source(source, data, data_root))

    def _connect(self) -> None:
        self._on(self.number, "value", self._choose_image)
        self._on(self.upload, "value", self._take_upload)
        self._on(self.inverted, "value", lambda _: self._file and self._take_file(*self._file))
        self._on(self.selection, "value", partial(setattr, self, "handle"))
        self._on(self.mode, "value", self.view.set_mode)
        self._on(self.painted, "drag", partial(self._drag, part=False))
        self._on(self.colored, "drag", partial(self._drag, part=True))
        self.image.on_msg(self._take_drop)
        self.reset.on_click(lambda _: self._do(self.view.reset))
        self.refine.on_click(lambda _: self._refine())
        for button in self.actions:
            button.on_click(lambda pressed: self._do(partial(self._act, pressed.description)))

    def _on(self, widget: widgets.Widget, trait: str, action: Callable[[Any], object]) -> None:
        """Call `action` with a trait's new value when a person, not `show`, changes it."""

        def react(change: Any) -> None:
            if not self._showing:
                self._do(partial(action, change["new"]))

        widget.observe(react, trait)

    def _do(self, action: Callable[[], object]) -> None:
        """Change the view by a function and show it; the status line shows a ValueError."""
        try:
            message = action()
            self.show(message if isinstance(message, str) else "")
        except ValueError as error:
            self.status.value = f'<span style="color: #b00020">{escape(str(error))}</span>'

    def show(self, message: str = "") -> None:
        """Update all widgets from the state of the view."""
        self._showing = True
        try:
            options = tuple((name, i) for i, name in enumerate(self.view.handles()))
            if self.selection.options != options:
                self.selection.options = options
            self.selection.value = self.handle
            if self.view.modes:
                self.mode.value = self.view.mode
            self._show_controls(self.view.controls(self.handle))
        finally:
            self._showing = False
        self.image.png = as_png(self.view.image[0].movedim(0, -1))
        self.painted.png = as_png(self.view.mean_image()[0].movedim(0, -1))
        if (colors := self.view.color_parts()) is not None:
            self.colored.png = as_png(colors, self.view.outline(self.handle))
        self.status.value = escape("; ".join(filter(None, [message, self.view.summary()])))

    def _show_controls(self, controls: dict[str, Control]) -> None:
        if list(self.sliders) != list(controls):
            self.sliders = {}
            for name, control in controls.items():
                slider = self.sliders[name] = widgets.FloatSlider(
                    step=control.step,
                    description=name + control.unit,
                    style={"description_width": "initial"},
                    readout_format=".2f" if control.step < 1 else ".0f",
                )
                slider.observe(partial(self._slide, name), "value")
            self.panel.children = tuple(self.sliders.values())
        for name, control in controls.items():
            slider, (low, high, value) = self.sliders[name], control.round_to_steps()
            with slider.hold_trait_notifications():
                slider.min, slider.max = low, high
                if _differ(slider.value, value, control):
                    slider.value = value

    def _slide(self, name: str, change: Any) -> None:
        """Set a number of the handle from its slider, unless the browser only rounded the value."""
        control, value = self.view.controls(self.handle)[name], change["new"]
        if not self._showing and _differ(value, control.round_to_steps()[2], control):
            self._do(partial(self.view.change, self.handle, name, value))

    def _act(self, action: str) -> None:
        self.handle = self.view.act(action, self.handle)

    def _drag(self, drag: dict[str, Any], part: bool) -> None:
        """Move the handle with the pointer; a new number means a new drag."""
        number, end = drag["number"], tuple(drag["end"])
        before, last = self._dragging
        if number != before:
            last = tuple(drag["start"])
            grabbed = self.view.grab(last, part)
            self.handle = self.handle if grabbed is None else grabbed
        self._dragging = number, end
        if end != last:
            self.view.drag(self.handle, last, end)

    def _choose_image(self, index: int) -> None:
        self._file = None
        self._read(self.images[index][None])

    def _take_upload(self, files: tuple[dict[str, Any], ...]) -> str:
        self._showing, self.upload.value = True, ()  # so that a file may be chosen a second time
        self._showing = False
        return self._take_file(files[0]["name"], bytes(files[0]["content"]))

    def _take_drop(self, _: object, content: dict[str, Any], buffers: list[Any]) -> None:
        if "dropped" in content:
            self._do(partial(self._take_file, content["dropped"], bytes(buffers[0])))

    def _take_file(self, name: str, content: bytes) -> str:
        self._read(image_from_file(content, name, self.view.file_shape, self.inverted.value))
        self._file = name, content
        return f"loaded {name}"

    def _read(self, image: Tensor) -> None:
        self.view.read(image)
        self.handle = self.view.first_handle()

    def _refine(self) -> None:
        self.refine.disabled = True
        self.status.value = "refining ..."
        try:
            self._do(self.view.refine)
        finally:
            self.refine.disabled = False


def _differ(value: float, other: float, control: Control) -> bool:
    """Return whether two values of a slider differ by more than rounding."""
    return abs(value - other) > 0.1 * control.step
