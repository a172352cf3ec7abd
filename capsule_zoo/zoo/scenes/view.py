"""The explorer's view of scenes: the inferred objects, to move, to remove and to add.

Reading an image draws the guide's proposals several times, and keeps the draw and the presences of
the largest weight; see `guides.scenes.proposals`. A handle is a slot. The state holds values
(1, ...) of all sites by name, slots that are off too, and the log weight of the draw, in nats.
"""

import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.explore.view import SQUARE, Control, Place, View
from capsule_zoo.guides.scenes.proposals import SceneGuide
from capsule_zoo.inference.evaluation.ancestral import Sites
from capsule_zoo.inference.objects import Shown, shown
from capsule_zoo.models.checks import check_one_of
from capsule_zoo.models.common.modes import seeded
from capsule_zoo.models.common.spaces import tiled
from capsule_zoo.models.common.trace_density import latent_sites
from capsule_zoo.models.scenes import Scenes
from capsule_zoo.models.scenes.pictures import AsObject, together, window
from capsule_zoo.zoo.scenes.figures import colored_objects

READ = 10  # draws of the guide that are made at once
WEIGHT, PRESENCE, POSE = "log_weight", "scene_presence", "scene_pose"


class ScenesView(View[Sites]):
    """The view of a scene, described at the top of this file."""

    help = (
        "Drag an object in the model's picture or in the picture of the objects; the sliders set "
        "the selected object. Remove it, or add one from the prior. Drop a picture file on the "
        "image."
    )
    improves = "draw the guide 50 more times, and select the draw that explains the image best"
    names = ("image", "model's picture", "objects")
    actions = ("remove object", "add object from prior")

    def __init__(self, model: Scenes, guide: SceneGuide) -> None:
        self.model, self.guide = model.discretized(), guide.discretized()
        self.image_shape = model.image_shape
        pose = ("log size", "x", "y", "angle")[: model.pose_size]
        color = ("red", "green", "blue") if model.tinted else ()
        self.numbers = {name: (POSE, index, 1.5) for index, name in enumerate(pose)}
        self.numbers |= {name: ("scene_color", index, 4.0) for index, name in enumerate(color)}
        if model.colored:
            self.numbers["depth"] = "scene_depth", 0, 4.0

    def read(self, image: Tensor) -> None:
        self._take(image, self.model, self.guide)
        with seeded(0):
            self._begin(self._best_of(READ))

    def refine(self, steps: int = 50) -> str:
        """Draw the guide `steps` times more, and keep the draw of the largest weight."""
        drawn = (self._best_of(min(READ, steps - done)) for done in range(0, steps, READ))
        best = max([self.parse, *drawn], key=lambda sites: sites[WEIGHT])
        gain = (best[WEIGHT] - self.parse[WEIGHT]).item()
        self._show(best)
        return f"refined by {steps} steps: the weight of the best draw is {gain:.1f} nats higher"

    @torch.no_grad()
    def _best_of(self, draws: int) -> Sites:
        """Return the best of so many draws of the guide, with its best presences."""
        copies, model = tiled(self.image, draws), self.model
        found = self.guide.found(copies)
        law = self.guide.presence_law(copies, found)
        draw, row = divmod(int(law.log_weight.argmax()), law.log_weight.shape[1])
        sites = {WEIGHT: law.log_weight[draw, row]}
        sites[PRESENCE] = model.with_inner(law.rows[draw, row][None], 1)
        proposals = {f"slot_{slot}": each for slot, each in enumerate(found.proposals)}
        for name, proposal in {"ground": found.ground, **proposals}.items():
            drawn = proposal.values.items()
            sites |= {f"{name}/{site}": value[draw : draw + 1] for site, value in drawn}
        return sites

    def handles(self) -> list[str]:
        on = self.state[PRESENCE].flatten().tolist()
        return [f"object {i}{'' if present else ' (absent)'}" for i, present in enumerate(on, 1)]

    def first_handle(self) -> int:
        return int(self.state[PRESENCE].argmax())

    def controls(self, handle: int) -> dict[str, Control]:
        controls = {"presence": Control(self.state[PRESENCE].flatten()[handle].item(), 0, 1, 1)}
        for name, (site, index, span) in self.numbers.items():
            value = self.state[f"slot_{handle}/{site}"].flatten()[index].item()
            unit = " (radians)" if name == "angle" else " (logit)" if site == "scene_color" else ""
            controls[name] = Control(value, -span, span, unit=unit)
        return controls

    def _set(self, handle: int, name: str, value: float) -> None:
        """Turn a slot on or off, or set a number of its pose, its color's logits or its depth."""
        site, index = PRESENCE, handle
        if name != "presence":
            site, index = f"slot_{handle}/{self.numbers[name][0]}", self.numbers[name][1]
        numbers = self.state[site].clone()
        numbers.view(-1)[index] = round(value) if site == PRESENCE else value
        self.state = {**self.state, site: numbers}

    def act(self, action: str, handle: int) -> int:
        """Remove an object, or put one drawn from the prior into an absent slot.

        Raises:
            ValueError: no slot is absent, or another action.
        """
        check_one_of("action", action, self.actions)
        if action == "add object from prior":
            handle = int(self.state[PRESENCE].argmin())
            if self.state[PRESENCE].all():
                raise ValueError("all slots hold an object; remove one first")
            with torch.no_grad():
                prior = poutine.trace(AsObject(f"slot_{handle}")(self.model.draw_object))
                drawn = latent_sites(prior.get_trace(self.model.plate(1))).items()
            self.state = {**self.state, **{name: site["value"] for name, site in drawn}}
        self.change(handle, "presence", float(action == "add object from prior"))
        return handle

    def grab(self, place: Place, part: bool) -> int | None:
        if (pixel := self.pixel_at(place)) is None:
            return None
        owner = int(self._shown().owners[0, *pixel])
        return owner - 1 if owner else None

    def drag(self, handle: int, start: Place, end: Place) -> None:
        for name, before, after in zip("xy", start, end, strict=True):
            self.change(handle, name, self.controls(handle)[name].value + after - before)

    def painted(self) -> Tensor:
        return self._shown().mean

    def colored(self) -> Tensor:
        colored = colored_objects(self.image, self._shown().numbers, self.model.slots)
        return colored[0].movedim(0, -1)

    def outline(self, handle: int) -> Tensor | None:
        if not self.state[PRESENCE].flatten()[handle]:
            return None
        pose = self.state[f"slot_{handle}/{POSE}"].flatten()
        frame = window(pose, self.model.usual(pose))
        return SQUARE.to(pose) @ frame[:, :2].mT + frame[:, 2]

    def log_likelihood(self) -> float:
        return self.model.log_likelihood(self.image, self.painted()[:, None]).item()

    @torch.no_grad()
    def _shown(self) -> Shown:
        """Return what `inference.objects.shown` says of the state."""
        model, plate, placed = self.model, self.model.plate(1), []
        with poutine.condition(data=self.state):
            with AsObject("ground"):
                ground = model.draw_ground(plate)
            for slot in range(model.slots):
                with AsObject(f"slot_{slot}"):
                    placed.append(model.placed(model.draw_object(plate)))
        on = self.state[PRESENCE].reshape(1, -1)
        return shown(model, self.image, on, together(placed), ground)
