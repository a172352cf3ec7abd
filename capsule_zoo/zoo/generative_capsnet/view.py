"""The explorer's view of models that render on request: request, code and part addresses.

Reading an image infers its transformation (`inference.posterior.transformations`) and the guide's
code of the image moved back. The request is the transformation passed to the model. Parts of a
generative CapsNet are written at their addresses. A part moved by hand keeps its offset from its
address for all later requests; the site `part_jitter` holds this offset.
"""

import math
from dataclasses import dataclass, replace

import pyro.distributions as dist
import torch
from torch import Tensor

from capsule_zoo.data import Requests, Rotations, Shifts
from capsule_zoo.explore.view import Control, Place, View
from capsule_zoo.figures.grids import part_colors
from capsule_zoo.guides.conditional import KIND, ConditionalEncoder
from capsule_zoo.inference.transformations import infer_transformation
from capsule_zoo.models.generative_capsnet import Parts, RoutedByAddress
from capsule_zoo.models.networks.on_request import OnRequest

REQUEST, CODE = 0, 1  # handles; the parts come after them
_JITTER = "part_jitter"
_DEGREES, _PLACES = 15, 9  # spacing of rotations, and shifts per axis, tried when an image is read


@dataclass(frozen=True)
class Asked:
    """The state that is rendered: latents (1, ...) by site, and request parameters (1, n)."""

    latents: dict[str, Tensor]
    parameters: Tensor


def requests_of(model: OnRequest, guide: ConditionalEncoder) -> Requests:
    """Return the family of a model's requests, recognized by the model's identity request.

    Shifts extend as far as the guide's window can move in the image, or 20 pixels if the window is
    the whole image.
    """
    if tuple(model.identity) == Rotations.identity:
        return Rotations()
    borders = [(n - m) / 2 for n, m in zip(model.image_shape[1:], guide.window, strict=True)]
    return Shifts(max(borders) or Shifts.reach)


class RequestView(View[Asked]):
    """The view of a model that renders on request; handles are the request, code and parts.

    Args:
        model, guide: the pair; neither is changed.
    """

    improves = "improve the inferred request by 50 steps of gradient ascent on its likelihood"

    def __init__(self, model: OnRequest, guide: ConditionalEncoder) -> None:
        self.model = model.discretized()
        self.guide = guide.discretized()
        self.image_shape = model.image_shape
        self.parts = getattr(model, "parts", 0)
        self.requests = requests_of(model, guide)
        self.turns = isinstance(self.requests, Rotations)
        self.parameter_names = ("angle",) if self.turns else ("x", "y")
        moved = "rotate" if self.turns else "shift"
        parts = "Drag a part capsule on the picture of the parts to another address. "
        self.help = (
            f"Drag on the model's picture to {moved} the requested image. "
            f"{parts if self._on_grid else ''}The sliders set the selected request, code or "
            "part. Drop a picture file on the image."
        )

    def read(self, image: Tensor) -> None:
        """Read an image: find the likeliest request of a grid and the guide's code for it."""
        self._take(image, self.model, self.guide)
        found, _ = self._infer(self._grid(), steps=0)
        self._begin(found)

    def refine(self, steps: int = 50) -> str:
        """Improve the request by gradient ascent on its likelihood."""
        found, gain = self._infer(self.parse.parameters, steps)
        self._show(found)
        return f"refined by {steps} steps: log p(image | request) is {gain:.1f} nats higher"

    def _infer(self, grid: Tensor, steps: int) -> tuple[Asked, float]:
        """Return the best request found from a grid, with its code and the gain of the ascent."""
        found = infer_transformation(
            self.model, self.guide, self.image, self.requests, grid=grid, starts=1, steps=steps
        )
        upright = self.requests.move(self.image, -found.best)
        with torch.no_grad():
            latents = self.guide.expectations(upright)
        gain = (found.best_log_evidence - found.log_evidence.amax(-1)).item()
        return Asked(latents, found.best), gain

    def _grid(self) -> Tensor:
        if self.turns:
            return torch.arange(-180.0, 180.0, _DEGREES)[:, None]
        line = torch.linspace(-self._reach, self._reach, _PLACES)
        return torch.cartesian_prod(line, line)

    def handles(self) -> list[str]:
        return ["request", "code", *(f"part {i + 1}" for i in range(self.parts))]

    def controls(self, handle: int) -> dict[str, Control]:
        if handle == REQUEST:
            values = self.state.parameters[0].tolist()
            high, step, unit = (
                (180, 1, " (degrees)") if self.turns else (self._reach, 0.5, " (pixels)")
            )
            values = [Control(v, -high, high, step, unit) for v in values]
            return dict(zip(self.parameter_names, values, strict=True))
        if handle == CODE:
            return self._code_controls()
        high = 1.5 if self._on_grid else 5.0
        numbers = self._address()[0, handle - 2].tolist()
        return dict(
            zip(self._address_names, (Control(v, -high, high) for v in numbers), strict=True)
        )

    def _code_controls(self) -> dict[str, Control]:
        found = {}
        for site, value in self.state.latents.items():
            if site == KIND:
                last = value.shape[-1] - 1
                found["kind"] = Control(float(value.argmax()), 0, last, 1)
            elif site != _JITTER:
                numbers = value[0].tolist()
                found |= {f"{site}[{i}]": Control(v, -3, 3) for i, v in enumerate(numbers)}
        return found

    def _set(self, handle: int, name: str, value: float) -> None:
        """Set a parameter of the request, the kind, a number of the code or of an address."""
        if handle == REQUEST:
            parameters = self.state.parameters.clone()
            parameters[0, self.parameter_names.index(name)] = value
            self.state = replace(self.state, parameters=parameters)
        elif handle == CODE:
            self._change_code(name, value)
        else:
            address = self._address()
            wanted = address[0, handle - 2].tolist()
            wanted[self._address_names.index(name)] = value
            self._put(handle, address.new_tensor(wanted))

    def _change_code(self, name: str, value: float) -> None:
        site, _, index = name.removesuffix("]").partition("[")
        site = KIND if name == "kind" else site
        numbers = self.state.latents[site].clone()
        if site == KIND:
            numbers.zero_()
            index, value = str(round(value)), 1.0
        numbers[0, int(index)] = value
        self.state = replace(self.state, latents={**self.state.latents, site: numbers})

    @torch.no_grad()
    def grab(self, place: Place, part: bool) -> int | None:
        """Return the part whose address is nearest, or the request."""
        if not (part and self._on_grid):
            return REQUEST
        distance = (self._places() - torch.tensor(place)).norm(dim=-1)
        return 2 + int(distance.argmin())

    def drag(self, handle: int, start: Place, end: Place) -> None:
        """Move a part's address; with any other handle, rotate or shift the request."""
        (x0, y0), (x1, y1) = start, end
        if handle > CODE and self._on_grid:
            address = self._address()[0, handle - 2]
            step = address.new_tensor([y1 - y0, x1 - x0]) / self._spread()
            self._put(handle, address + step)
            return
        if self.turns:
            turn = math.atan2(-y1, x1) - math.atan2(-y0, x0)  # y points down
            angle = self.state.parameters[0].item() + math.degrees(turn)
            change = [(angle + 180) % 360 - 180]
        else:
            _, height, width = self.image_shape
            step = self.state.parameters.new_tensor([(x1 - x0) * width, (y1 - y0) * height]) / 2
            change = (self.state.parameters[0] + step).tolist()
        self.state = replace(self.state, parameters=torch.tensor([change]))

    @torch.no_grad()
    def painted(self) -> Tensor:
        return self.model.mean_image(self.state.latents, self._request())

    @torch.no_grad()
    def colored(self) -> Tensor | None:
        """Return colours of the parts on the grid of cells, weighted by activation."""
        if not self.parts:
            return None
        parts = self._routed.capsules(self.state.latents, self._request())
        strength = parts.activation.mean(-1, keepdim=True)  # (1, parts, 1)
        maps = self._routed.canvas.route(
            Parts(self._address(), strength * part_colors(self.parts).to(strength))
        )
        maps = maps[0].movedim(0, -1)
        return maps / maps.max().clamp(min=1)

    def outline(self, handle: int) -> Tensor | None:
        if handle <= CODE or not self._on_grid:
            return None
        cell = 1 / torch.tensor(self._routed.canvas.grid[::-1])
        corners = torch.tensor([[-1.0, 0.0], [0.0, -1.0], [1.0, 0.0], [0.0, 1.0]])
        return self._places()[handle - 2] + cell * corners

    def log_likelihood(self) -> float:
        law = dist.Normal(self.painted(), self.model.sigma_image)
        return law.log_prob(self.image).sum().item()

    @property
    def _routed(self) -> RoutedByAddress:
        """Return the model, where it has parts."""
        assert isinstance(self.model, RoutedByAddress)
        return self.model

    @property
    def _reach(self) -> float:
        return getattr(self.requests, "reach", 0.0)

    @property
    def _on_grid(self) -> bool:
        """Return True if addresses are places on the grid of cells."""
        return isinstance(self.model, RoutedByAddress) and not self.model.canvas.learned

    @property
    def _address_names(self) -> list[str]:
        numbers = self._routed.canvas.address_length
        return ["row", "column"] if self._on_grid else [f"address[{i}]" for i in range(numbers)]

    def _request(self) -> Tensor:
        return self.requests.numbers(self.state.parameters)

    @torch.no_grad()
    def _address(self) -> Tensor:
        """Return the addresses of the parts, (1, parts, numbers)."""
        address = self._routed.capsules(self.state.latents, self._request()).address
        return address + self.state.latents.get(_JITTER, 0.0)

    def _put(self, handle: int, address: Tensor) -> None:
        """Move one part to an address, by its jitter."""
        now = self._address()
        jitter = self.state.latents.get(_JITTER, torch.zeros_like(now)).clone()
        jitter[0, handle - 2] += address - now[0, handle - 2]
        self.state = replace(self.state, latents={**self.state.latents, _JITTER: jitter})

    def _spread(self) -> Tensor:
        """Return the offset (row, column) of the last cell's middle from the image's middle."""
        return torch.tensor([max(n - 1, 1) / n for n in self._routed.canvas.grid])

    def _places(self) -> Tensor:
        """Return the addresses as x and y in the image's frame, (parts, 2)."""
        return (self._address()[0] * self._spread()).flip(-1)
