"""The state and the pictures of the explorer, without widgets.

A view holds the latents of one image. It lists its handles: the things that a person can move, such
as an object, a part or the request. Each handle has a few numbers. `change` sets one number, and
`drag` moves a handle in the picture. The pictures are pure functions of the state. Places are in
the frame [-1, 1]^2 of the image, x to the right and y downwards.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from capsule_zoo.guides import Guide
from capsule_zoo.inference.evaluation.prepare import as_wanted
from capsule_zoo.models import Model
from capsule_zoo.models.checks import check_known, check_one_of

Place = tuple[float, float]
S = TypeVar("S")
SQUARE = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])  # a frame of width 2


@dataclass(frozen=True)
class Control:
    """A number of a handle, with its value, range, step and unit."""

    value: float
    low: float
    high: float
    step: float = 0.01
    unit: str = ""

    def in_steps(self) -> tuple[float, float, float]:
        """Return range ends and value, rounded to steps from `low`; the range holds the value."""
        last, now = (round((n - self.low) / self.step) for n in (self.high, self.value))
        places = (min(0, now), max(last, now), now)
        low, high, value = (round(self.low + n * self.step, 6) for n in places)
        return low, high, value


class View(ABC, Generic[S]):
    """A view of a model and a guide through one image; subclasses define handles and state S.

    Attributes:
        modes: how capsules below a handle follow it, the initial mode first; may be empty.
        actions: what `act` can do.
        image: the explored image, (1, C, H, W).
        state: the displayed state, never changed in place.
        read_state: the state inferred from the image, to which `reset` returns.
        parse: the inferred or refined state, before any move by hand.
        help, improves, follow: texts on how to move handles, on `refine` and on `modes`.
        names: labels of the pictures: the image, the model's picture, its parts in color.
    """

    help: str = ""
    improves: str = "the parse"
    names: tuple[str, str, str] = ("image", "model's picture", "parts")
    follow: str = ""
    modes: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    image_shape: tuple[int, int, int]
    image: Tensor
    state: S
    read_state: S
    parse: S
    mode: str = ""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, which says what to do before an image is read."""
            hint = "" if "state" in vars(self) else "; call read(images[:1]) first"
            raise AttributeError(f"{type(self).__name__} has no {name!r}{hint}")

    @abstractmethod
    def read(self, image: Tensor) -> None:
        """Infer the state of an image (1, C, H, W) with the guide, and show it.

        Raises:
            ValueError: the model does not take the image, or there are several.
        """

    def _take(self, image: Tensor, model: Model, guide: Guide) -> None:
        """Store the image, cast to the model's dtype."""
        found = as_wanted(model, image, guide)
        if len(found) > 1:
            raise ValueError(f"a view reads one image, not {len(found)}; give images[:1]")
        self.image = found

    @abstractmethod
    def refine(self, steps: int = 50) -> str:
        """Improve the parse of the image by `steps` steps, and return the gain in words."""

    @abstractmethod
    def handles(self) -> list[str]:
        """Return the names of the handles; a handle is an index into this list."""

    def first_handle(self) -> int:
        """Return the handle to select first."""
        return 0

    @abstractmethod
    def controls(self, handle: int) -> dict[str, Control]:
        """Return the numbers of a handle, by name."""

    def change(self, handle: int, name: str, value: float) -> None:
        """Set one number of a handle.

        Raises:
            ValueError: a number that the handle does not have, or a value that is not finite.
        """
        check_known("number of the handle", name, self.controls(handle))
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, not {value}")
        self._set(handle, name, value)

    @abstractmethod
    def _set(self, handle: int, name: str, value: float) -> None:
        """Set one of the numbers that `controls` lists."""

    @abstractmethod
    def grab(self, place: Place, part: bool) -> int | None:
        """Return the handle at a place: a single part, or else the capsule it belongs to."""

    @abstractmethod
    def drag(self, handle: int, start: Place, end: Place) -> None:
        """Move a handle by a drag from one place to another."""

    @abstractmethod
    def painted(self) -> Tensor:
        """Return the model's mean image of the state, (1, C, H, W)."""

    @abstractmethod
    def colored(self) -> Tensor | None:
        """Return every part in its own color, (H, W, 3) in [0, 1]; None without parts.

        The grid may be coarser than the image's.
        """

    @abstractmethod
    def outline(self, handle: int) -> Tensor | None:
        """Return the corners (n, 2) of the handle's frame, as x and y; None without a frame."""

    @abstractmethod
    def log_likelihood(self) -> float:
        """Compute log p(image | state), in nats."""

    def pixel_at(self, place: Place) -> tuple[int, int] | None:
        """Return the row and the column of the pixel at a place; None outside the image."""
        _, height, width = self.image_shape
        column, row = (int((p + 1) * n // 2) for p, n in zip(place, (width, height), strict=True))
        return (row, column) if 0 <= column < width and 0 <= row < height else None

    def reset(self) -> None:
        """Return to the state inferred from the image, before any refinement."""
        self._show(self.read_state)

    def set_mode(self, mode: str) -> None:
        """Set the mode to one of `modes`."""
        check_one_of("mode", mode, self.modes)
        self.mode = mode

    def act(self, action: str, handle: int) -> int:
        """Do one of `actions` to a handle, and return the handle to select next."""
        raise NotImplementedError(f"{type(self).__name__} must write act")

    def _begin(self, state: S) -> None:
        """Show the state inferred from the image."""
        self.read_state = state
        self.reset()

    def _show(self, parse: S) -> None:
        """Show a parse of the image before any move by hand."""
        self.state = self.parse = parse
        self.mode = next(iter(self.modes), "")
