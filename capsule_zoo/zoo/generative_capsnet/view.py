"""The explorer's view of models that render on request: request, code and part addresses.

For an image the view infers its transformation (`inference.transformations`) and the guide's code
of the image moved back. The request is the transformation that the model gets. Parts of a
generative CapsNet are written at their addresses. A part moved by hand keeps its offset from its
address for all later requests: the site `part_jitter`.
"""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from capsule_zoo.data import Requests, Rotations, Shifts
from capsule_zoo.explore.view import Control, Position, State, View
from capsule_zoo.figures.grids import part_colors
from capsule_zoo.guides.conditional import KIND, ConditionalEncoder
from capsule_zoo.inference.transformations import infer_transformation
from capsule_zoo.models.generative_capsnet import Parts, RoutedByAddress
from capsule_zoo.models.networks.on_request import OnRequest

REQUEST, CODE = 0, 1  # handles; the parts come after them
ASKED, JITTER = "request", "part_jitter"
DEGREES, PER_AXIS = 15, 9  # grid of the search: degrees between rotations, and shifts per axis


def requests_of(model: OnRequest, guide: ConditionalEncoder) -> Requests:
    """Return the family of a model's requests, recognized by the model's identity request.

    Shifts extend as far as the guide's window can move in the image, or 20 pixels if the window is
    the whole image.
    """
    if tuple(model.identity) == Rotations.identity:
        return Rotations()
    borders = [(n - m) / 2 for n, m in zip(model.image_shape[1:], guide.window, strict=True)]
    return Shifts(max(borders) or Shifts.reach)


class RequestView(View):
    """The view of a model that renders on request; handles are the request, code and parts.

    The state has the latents (1, ...) by site, and the parameters of the request, (1, n).
    """

    improves = "improve the inferred request by 50 steps of gradient ascent on its likelihood"
    gain = "log p(image | request)"

    def __init__(self, model: OnRequest, guide: ConditionalEncoder) -> None:
        super().__init__(model, guide)
        self.parts = getattr(model, "parts", 0)
        self.requests: Any = requests_of(model, guide)
        self.rotates = isinstance(self.requests, Rotations)
        canvas = model.canvas if isinstance(model, RoutedByAddress) else None
        self.on_grid = canvas is not None and not canvas.learned  # addresses are positions
        length = range(canvas.address_length) if canvas else ()
        self.numbers = ("row", "column") if self.on_grid else [f"address[{i}]" for i in length]
        parts = "Drag a part capsule on the picture of the parts to another address. "
        self.help = (
            f"Drag on the model's picture to {'rotate' if self.rotates else 'shift'} the requested "
            f"image. {parts * self.on_grid}The sliders set the selected request, code or part. "
            "Drop a picture file on the image."
        )

    def infer_state(self) -> State:
        if self.rotates:
            return self._parsed(torch.arange(-180.0, 180.0, DEGREES)[:, None], 0)[0]
        line = torch.linspace(-self.requests.reach, self.requests.reach, PER_AXIS)
        return self._parsed(torch.cartesian_prod(line, line), 0)[0]

    def improve(self, steps: int) -> tuple[State, float]:
        return self._parsed(self.parse[ASKED], steps)

    def _parsed(self, grid: Tensor, steps: int) -> tuple[State, float]:
        """Infer the request, from a grid and then by ascent, and the code; return the gain too."""
        result = infer_transformation(
            self.model, self.guide, self.image, self.requests, grid=grid, starts=1, steps=steps
        )
        upright = self.requests.move(self.image, -result.best)
        with torch.no_grad():
            state = {**self.guide.expectations(upright), ASKED: result.best}
        return state, (result.best_log_evidence - result.log_evidence.amax(-1)).item()

    def handles(self) -> list[str]:
        return ["request", "code", *(f"part {i + 1}" for i in range(self.parts))]

    def controls(self, handle: int) -> dict[str, Control]:
        if handle == REQUEST and self.rotates:
            return {"angle": self.control(ASKED, 0, -180, 180, step=1, unit=" (degrees)")}
        if handle == REQUEST:
            reach, options = self.requests.reach, {"step": 0.5, "unit": " (pixels)"}
            axes = enumerate("xy")
            return {n: self.control(ASKED, i, -reach, reach, **options) for i, n in axes}
        if handle == CODE:
            controls = {}
            for site, value in self.state.items():
                if site == KIND:
                    controls["kind"] = Control(float(value.argmax()), 0, value.shape[-1] - 1, 1)
                elif site not in (JITTER, ASKED):
                    codes = range(value.shape[-1])
                    controls |= {f"{site}[{i}]": self.control(site, i, -3, 3) for i in codes}
            return controls
        span = 1.5 if self.on_grid else 5.0
        address = self._address()[0, handle - 2].tolist()
        return dict(zip(self.numbers, (Control(v, -span, span) for v in address), strict=True))

    def _set(self, handle: int, name: str, value: float, control: Control) -> None:
        if name == "kind":
            kinds = torch.zeros_like(self.state[KIND])
            kinds[0, round(value)] = 1.0
            self.state = {**self.state, KIND: kinds}
        elif handle > CODE:
            step = torch.zeros(len(self.numbers))
            step[self.numbers.index(name)] = value - control.value
            self._shift(handle, step)
        else:
            super()._set(handle, name, value, control)

    def _shift(self, handle: int, step: Tensor) -> None:
        """Move the address of a part by its jitter."""
        jitter = self.state.get(JITTER, torch.zeros_like(self._address())).clone()
        jitter[0, handle - 2] += step
        self.state = {**self.state, JITTER: jitter}

    @torch.no_grad()
    def grab(self, position: Position, part: bool) -> int | None:
        """Return the handle of the part with the nearest address, or of the request."""
        if not (part and self.on_grid):
            return REQUEST
        return 2 + int((self._positions() - torch.tensor(position)).norm(dim=-1).argmin())

    def drag(self, handle: int, start: Position, end: Position) -> None:
        """Move the address of a part; another handle rotates or shifts the request."""
        (x0, y0), (x1, y1), asked = start, end, self.state[ASKED]
        if handle > CODE and self.on_grid:
            self._shift(handle, asked.new_tensor([y1 - y0, x1 - x0]) / self._spread())
        elif self.rotates:
            angle = math.degrees(math.atan2(-y1, x1) - math.atan2(-y0, x0))  # y points down
            self.state = {**self.state, ASKED: (asked + angle + 180) % 360 - 180}
        else:
            _, height, width = self.image_shape
            step = asked.new_tensor([(x1 - x0) * width, (y1 - y0) * height]) / 2
            self.state = {**self.state, ASKED: asked + step}

    @torch.no_grad()
    def mean_image(self) -> Tensor:
        return self.model.mean_image(self._latents(), self.requests.numbers(self.state[ASKED]))

    @torch.no_grad()
    def color_parts(self) -> Tensor | None:
        """Return the parts' colors on the grid of cells, weighted by activation."""
        if not self.parts:
            return None
        strength = self._capsules().activation.mean(-1, keepdim=True)  # (1, parts, 1)
        colors = strength * part_colors(self.parts).to(strength)
        maps = self.model.canvas.route(Parts(self._address(), colors))[0].movedim(0, -1)
        return maps / maps.max().clamp(min=1)

    def outline(self, handle: int) -> Tensor | None:
        if handle <= CODE or not self.on_grid:
            return None
        cell = 1 / torch.tensor(self.model.canvas.grid[::-1])
        corners = torch.tensor([[-1.0, 0.0], [0.0, -1.0], [1.0, 0.0], [0.0, 1.0]])
        return self._positions()[handle - 2] + cell * corners

    def log_likelihood(self) -> float:
        pixels = dist.Normal(self.mean_image(), self.model.sigma_image)
        return pixels.log_prob(self.image).sum().item()

    def _latents(self) -> State:
        return {site: value for site, value in self.state.items() if site != ASKED}

    def _capsules(self) -> Parts:
        return self.model.capsules(self._latents(), self.requests.numbers(self.state[ASKED]))

    @torch.no_grad()
    def _address(self) -> Tensor:
        """Return the addresses of the parts, (1, parts, numbers)."""
        return self._capsules().address + self.state.get(JITTER, 0.0)

    def _spread(self) -> Tensor:
        """Return the offset (row, column) of the last cell's center from the image's center."""
        return torch.tensor([max(n - 1, 1) / n for n in self.model.canvas.grid])

    def _positions(self) -> Tensor:
        """Return the positions of the addresses, x and y in the image's frame, (parts, 2)."""
        return (self._address()[0] * self._spread()).flip(-1)
