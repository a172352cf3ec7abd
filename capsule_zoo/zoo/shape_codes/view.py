"""The explorer's view of shape codes: the kind, the shape code and the pose of an object.

Reading an image infers the object and its parts. The parts keep their distance from the votes of
the object while the code bends it and its pose moves it ("posterior"). In the mode "prior mean"
parts are where the object votes for them, with its probabilities of presence. In the mode
"counterfactual" the parts keep their noise: the sliders set the object, and
`capsule_zoo.inference.intervene` computes the parts that this image would then have had. Another
kind drops all inferred values except for the noise, because its parts have other positions.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from capsule_zoo.explore.painted_parts import PaintedPartsView
from capsule_zoo.explore.view import Control
from capsule_zoo.inference.evaluation.ancestral import Sites
from capsule_zoo.models import Capsules, ShapeCodes, poses

OBJECT = 0  # the handle of the object; the parts come after it


@dataclass(frozen=True)
class Shaped:
    """An object and its parts.

    Attributes:
        kind: the kind of the object.
        pose: its pose in the image, (6,).
        code: its shape code, (d,).
        presence: presences of the parts, (P,).
        away: poses of the parts in the object's frame, less the votes of the object, (P, 6).
    """

    kind: int
    pose: Tensor
    code: Tensor
    presence: Tensor
    away: Tensor


class ShapeCodesView(PaintedPartsView[Shaped]):
    """The view of a parse by shape codes; handles are the object and its parts."""

    help = (
        "Slide a number of the code to bend the object, or choose another kind. Drag on the "
        "model's picture to move the object with its parts, on the picture of the parts to move "
        "one part. Drop a picture file on the image."
    )
    model: ShapeCodes

    def handles(self) -> list[str]:
        there = self.state.presence > 0.5
        parts = (f"part {i}{'' if on else ' (absent)'}" for i, on in enumerate(there.tolist(), 1))
        return [f"object (kind {self.state.kind})", *parts]

    def controls(self, handle: int) -> dict[str, Control]:
        if handle != OBJECT:
            presence = Control(self.state.presence[handle - 1].item(), 0, 1)
            return {"presence": presence, **self.pose_controls(handle)}
        kind = Control(float(self.state.kind), 0, self.model.kinds - 1, 1)
        code = {f"code[{i}]": Control(v, -3, 3) for i, v in enumerate(self.state.code.tolist())}
        return {"kind": kind, **code, **self.pose_controls(handle)}

    @torch.no_grad()
    def _set(self, handle: int, name: str, value: float) -> None:
        """Set the kind, a number of the code, a presence, or a number of a pose."""
        if name == "presence":
            presence = self.state.presence.clone()
            presence[handle - 1] = value
            self.state = replace(self.state, presence=presence)
        elif name == "kind":
            self.state = self._followed(replace(self.state, kind=round(value)), forget=True)
        elif name.startswith("code["):
            code = self.state.code.clone()
            code[int(name[5:-1])] = value
            self.state = self._followed(replace(self.state, code=code))
        else:
            self.change_pose(handle, name, value)

    @torch.no_grad()
    def set_mode(self, mode: str) -> None:
        """Show the parts in one of the modes; the object stays."""
        super().set_mode(mode)
        if mode == "posterior" and self.state.kind == self.parse.kind:
            self.state = replace(self.state, presence=self.parse.presence, away=self.parse.away)
        else:
            self.state = self._followed(self.state, forget=True)

    def handle_at(self, index: int, part: bool) -> int:
        return 1 + index if part else OBJECT

    @torch.no_grad()
    def place_of(self, handle: int) -> Tensor:
        return self.state.pose if handle == OBJECT else self.parts().pose[0, handle - 1]

    @torch.no_grad()
    def move(self, handle: int, pose: Tensor) -> None:
        if handle == OBJECT:
            self.state = self._followed(replace(self.state, pose=pose))
            return
        part, away = handle - 1, self.state.away.clone()
        away[part] = poses.compose(poses.inverse(self.state.pose), pose) - self._votes()[part]
        self.state = replace(self.state, away=away)

    @torch.no_grad()
    def parts(self) -> Capsules:
        placed = poses.compose(self.state.pose, self._votes() + self.state.away)
        return Capsules(self.state.presence[None], placed[None])

    def state_of(self, drawn: Sites) -> Shaped:
        kind = int(drawn["object_kind"])
        pose, code = drawn["object_pose"][0, 0], drawn["object_code"][0, 0]
        found = Shaped(kind, pose, code, drawn["part_presence"][0], torch.zeros(()))
        inside = poses.compose(poses.inverse(pose), drawn["part_pose"][0])
        return replace(found, away=inside - self._votes(found))

    def _votes(self, state: Shaped | None = None) -> Tensor:
        """Return the poses (P, 6) that an object votes for, in its own frame."""
        state = self.state if state is None else state
        shapes = self.model.shapes
        return shapes.place[state.kind] + shapes.pose_codes[state.kind] @ state.code

    def _followed(self, state: Shaped, forget: bool = False) -> Shaped:
        """Return the state whose parts follow its object as the mode says.

        Args:
            forget: predict the parts in the mode "posterior", because their object is another one.
        """
        if self.mode == "counterfactual":
            kind = torch.tensor([state.kind], device=state.code.device)
            pose, code = state.pose[None, None], state.code[None, None]
            return self.counterfactual(
                {"object_kind": kind, "object_pose": pose, "object_code": code}
            )
        return self._expected(state) if forget or self.mode == "prior mean" else state

    def _expected(self, state: Shaped) -> Shaped:
        """Return the same object with the parts that it predicts."""
        kind = torch.tensor([[state.kind]], device=state.code.device)
        _, logits = self.model.shapes.votes(kind, state.pose[None, None], state.code[None, None])
        return replace(state, presence=logits[0, 0].sigmoid(), away=torch.zeros_like(state.away))
