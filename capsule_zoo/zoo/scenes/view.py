"""The explorer's view of scenes: the inferred objects, to move, to remove and to add.

For an image the view samples the guide several times, and keeps the sample and the presences with
the largest weight; see `guides.scenes.proposals`. A handle is a slot. The state holds values
(1, ...) of all sites by name, slots that are off too, and the log weight of the draw, in nats.
"""

import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.explore.view import SQUARE, Control, Position, State, View
from capsule_zoo.guides.scenes.proposals import SceneGuide
from capsule_zoo.inference.objects import Rendering, render_objects
from capsule_zoo.models.checks import check_one_of
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.models.common.spaces import tile_batch
from capsule_zoo.models.common.trace_density import latent_sites
from capsule_zoo.models.scenes import Scenes
from capsule_zoo.models.scenes.pictures import AsObject, together, window
from capsule_zoo.zoo.scenes.figures import colored_objects

DRAWS = 10  # samples of the guide that are drawn at once
WEIGHT, PRESENCE, POSE = "log_weight", "scene_presence", "scene_pose"


class ScenesView(View):
    """The view of a scene; see the module's docstring."""

    help = (
        "Drag an object in the model's picture or in the picture of the objects; the sliders set "
        "the selected object. Remove it, or add one from the prior. Drop a picture file on the "
        "image."
    )
    improves = "draw the guide 50 more times, and select the draw that explains the image best"
    gain = "the weight of the best draw"
    names = ("image", "model's picture", "objects")
    actions = ("remove object", "add object from prior")

    def __init__(self, model: Scenes, guide: SceneGuide) -> None:
        super().__init__(model, guide)
        color = ("red", "green", "blue") if model.is_tinted else ()
        pose = ("log size", "x", "y", "angle")[: model.pose_size]
        self.numbers: dict[str, tuple[str, int, float, str]] = {
            name: (POSE, i, 1.5, " (radians)" * (name == "angle")) for i, name in enumerate(pose)
        }
        self.numbers |= {n: ("scene_color", i, 4, " (logit)") for i, n in enumerate(color)}
        if model.has_colors:
            self.numbers["depth"] = "scene_depth", 0, 4, ""

    def infer_state(self) -> State:
        with use_seed(0):
            return self._best_of(DRAWS)

    def improve(self, steps: int) -> tuple[State, float]:
        draws = (self._best_of(min(DRAWS, steps - done)) for done in range(0, steps, DRAWS))
        best = max([self.parse, *draws], key=lambda sites: sites[WEIGHT])
        return best, (best[WEIGHT] - self.parse[WEIGHT]).item()

    @torch.no_grad()
    def _best_of(self, number: int) -> State:
        """Sample the guide several times, and return the best sample with its best presences."""
        copies = tile_batch(self.image, number)
        result = self.guide.draw_proposals(copies)
        presences = self.guide.presence_distribution(copies, result)
        log_weight = presences.log_weight
        draw, row = divmod(int(log_weight.argmax()), log_weight.shape[1])
        presence = self.model.with_inner(presences.rows[draw, row][None], 1)
        sites = {WEIGHT: log_weight[draw, row], PRESENCE: presence}
        proposals = {f"slot_{slot}": p for slot, p in enumerate(result.proposals)}
        for name, proposal in {"ground": result.ground, **proposals}.items():
            values = proposal.values.items()
            sites |= {f"{name}/{site}": value[draw : draw + 1] for site, value in values}
        return sites

    def handles(self) -> list[str]:
        on = self.state[PRESENCE].flatten().tolist()
        return [f"object {i}{'' if present else ' (absent)'}" for i, present in enumerate(on, 1)]

    def first_handle(self) -> int:
        return int(self.state[PRESENCE].argmax())

    def controls(self, handle: int) -> dict[str, Control]:
        controls = {"presence": self.control(PRESENCE, handle, 0, 1, step=1)}
        for name, (site, index, span, unit) in self.numbers.items():
            controls[name] = self.control(f"slot_{handle}/{site}", index, -span, span, unit=unit)
        return controls

    def act(self, action: str, handle: int) -> int:
        """Remove an object, or add one sampled from the prior in an absent slot.

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
                sites = latent_sites(prior.get_trace(self.model.plate(1))).items()
            self.state = {**self.state, **{name: site["value"] for name, site in sites}}
        self.change(handle, "presence", float(action == "add object from prior"))
        return handle

    def grab(self, position: Position, part: bool) -> int | None:
        if (pixel := self.pixel_at(position)) is None:
            return None
        owner = int(self._rendering().owners[0, *pixel])
        return owner - 1 if owner else None

    def drag(self, handle: int, start: Position, end: Position) -> None:
        for name, before, after in zip("xy", start, end, strict=True):
            self.change(handle, name, self.controls(handle)[name].value + after - before)

    def mean_image(self) -> Tensor:
        return self._rendering().mean

    def color_parts(self) -> Tensor:
        colored = colored_objects(self.image, self._rendering().numbers, self.model.slots)
        return colored[0].movedim(0, -1)

    def outline(self, handle: int) -> Tensor | None:
        if not self.state[PRESENCE].flatten()[handle]:
            return None
        pose = self.state[f"slot_{handle}/{POSE}"].flatten()
        frame = window(pose, self.model.usual(pose))
        return SQUARE.to(pose) @ frame[:, :2].mT + frame[:, 2]

    def log_likelihood(self) -> float:
        return self.model.log_likelihood(self.image, self.mean_image()[:, None]).item()

    @torch.no_grad()
    def _rendering(self) -> Rendering:
        """Return the rendering of the state: every object's picture and visibility."""
        model, plate, placed = self.model, self.model.plate(1), []
        with poutine.condition(data=self.state):
            with AsObject("ground"):
                ground = model.draw_ground(plate)
            for slot in range(model.slots):
                with AsObject(f"slot_{slot}"):
                    placed.append(model.place_object(model.draw_object(plate)))
        on = self.state[PRESENCE].reshape(1, -1)
        return render_objects(model, self.image, on, together(placed), ground)
