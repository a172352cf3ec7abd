"""What can be moved in a model, and the pictures that follow: state and rendering, no widgets.

A view holds the latents of one image. It lists its handles (things that a person takes hold of: an
object, a part, the request), each with a few numbers; `change` sets one number, `drag` moves a
handle about the picture, and the pictures are pure functions of the state. Places are in the frame
[-1, 1]^2 of the image, x to the right and y downwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Place = tuple[float, float]


@dataclass(frozen=True)
class Control:
    """A number of a handle: its value, the range and step in which it is offered, its unit."""

    value: float
    low: float
    high: float
    step: float = 0.01
    unit: str = ""

    def in_steps(self) -> tuple[float, float, float]:
        """Ends of the range and value, rounded to steps from `low`; the range holds the value."""
        last, now = (round((n - self.low) / self.step) for n in (self.high, self.value))
        places = (min(0, now), max(last, now), now)
        low, high, value = (round(self.low + n * self.step, 6) for n in places)
        return low, high, value


class View(ABC):
    """A model and a guide seen through one image; subclasses say what can be moved.

    Attributes:
        modes: ways in which what lies below a handle follows it, the first at the start; or none.
        image: the image that was last read, (1, C, H, W).
        state: what is shown now, never changed in place.
        read_state: what was read off the image, to which `reset` goes back.
        parse: what was read, or what `refine` made of it: where moving by hand begins.
        help, improves: what a person can do, and what `refine` improves, in words.
        names: of the pictures: the image, what the model paints, its parts in colour.
    """

    help: str = ""
    improves: str = "the parse"
    names: tuple[str, str, str] = ("the image", "as the model paints it", "its parts")
    modes: tuple[str, ...] = ()
    image_shape: tuple[int, int, int]
    image: Tensor
    state: Any
    read_state: Any
    parse: Any
    mode: str = ""

    @abstractmethod
    def read(self, image: Tensor) -> None:
        """Take an image (1, C, H, W) and begin at the guide's parse of it.

        Raises:
            ValueError: the model does not take the image.
        """

    @abstractmethod
    def refine(self, steps: int = 50) -> str:
        """Improve the parse of the image by so many steps; says in words what was gained."""

    @abstractmethod
    def handles(self) -> list[str]:
        """What can be moved, by name; a handle is an index into this list."""

    def first_handle(self) -> int:
        """What is worth holding first."""
        return 0

    @abstractmethod
    def controls(self, handle: int) -> dict[str, Control]:
        """The numbers of a handle, by name."""

    @abstractmethod
    def change(self, handle: int, name: str, value: float) -> None:
        """Set one number of a handle."""

    @abstractmethod
    def grab(self, place: Place, part: bool) -> int | None:
        """The handle that is seen at a place: a single part, or else what it belongs to."""

    @abstractmethod
    def drag(self, handle: int, start: Place, end: Place) -> None:
        """Move a handle as a hand does that goes from one place to another."""

    @abstractmethod
    def painted(self) -> Tensor:
        """The model's mean image of the state, (1, C, H, W)."""

    @abstractmethod
    def coloured(self) -> Tensor | None:
        """Every part in its own colour, (H, W, 3) in [0, 1]; None where there are no parts.

        The grid may be coarser than the image's.
        """

    @abstractmethod
    def outline(self, handle: int) -> Tensor | None:
        """Corners (n, 2) of the handle's frame, as x and y; None where it has none."""

    @abstractmethod
    def log_likelihood(self) -> float:
        """log p(image | state), in nats."""

    def reset(self) -> None:
        """Go back to what was read, before any refinement."""
        self._show(self.read_state)

    def set_mode(self, mode: str) -> None:
        """Choose one of `modes`."""
        self.mode = mode

    def _begin(self, state: Any) -> None:
        """Show what was just read off the image."""
        self.read_state = state
        self.reset()

    def _show(self, parse: Any) -> None:
        """Show a parse of the image as it is, moved by nobody."""
        self.state = self.parse = parse
        self.mode = next(iter(self.modes), "")
