"""The explorer's view of part-whole capsules, in which children move with their parents.

A parse has all capsules, one level after the other from the top down: their presences given that
the parent is present, their poses in the image, and their likeliest parents by the model's
responsibilities. A parent that moves moves its children, and the children of an absent parent are
absent. In the mode "posterior" children have the values that the guide inferred from the image. In
the mode "prior mean" they have the likeliest values given the capsules above them. In the mode
"counterfactual" they keep their noise, see `capsule_zoo.inference.intervene`; a presence is then 0
or 1.
"""

import math
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from capsule_zoo.explore.view import SQUARE, Control, Position, State, View
from capsule_zoo.guides import Guide, KnownLatents
from capsule_zoo.inference import fit_guide, intervene
from capsule_zoo.inference.evaluation.ancestral import Sites, infer
from capsule_zoo.models import Capsules, PartWholeCapsules, poses
from capsule_zoo.models.parts.painted_parts import PaintedParts
from capsule_zoo.zoo.part_whole.figures import colored_parts, seen_of_parts

NUMBERS = ("x", "y", "angle", "size", "stretch", "shear")
MIN_GRAY = 0.05  # a pixel to which no part adds more is empty
MIN_SIZE = 0.02


class PaintedPartsView(View):
    """The base class of views of models whose parts paint the image; a capsule is a handle.

    The state has `presence` and `parent` (capsules,) and `pose` (capsules, 6), and of the guide
    that inferred it: `drawn`, its draws by site, and `guide`. A subclass writes also

        state_of(drawn)                     the state for draws (1, ...) of a guide
        follow_mode(state, level, changed)  the state whose capsules below a level follow those
                                            above as the mode says; `changed` is False where a
                                            capsule only moved with all below it
    """

    improves = "improve the posterior of this image by 50 steps of optimization"
    gain = "the objective"
    modes = ("posterior", "prior mean", "counterfactual")
    follow = (
        " The parts of a moved object follow in one of three modes: posterior (as inferred from "
        "the image), prior mean (where the object predicts them), counterfactual (predicted, plus "
        "the noise of this image)."
    )

    def __init__(self, model: PaintedParts, guide: Guide) -> None:
        super().__init__(model, guide)
        self.pair = model, guide
        sizes = [level.size for level in model.levels]
        ends = accumulate(sizes if len(sizes) > 1 else [1, *sizes], initial=0)  # or one object
        self.levels = [slice(start, end) for start, end in pairwise(ends)]

    def infer_state(self) -> State:
        return self._drawn(self.pair[1])

    @torch.no_grad()
    def _drawn(self, guide: Guide) -> State:
        drawn = infer(guide, self.image)
        return {**self.state_of(drawn), "drawn": drawn, "guide": guide}

    def improve(self, steps: int) -> tuple[State, float]:
        start = self.pair[0], self.parse["guide"], self.image
        guide = fit_guide("free_form", *start, steps=steps, distribution="delta")
        return self._drawn(guide), (guide.refinement.end - guide.refinement.start).item()

    def counterfactual(self, do: Sites) -> State:
        """Return the counterfactual state: sites (1, ...) get other values, and noise is kept.

        See `capsule_zoo.inference.intervene`.
        """
        pair = self.model, KnownLatents(self.model, self.parse["drawn"])
        result = intervene(*pair, self.image, do)
        return self.state_of({name: value[0] for name, value in result.latents.items()})

    def place_capsules(self) -> Capsules:
        """Return the marginal presences (capsules,) and the poses (capsules, 6) of the capsules."""
        presence, parents = self.state["presence"].clone(), self.state["parent"]
        for level in self.levels[1:]:
            parent = parents[level]
            presence[level] *= torch.where(parent >= 0, presence[parent.clamp(min=0)], 1.0)
        return Capsules(presence, self.state["pose"])

    def parts(self) -> Capsules:
        """Return presences (1, P) and poses (1, P, 6) of the parts in the image."""
        placed, parts = self.place_capsules(), self.levels[-1]
        return Capsules(placed.presence[None, parts], placed.pose[None, parts])

    def root(self, capsule: int) -> int:
        """Return the top-level capsule that a capsule belongs to."""
        while (parent := int(self.state["parent"][capsule])) >= 0:
            capsule = parent
        return capsule

    def move(self, handle: int, pose: Tensor) -> None:
        """Move a capsule, with all capsules below it, to a pose (6,) in the image."""
        state = move_capsule(self.state, handle, pose, self.levels)
        self.state = self.follow_mode(state, self.level_of(handle), changed=False)

    def level_of(self, handle: int) -> int:
        return next(i for i, level in enumerate(self.levels) if handle < level.stop)

    def controls(self, handle: int) -> dict[str, Control]:
        values = self._components(handle)
        low, high = (MIN_SIZE, 1.5) if values["size"] > 0 else (-1.5, -MIN_SIZE)
        return {
            "presence": self.control("presence", handle, 0, 1),
            "x": Control(values["x"], -1.5, 1.5),
            "y": Control(values["y"], -1.5, 1.5),
            "angle": Control(math.degrees(values["angle"]), -180, 180, 1, " (degrees)"),
            "size": Control(values["size"], low, high),
            "stretch": Control(values["stretch"], 0.2, 5),
            "shear": Control(values["shear"], -2, 2),
        }

    def _components(self, handle: int) -> dict[str, float]:
        numbers = poses.to_components(self.state["pose"][handle]).tolist()
        return dict(zip(NUMBERS, numbers, strict=True))

    def _set(self, handle: int, name: str, value: float, control: Control) -> None:
        if name in NUMBERS:
            value = math.radians(value) if name == "angle" else value
            row = list({**self._components(handle), name: value}.values())
            self.move(handle, poses.from_components(self.state["pose"].new_tensor(row)))
            return
        super()._set(handle, name, value, control)
        self.state = self.follow_mode(self.state, self.level_of(handle))

    @torch.no_grad()
    def grab(self, position: Position, part: bool) -> int | None:
        if (pixel := self.pixel_at(position)) is None:
            return None
        gray = seen_of_parts(self.model, self.parts())[:, 0, *pixel]
        handle = self.levels[-1].start + int(gray.argmax())
        return None if gray.max() < MIN_GRAY else handle if part else self.root(handle)

    @torch.no_grad()
    def drag(self, handle: int, start: Position, end: Position) -> None:
        pose = self.state["pose"][handle].clone()
        pose[2::3] += pose.new_tensor(end) - pose.new_tensor(start)
        self.move(handle, pose)

    @torch.no_grad()
    def mean_image(self) -> Tensor:
        return self.model.render(self.parts())

    @torch.no_grad()
    def color_parts(self) -> Tensor:
        return colored_parts(self.model, self.parts())[0]

    def outline(self, handle: int) -> Tensor:
        pose = self.state["pose"][handle].view(2, 3)
        return 0.93 * SQUARE.to(pose) @ pose[:, :2].mT + pose[:, 2]  # inside one of full width

    @torch.no_grad()
    def log_likelihood(self) -> float:
        return (
            self.model.image_distribution(self.parts()).log_prob(self.image[:, None]).sum().item()
        )


def move_capsule(state: State, capsule: int, pose: Tensor, levels: list[slice]) -> State:
    """Return the state with a capsule, and all below it, moved to a pose (6,) in the image."""
    motion = poses.compose(pose, poses.inverse(state["pose"][capsule]))
    moves = torch.zeros(len(state["pose"]), dtype=torch.bool)
    moves[capsule] = True
    for level in levels[1:]:
        parent = state["parent"][level]
        moves[level] |= (parent >= 0) & moves[parent.clamp(min=0)]
    return {
        **state,
        "pose": torch.where(moves[:, None], poses.compose(motion, state["pose"]), state["pose"]),
    }


class PartWholeView(PaintedPartsView):
    """The view of a parse by part-whole capsules."""

    help = (
        "Drag on the model's picture to move an object with its parts, on the picture of the parts "
        "to move one part; the sliders set the selected object or part. Drop a picture file on the "
        "image."
    )
    model: PartWholeCapsules

    def state_of(self, drawn: Sites) -> State:
        names = [level.name for level in self.model.levels]
        sites = [Capsules(drawn[f"{name}_presence"], drawn[f"{name}_pose"]) for name in names]
        parents = [torch.full((self.levels[0].stop,), -1)]
        for i, (above, below) in enumerate(pairwise(sites)):
            choice = self.model.responsibilities(above, below, level=i)[0].argmax(-1)
            parents.append(torch.where(choice > 0, self.levels[i].start + choice - 1, -1))
        presence, pose = (torch.cat([capsules[i][0] for capsules in sites]) for i in range(2))
        return {"presence": presence, "pose": pose, "parent": torch.cat(parents)}

    def handles(self) -> list[str]:
        present, children = self.place_capsules().presence > 0.5, self._children()
        names, levels = [], self.model.levels
        for level, capsules in enumerate(self.levels):
            for i, capsule in enumerate(range(capsules.start, capsules.stop), 1):
                number = children[capsule]
                note = f" ({levels[level + 1].name}s: {number})" if number else ""
                names.append(f"{levels[level].name} {i}{note if present[capsule] else ' (absent)'}")
        return names

    def _children(self) -> Tensor:
        """Return the number of present children of each capsule, (capsules,)."""
        present, parent = self.place_capsules().presence > 0.5, self.state["parent"]
        return torch.bincount(parent[present & (parent >= 0)], minlength=len(present))

    def first_handle(self) -> int:
        """Return the capsule that has the most present children."""
        return int(self._children().argmax())

    @torch.no_grad()
    def set_mode(self, mode: str) -> None:
        """Set the mode of the capsules below the top level; the top level stays."""
        super().set_mode(mode)
        if mode != "posterior":
            self.state = self.follow_mode(self.state, level=0)
            return
        top, state = self.levels[0].stop, self.parse
        for capsule in range(top):
            state = move_capsule(state, capsule, self.state["pose"][capsule], self.levels)
        presence = torch.cat([self.state["presence"][:top], state["presence"][top:]])
        self.state = {**state, "presence": presence}

    def follow_mode(self, state: State, level: int, changed: bool = True) -> State:
        self.state = state
        if self.mode == "prior mean" and changed:
            for i in range(level, len(self.model.selections)):
                self.state = self._predict_parts(i)
        elif self.mode == "counterfactual":
            placed, do = self.place_capsules(), {}
            for above, capsules in zip(self.model.levels[: level + 1], self.levels, strict=False):
                do[f"{above.name}_presence"] = placed.presence[None, capsules].round()
                do[f"{above.name}_pose"] = placed.pose[None, capsules]
            return self.counterfactual(do)
        return self.state

    def _predict_parts(self, level: int) -> State:
        """Return the state with the likeliest capsules below a level.

        Every child takes its likeliest parent among the present capsules, the pose that this parent
        votes for, and the probability of being present as its presence.
        """
        above, below = self.levels[level], self.levels[level + 1]
        parents = Capsules(*(values[None, above] for values in self.place_capsules()))
        selection = self.model.selections[level]
        children = selection(parents, False)
        choice = children.log_weights[0].argmax(-1)  # 0 is the dummy
        parent = above.start + (choice - 1) // selection.types
        child, state = torch.arange(len(choice)), dict(self.state)
        values = {
            "presence": children.presence_logits[child, choice].sigmoid(),
            "pose": children.vote[0][child, choice],
            "parent": torch.where(choice > 0, parent, -1),
        }
        for name, value in values.items():
            state[name] = state[name].clone()
            state[name][below] = value
        return state
