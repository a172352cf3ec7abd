"""The explorer's widgets: pictures to drag on, sliders, and images to choose or to drop.

Widgets hold no state of the model: every event changes the view, and `show` then displays the view.
Pictures are `anywidget`s of a few lines of JavaScript, because ipywidgets lacks dragging and
dropping of files. They work in Jupyter, Voila and other hosts without an extension.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        drag: the current drag: its `number`, its first place (`start`) and last place (`end`), as
            (x, y) in the frame [-1, 1]^2.
    """

    _esm = Path(__file__).parent / "picture.js"
    png = traitlets.Bytes().tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)
    drag = traitlets.Dict().tag(sync=True)


WHOLE = {"description_width": "initial"}  # labels are as wide as their words


def _row(children: list[widgets.Widget], gap: str = "4px") -> widgets.HBox:
    """Return widgets beside each other, or below each other where the page is narrow."""
    layout = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap=gap)
    return widgets.HBox(children, layout=layout)


class Explorer(widgets.VBox):
    """An interactive view of a model and a guide.

    Args:
        view: the state and its handles; see `capsule_zoo.explore.sources.view_of`.
        images: images to choose from, (N, C, H, W).
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

    def __init__(self, view: View, images: Tensor, title: str = "") -> None:
        self.view = view
        self.images = images
        self.handle = 0
        self.sliders: dict[str, widgets.FloatSlider] = {}
        self._quiet = False
        self._dragging = (0, (0.0, 0.0))
        self._file: tuple[str, bytes] | None = None
        self._make_widgets()
        self._read(images[:1])
        self._connect()
        pictures = [self.image, self.painted, self.colored]
        shown = [
            widgets.VBox([widgets.Label(label), picture], layout=widgets.Layout(max_width="100%"))
            for label, picture in zip(view.names, pictures, strict=True)
            if picture is not self.colored or view.colored() is not None
        ]
        choice = [self.selection, self.mode] if view.modes else [self.selection]
        super().__init__(
            [
                widgets.HTML(f"<b>{escape(title)}</b> {escape(view.help + view.follow)}"),
                _row(shown, gap="12px"),
                _row([self.number, self.upload, self.inverted]),
                _row([*choice, self.reset, self.refine, *self.actions]),
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
        view, images, title = open_source(source, data, data_root)
        return cls(view, images, title)

    def _make_widgets(self) -> None:
        self.image, self.painted, self.colored = (
            Picture(label=label) for label in ("image", "model", "parts")
        )
        wide, last = widgets.Layout(width="auto"), len(self.images) - 1
        self.number = widgets.IntSlider(0, 0, last, description="test image", style=WHOLE)
        self.upload = widgets.FileUpload(
            accept="image/*", description="image from a file", layout=wide
        )
        self.inverted = widgets.Checkbox(
            False,
            description="invert the file (dark ink on bright paper)",
            indent=False,
            layout=wide,
        )
        self.selection = widgets.Dropdown(description="selected", style=WHOLE)
        self.mode = widgets.ToggleButtons(
            options=self.view.modes, style={"button_width": "auto"}, layout=wide
        )
        self.reset = widgets.Button(
            description="reset", tooltip="return to the values inferred from the image"
        )
        self.refine = widgets.Button(description="refine", tooltip=self.view.improves)
        self.actions = [widgets.Button(description=action) for action in self.view.actions]
        self.status = widgets.HTML()
        self.panel = widgets.HBox(layout=widgets.Layout(flex_flow="row wrap", max_width="1230px"))

    def _connect(self) -> None:
        self._on(self.number, "value", self._choose_image)
        self._on(self.upload, "value", self._take_upload)
        self._on(self.inverted, "value", lambda _: self._read_again())
        self._on(self.selection, "value", self._select)
        self._on(self.mode, "value", self.view.set_mode)
        self._on(self.painted, "drag", partial(self._drag, part=False))
        self._on(self.colored, "drag", partial(self._drag, part=True))
        self.image.on_msg(self._take_drop)
        self.reset.on_click(lambda _: self._do(self.view.reset))
        self.refine.on_click(lambda _: self._refine())
        for button in self.actions:
            button.on_click(lambda pressed: self._do(partial(self._act, pressed.description)))

    def _on(self, widget: widgets.Widget, trait: str, action: Callable[[Any], object]) -> None:
        """Call `action` with a trait's new value if a person, and not `show`, changed it."""

        def react(change: Any) -> None:
            if not self._quiet:
                self._do(partial(action, change["new"]))

        widget.observe(react, trait)

    def _do(self, action: Callable[[], object]) -> None:
        """Change the view and show it; report a `ValueError` in the status line."""
        try:
            message = action()
            self.show(message if isinstance(message, str) else "")
        except ValueError as error:
            self.status.value = f'<span style="color: #b00020">{escape(str(error))}</span>'

    def show(self, message: str = "") -> None:
        """Update all widgets to the state of the view."""
        names = self.view.handles()
        with self._quietly():
            options = [(name, i) for i, name in enumerate(names)]
            if self.selection.options != tuple(options):
                self.selection.options = options
            self.selection.value = self.handle
            if self.view.modes:
                self.mode.value = self.view.mode
            self._show_controls(self.view.controls(self.handle))
        self.image.png = as_png(self.view.image[0].movedim(0, -1))
        self.painted.png = as_png(self.view.painted()[0].movedim(0, -1))
        colored = self.view.colored()
        if colored is not None:
            self.colored.png = as_png(colored, self.view.outline(self.handle))
        likelihood = f"log p(image | model's picture) = {self.view.log_likelihood():.1f} nats"
        self.status.value = escape(f"{message}; {likelihood}" if message else likelihood)

    def _show_controls(self, controls: dict[str, Control]) -> None:
        if list(self.sliders) != list(controls):
            self.sliders = {}
            for name, control in controls.items():
                slider = widgets.FloatSlider(
                    step=control.step, description=name + control.unit, style=WHOLE
                )
                slider.readout_format = ".2f" if control.step < 1 else ".0f"
                self.sliders[name] = slider
                slider.observe(partial(self._slide, name), "value")
            self.panel.children = tuple(self.sliders.values())
        for name, control in controls.items():
            slider = self.sliders[name]
            low, high, value = control.in_steps()
            with slider.hold_trait_notifications():
                slider.min = low
                slider.max = high
                if _differ(slider.value, value, control):
                    slider.value = value

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def _slide(self, name: str, change: Any) -> None:
        """Follow a slider, but ignore the browser's rounding of a value to the slider's steps."""
        control, value = self.view.controls(self.handle)[name], change["new"]
        if not self._quiet and _differ(value, control.in_steps()[2], control):
            self._do(partial(self.view.change, self.handle, name, value))

    def _act(self, action: str) -> None:
        self.handle = self.view.act(action, self.handle)

    def _select(self, handle: int) -> None:
        self.handle = handle

    def _drag(self, drag: dict[str, Any], part: bool) -> None:
        """Follow the pointer from its last reported place; a new number means a new drag."""
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
        self._read(self.images[index : index + 1])

    def _take_upload(self, files: tuple[dict[str, Any], ...]) -> str | None:
        with self._quietly():
            self.upload.value = ()  # so that the same file may be chosen again
        return self._take_file(files[0]["name"], bytes(files[0]["content"]))

    def _take_drop(self, _: object, content: dict[str, Any], buffers: list[Any]) -> None:
        if "dropped" in content:
            self._do(partial(self._take_file, content["dropped"], bytes(buffers[0])))

    def _take_file(self, name: str, content: bytes) -> str:
        shape, inverted = self.view.image_shape, self.inverted.value
        self._read(image_from_file(content, name, shape, inverted))
        self._file = name, content
        return f"loaded {name}"

    def _read_again(self) -> str | None:
        return None if self._file is None else self._take_file(*self._file)

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
    """Return True if two values of a slider differ by more than rounding."""
    return abs(value - other) > 0.1 * control.step
