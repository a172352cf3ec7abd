"""The explorer's view of shape codes: the kind, the shape code and the pose of an object.

For an image the view infers the object and its parts. The parts keep their distance from the votes
of the object while the code bends it and its pose moves it ("posterior"). In the mode "prior mean"
parts are where the object votes for them, with its probabilities of presence. In the mode
"counterfactual" they keep their noise, see `capsule_zoo.inference.intervene`. Another kind drops
all inferred values except for the noise, because its parts have other positions.
"""

import torch
from torch import Tensor

from capsule_zoo.explore.view import Control, State
from capsule_zoo.inference.evaluation.ancestral import Sites
from capsule_zoo.models import ShapeCodes, poses
from capsule_zoo.zoo.part_whole.view import PaintedPartsView

OBJECT = 0  # the handle of the object; the parts come after it


class ShapeCodesView(PaintedPartsView):
    """The view of a parse by shape codes; its state also has `kind` (1,) and `code` (d,)."""

    help = (
        "Slide a number of the code to bend the object, or choose another kind. Drag on the "
        "model's picture to move the object with its parts, on the picture of the parts to move "
        "one part. Drop a picture file on the image."
    )
    model: ShapeCodes

    def handles(self) -> list[str]:
        present = self.state["presence"][1:] > 0.5
        parts = (f"part {i}{'' if on else ' (absent)'}" for i, on in enumerate(present.tolist(), 1))
        return [f"object (kind {int(self.state['kind'])})", *parts]

    def controls(self, handle: int) -> dict[str, Control]:
        controls = super().controls(handle)
        if handle != OBJECT:
            return controls
        del controls["presence"]  # the object is always present
        codes = range(len(self.state["code"]))
        return {
            "kind": self.control("kind", 0, 0, self.model.kinds - 1, step=1),
            **{f"code[{i}]": self.control("code", i, -3, 3) for i in codes},
            **controls,
        }

    def _set(self, handle: int, name: str, value: float, control: Control) -> None:
        before = self.state
        super()._set(handle, name, value, control)
        if self.mode == "posterior" and control.site == "code":
            self.state = self._with_parts(self.state, before)
        elif self.mode == "posterior" and control.site == "kind":
            self.state = self._predict_parts(self.state)

    @torch.no_grad()
    def set_mode(self, mode: str) -> None:
        """Set the mode of the parts; the object stays."""
        super().set_mode(mode)
        if mode != "posterior":
            self.state = self.follow_mode(self.state, level=0)
        elif self.state["kind"] == self.parse["kind"]:
            state = {**self.state, "presence": self.parse["presence"]}
            self.state = self._with_parts(state, self.parse)
        else:  # the inferred values belong to another kind
            self.state = self._predict_parts(self.state)

    def state_of(self, drawn: Sites) -> State:
        presence = drawn["part_presence"][0]
        return {
            "kind": drawn["object_kind"].reshape(1),
            "code": drawn["object_code"][0, 0],
            "presence": torch.cat([presence.new_ones(1), presence]),
            "pose": torch.cat([drawn["object_pose"][0], drawn["part_pose"][0]]),
            "parent": torch.tensor([-1, *[OBJECT] * len(presence)]),
        }

    def follow_mode(self, state: State, level: int, changed: bool = True) -> State:
        if level > 0 or self.mode == "posterior":
            return state
        if self.mode == "prior mean":
            return self._predict_parts(state) if changed else state
        pose, code = state["pose"][None, :1], state["code"][None, None]
        return self.counterfactual(
            {"object_kind": state["kind"], "object_pose": pose, "object_code": code}
        )

    def _votes(self, state: State) -> Tensor:
        """Return the poses (P, 6) that an object votes for, in its own frame."""
        shapes, kind = self.model.shapes, int(state["kind"])
        return shapes.place[kind] + shapes.pose_codes[kind] @ state["code"]

    def _with_parts(self, state: State, source: State) -> State:
        """Return a state with an object, and parts as far from its votes as in another state."""
        inside = poses.compose(poses.inverse(source["pose"][0]), source["pose"][1:])
        pose = self._votes(state) + inside - self._votes(source)
        return self._with_poses(state, pose)

    def _with_poses(self, state: State, inside: Tensor) -> State:
        """Return a state with an object, and parts with poses (P, 6) in its frame."""
        top = state["pose"][:1]
        return {**state, "pose": torch.cat([top, poses.compose(top, inside)])}

    def _predict_parts(self, state: State) -> State:
        """Return a state with an object, and the parts that it predicts."""
        pose, code = state["pose"][None, :1], state["code"][None, None]
        _, logits = self.model.shapes.votes(state["kind"][None], pose, code)
        presence = torch.cat([state["presence"][:1], logits[0, 0].sigmoid()])
        return {**self._with_poses(state, self._votes(state)), "presence": presence}
