"""The state and the pictures of the explorer, without widgets.

A view holds the values of one image: latents by site, (1, ...), and what else a model needs. It
lists its handles, the things that a person can move: an object, a part, the request. A handle has a
few numbers. `change` sets one of them, `drag` moves a handle in the picture. Pictures are functions
of the state. Positions are in the frame [-1, 1]^2 of the image, x to the right and y downwards.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from capsule_zoo.inference.evaluation.prepare import prepare_images
from capsule_zoo.models.checks import check_known, check_one_of

Position = tuple[float, float]
State = dict[str, Any]
SQUARE = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])  # a frame of width 2


@dataclass(frozen=True)
class Control:
    """A number of a handle: value, range, step, unit, and its position in the state."""

    value: float
    low: float
    high: float
    step: float = 0.01
    unit: str = ""
    site: str = ""
    index: int = 0

    def round_to_steps(self) -> tuple[float, float, float]:
        """Round a range and a value to steps from `low`, and widen the range to hold the value."""
        last, now = (round((n - self.low) / self.step) for n in (self.high, self.value))
        steps = min(0, now), max(last, now), now
        low, high, value = (round(self.low + n * self.step, 6) for n in steps)
        return low, high, value


class View:
    """A view of a model and a guide through one image; a subclass knows the handles.

    It writes

        handles()                 the names of the handles; a handle is an index into this list
        controls(handle)          the numbers of a handle: a `Control` by name
        grab(position, part)      the handle there, or None: a part, or else what it belongs to
        drag(handle, start, end)  moves a handle from one position to another
        mean_image()              the model's mean image of the state, (1, C, H, W)
        color_parts()             every part in its color, (H, W, 3) on any grid; None without parts
        outline(handle)           corners (n, 2) of its frame, as x and y; None without a frame
        log_likelihood()          log p(image | state), in nats
        summary()                 what the line below the pictures says; log p by default
        infer_state()             what the guide infers from the image
        improve(steps)            a better parse, and its gain in nats

    Args:
        model, guide: the pair; neither is changed.

    Attributes:
        image: the explored image, (1, C, H, W).
        state: the values that are displayed, by name; no tensor of them is changed in place.
        parse: the inferred or refined values, before any move by hand.
        read_state: the values inferred from the image, to which `reset` returns.
        modes: how capsules below a handle follow it, the first mode at the start; may be empty.
        actions: what `act(action, handle)` can do; it returns the handle to select next.
        help, improves, follow: texts on how to move handles, on `refine` and on `modes`.
        gain: what `refine` makes higher.
        names: labels of the pictures: the image, the model's picture, its parts in color.
    """

    help = improves = follow = gain = mode = ""
    names = ("image", "model's picture", "parts")
    modes: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    image: Tensor
    state: State
    parse: State
    read_state: State

    def __init__(self, model: Any, guide: Any) -> None:
        self.model, self.guide = model.discretize(), guide.discretize()
        self.image_shape: tuple[int, int, int] = model.image_shape

    def __getattr__(self, name: str) -> Any:
        hint = "" if "state" in vars(self) else "; call read(images[:1]) first"
        raise AttributeError(f"{type(self).__name__} has no {name!r}{hint}")

    def read(self, image: Tensor) -> None:
        """Infer the state of an image (1, C, H, W) with the guide, and show it.

        Raises:
            ValueError: the model does not take the image, or there are several.
        """
        images = prepare_images(self.model, image, self.guide)
        if len(images) > 1:
            raise ValueError(f"a view reads one image, not {len(images)}; give images[:1]")
        self.image = images
        self.read_state = self.infer_state()
        self.reset()

    def refine(self, steps: int = 50) -> str:
        """Improve the parse of the image by `steps` steps, and return the gain as text."""
        parse, gain = self.improve(steps)
        self._show(parse)
        return f"refined by {steps} steps: {self.gain} is {gain:.1f} nats higher"

    def reset(self) -> None:
        """Restore the state inferred from the image, before any refinement."""
        self._show(self.read_state)

    def _show(self, parse: State) -> None:
        self.state = self.parse = parse
        self.mode = next(iter(self.modes), "")

    def set_mode(self, mode: str) -> None:
        """Set how capsules follow a handle: one of `modes`."""
        check_one_of("mode", mode, self.modes)
        self.mode = mode

    def change(self, handle: int, name: str, value: float) -> None:
        """Set one of a handle's numbers.

        Raises:
            ValueError: a number that the handle does not have, or a value that is not finite.
        """
        controls = self.controls(handle)
        check_known("number of the handle", name, controls)
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, not {value}")
        with torch.no_grad():
            self._set(handle, name, value, controls[name])

    def _set(self, handle: int, name: str, value: float, control: Control) -> None:
        """Write one of the numbers that `controls` lists into the state."""
        numbers = self.state[control.site].clone(memory_format=torch.contiguous_format)
        is_count = control.step == 1 and not control.unit
        numbers.view(-1)[control.index] = round(value) if is_count else value
        self.state = {**self.state, control.site: numbers}

    def control(self, site: str, index: int, low: float, high: float, **options: Any) -> Control:
        """Return the control of a number of the state; `options` are its step and its unit."""
        value = self.state[site].reshape(-1)[index].item()
        return Control(value, low, high, site=site, index=index, **options)

    def pixel_at(self, position: Position) -> tuple[int, int] | None:
        """Return the row and column of the pixel at a position; None outside the image."""
        _, height, width = self.image_shape
        row, column = self.row_and_column(position)
        return (row, column) if 0 <= column < width and 0 <= row < height else None

    def row_and_column(self, position: Position) -> tuple[int, int]:
        """Return the row and column at a position, which may lie outside the image."""
        _, height, width = self.image_shape
        x, y = position
        return int((y + 1) * height // 2), int((x + 1) * width // 2)

    @property
    def file_shape(self) -> tuple[int, int, int] | None:
        """The shape (C, H, W) that pictures from files are brought to; None for their own."""
        return self.image_shape

    def summary(self) -> str:
        """Return what the line below the pictures says of the state."""
        return f"log likelihood of the image: {self.log_likelihood():.1f} nats"

    def first_handle(self) -> int:
        """Return the handle that is selected when an image is shown."""
        return 0
