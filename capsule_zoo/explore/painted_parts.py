"""The base of the explorer's views of models whose parts paint the image."""

import math
from abc import abstractmethod

import torch
from torch import Tensor

from capsule_zoo.explore.view import SQUARE, Control, Place, S, View
from capsule_zoo.guides import Guide, KnownLatents
from capsule_zoo.inference import fit_guide, intervene
from capsule_zoo.inference.evaluation.ancestral import Sites, infer
from capsule_zoo.models import Capsules, poses
from capsule_zoo.models.parts.painted_parts import PaintedParts
from capsule_zoo.zoo.part_whole.figures import colored_parts, seen_of_parts

NUMBERS = ("x", "y", "angle", "size", "stretch", "shear")
_SEEN = 0.05  # a pixel to which no part adds more is empty
_LEAST_SIZE = 0.02


class PaintedPartsView(View[S]):
    """The base of the views of models whose parts paint the image.

    Subclasses know the state of what a guide draws (`state_of`), which parts a state has (`parts`),
    where a handle is and how it moves (`place_of`, `move`), and which handle holds a part
    (`handle_at`).

    Args:
        model, guide: the pair; neither is changed.
    """

    improves = "improve the posterior of this image by 50 steps of optimization"
    modes = ("posterior", "prior mean", "counterfactual")
    follow = (
        " The parts of a moved object follow in one of three modes: posterior (as inferred from "
        "the image), prior mean (where the object predicts them), counterfactual (predicted, plus "
        "the noise of this image)."
    )
    model: PaintedParts
    drawn: Sites  # the latents of `parse`
    read_drawn: Sites  # the latents of `read_state`
    parsed_by: Guide  # whose draws `drawn` are: the guide, or the one that is refined from it

    def __init__(self, model: PaintedParts, guide: Guide) -> None:
        self.model = model.discretized()
        self.guide = guide
        self.relaxed = model
        self.image_shape = model.image_shape

    @abstractmethod
    def state_of(self, drawn: Sites) -> S:
        """Return the state for one image's draws (1, ...) from a guide to the discrete model."""

    @torch.no_grad()
    def read(self, image: Tensor) -> None:
        self._take(image, self.model, self.guide)
        self.read_drawn = infer(self.guide, self.image)
        self._begin(self.state_of(self.read_drawn))

    def refine(self, steps: int = 50) -> str:
        """Improve the parse by free-form steps; see `inference.fit_guide`."""
        guide = fit_guide(
            "free_form", self.relaxed, self.parsed_by, self.image, steps=steps, law="delta"
        )
        self.parsed_by = guide
        with torch.no_grad():
            self.drawn = infer(guide, self.image)
            self._show(self.state_of(self.drawn))
        gain = (guide.refinement.end - guide.refinement.start).item()
        return f"refined by {steps} steps: the objective is {gain:.1f} nats higher"

    def reset(self) -> None:
        self.drawn, self.parsed_by = self.read_drawn, self.guide
        super().reset()

    def counterfactual(self, do: Sites) -> S:
        """Return the counterfactual state: some sites have other values, all noise stays.

        See `capsule_zoo.inference.intervene`. The noise is that of the parse, before any move.

        Args:
            do: values (1, ...) of sites by name.
        """
        known = KnownLatents(self.model, self.drawn)
        found = intervene(self.model, known, self.image, do)
        return self.state_of({name: value[0] for name, value in found.latents.items()})

    @abstractmethod
    def parts(self) -> Capsules:
        """Return presences (1, P) and poses (1, P, 6) of the parts in the image."""

    @abstractmethod
    def place_of(self, handle: int) -> Tensor:
        """Return the pose (6,) of a handle in the image."""

    @abstractmethod
    def move(self, handle: int, pose: Tensor) -> None:
        """Move a handle to a pose (6,) in the image."""

    @abstractmethod
    def handle_at(self, index: int, part: bool) -> int:
        """Return the handle of a part, or of the object that it belongs to."""

    @torch.no_grad()
    def grab(self, place: Place, part: bool) -> int | None:
        if (pixel := self.pixel_at(place)) is None:
            return None
        seen = seen_of_parts(self.model, self.parts())[:, 0, *pixel]
        return None if seen.max() < _SEEN else self.handle_at(int(seen.argmax()), part)

    def drag(self, handle: int, start: Place, end: Place) -> None:
        pose = self.place_of(handle).clone()
        pose[2::3] += pose.new_tensor(end) - pose.new_tensor(start)
        self.move(handle, pose)

    def pose_controls(self, handle: int) -> dict[str, Control]:
        """Return the numbers of a handle's pose in the image, with the angle in degrees."""
        values = self._components(handle)
        low, high = (_LEAST_SIZE, 1.5) if values["size"] > 0 else (-1.5, -_LEAST_SIZE)
        return {
            "x": Control(values["x"], -1.5, 1.5),
            "y": Control(values["y"], -1.5, 1.5),
            "angle": Control(math.degrees(values["angle"]), -180, 180, 1, " (degrees)"),
            "size": Control(values["size"], low, high),
            "stretch": Control(values["stretch"], 0.2, 5),
            "shear": Control(values["shear"], -2, 2),
        }

    def change_pose(self, handle: int, name: str, value: float) -> None:
        """Set one of the numbers of a handle's pose."""
        components = {**self._components(handle), name: value}
        if name == "angle":
            components[name] = math.radians(value)
        row = torch.tensor([components[each] for each in NUMBERS])
        self.move(handle, poses.from_components(row.to(self.place_of(handle))))

    @torch.no_grad()
    def painted(self) -> Tensor:
        return self.model.render(self.parts())

    @torch.no_grad()
    def colored(self) -> Tensor:
        return colored_parts(self.model, self.parts())[0]

    def outline(self, handle: int) -> Tensor:
        pose = self.place_of(handle).view(2, 3)
        return 0.93 * SQUARE.to(pose) @ pose[:, :2].mT + pose[:, 2]  # inside one of full width

    @torch.no_grad()
    def log_likelihood(self) -> float:
        return self.model.image_law(self.parts()).log_prob(self.image[:, None]).sum().item()

    def _components(self, handle: int) -> dict[str, float]:
        return dict(zip(NUMBERS, poses.to_components(self.place_of(handle)).tolist(), strict=True))
