"""The explorer's view of part-whole capsules, in which children move with their parents.

A parse is stored as a tree. Every capsule has its likeliest parent, by the model's
responsibilities, and its pose in the parent's frame. A parent that moves therefore moves its
children, and the children of an absent parent are absent. In the mode "posterior", children have
the values that the guide inferred from the image. In the mode "prior mean", they have the likeliest
values given the capsules above them: parent, presence and vote. In the mode "counterfactual" they
keep their noise, and `capsule_zoo.inference.intervene` computes their values; a presence is then 0
or 1.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from capsule_zoo.explore.painted_parts import PaintedPartsView
from capsule_zoo.explore.view import Control
from capsule_zoo.inference.evaluation.ancestral import Sites
from capsule_zoo.models import Capsules, PartWholeCapsules, poses


@dataclass(frozen=True)
class Tree:
    """The capsules of one image, all levels one after the other, from the top down.

    Attributes:
        levels: the slice of each level's capsules.
        presence: (capsules,), in [0, 1], given that the parent is present.
        pose: (capsules, 6), in the parent's frame, or in the image's frame without a parent.
        parent: (capsules,), index of the parent, or -1 for none.
    """

    levels: tuple[slice, ...]
    presence: Tensor
    pose: Tensor
    parent: Tensor

    def placed(self) -> Capsules:
        """Return presences (capsules,) and poses (capsules, 6) in the image."""
        presence, pose = self.presence.clone(), self.pose.clone()
        for level in self.levels[1:]:
            parent = self.parent[level]
            owned, above = parent >= 0, parent.clamp(min=0)
            presence[level] *= torch.where(owned, presence[above], 1.0)
            moved = poses.compose(pose[above], pose[level])
            pose[level] = torch.where(owned[:, None], moved, pose[level])
        return Capsules(presence, pose)

    def moved(self, capsule: int, pose: Tensor) -> "Tree":
        """Return the tree with one capsule and all below it moved to a pose (6,) in the image."""
        own, placed = self.pose.clone(), self.placed().pose
        own[capsule] = _in_frames(placed, self.parent[capsule, None], pose[None])[0]
        return replace(self, pose=own)

    def with_presence(self, capsule: int, value: float) -> "Tree":
        """Return the tree with another presence of one capsule."""
        presence = self.presence.clone()
        presence[capsule] = value
        return replace(self, presence=presence)

    def with_levels_of(self, other: "Tree", first: int) -> "Tree":
        """Return the tree with the levels from `first` on taken from another tree."""
        begin = self.levels[first].start
        tensors = ("presence", "pose", "parent")
        joined: dict[str, Any] = {
            name: torch.cat([getattr(self, name)[:begin], getattr(other, name)[begin:]])
            for name in tensors
        }
        return replace(self, **joined)

    def root(self, capsule: int) -> int:
        """Return the highest capsule that this one belongs to."""
        while (parent := int(self.parent[capsule])) >= 0:
            capsule = parent
        return capsule


def parse_tree(model: PartWholeCapsules, drawn: Sites) -> Tree:
    """Return the tree of one image's draws (1, ...) from a guide to the discrete model."""
    ends = list(accumulate((level.size for level in model.levels), initial=0))
    levels = tuple(slice(begin, end) for begin, end in pairwise(ends))
    capsules = [
        Capsules(drawn[f"{level.name}_presence"], drawn[f"{level.name}_pose"])
        for level in model.levels
    ]
    parents = [torch.full((model.levels[0].size,), -1)]
    for i, (above, below) in enumerate(pairwise(capsules)):
        choice = model.responsibilities(above, below, level=i)[0].argmax(-1)  # 0 is the dummy
        parents.append(torch.where(choice > 0, levels[i].start + choice - 1, -1))
    presence, pose = (torch.cat([c[i][0] for c in capsules]) for i in range(2))
    parent = torch.cat(parents)
    return Tree(levels, presence, _in_frames(pose, parent, pose), parent)


def expected(model: PartWholeCapsules, tree: Tree, level: int = 0) -> Tree:
    """Return the same tree down to `level`, with the likeliest capsules below it.

    Every child takes its likeliest parent among the present capsules, the pose that this parent
    votes for, and the probability of being present as its presence.
    """
    for i in range(level, len(model.selections)):
        above, below = tree.levels[i], tree.levels[i + 1]
        placed = tree.placed()
        law = model.selections[i](Capsules(*(each[None, above] for each in placed)), False)
        choice = law.log_weights[0].argmax(-1)
        child = torch.arange(len(choice))
        parent = torch.where(choice > 0, above.start + choice - 1, -1)
        presence, pose, parents = (t.clone() for t in (tree.presence, tree.pose, tree.parent))
        presence[below] = law.presence_logits[child, choice].sigmoid()
        pose[below] = _in_frames(placed.pose, parent, law.vote[0][child, choice])
        parents[below] = parent
        tree = replace(tree, presence=presence, pose=pose, parent=parents)
    return tree


def _in_frames(placed: Tensor, parent: Tensor, pose: Tensor) -> Tensor:
    """Convert poses (n, 6) in the image to the frames of their parents (n,), if any."""
    frames = placed[parent.clamp(min=0)]
    return torch.where((parent >= 0)[:, None], poses.compose(poses.inverse(frames), pose), pose)


class PartWholeView(PaintedPartsView[Tree]):
    """The view of a parse by part-whole capsules; every capsule is a handle."""

    help = (
        "Drag on the model's picture to move an object with its parts, on the picture of the parts "
        "to move one part; the sliders set the selected object or part. Drop a picture file on the "
        "image."
    )
    model: PartWholeCapsules

    def state_of(self, drawn: Sites) -> Tree:
        return parse_tree(self.model, drawn)

    def handles(self) -> list[str]:
        present, children = self.state.placed().presence > 0.5, self._children()
        names, levels = [], self.model.levels
        for level, place in enumerate(self.state.levels):
            for i, capsule in enumerate(range(place.start, place.stop), start=1):
                number = children[capsule]
                note = f" ({levels[level + 1].name}s: {number})" if number else ""
                names.append(f"{levels[level].name} {i}{note if present[capsule] else ' (absent)'}")
        return names

    def first_handle(self) -> int:
        """Return the capsule that has the most present children."""
        return int(self._children().argmax())

    def controls(self, handle: int) -> dict[str, Control]:
        presence = Control(self.state.presence[handle].item(), 0, 1)
        return {"presence": presence, **self.pose_controls(handle)}

    @torch.no_grad()
    def _set(self, handle: int, name: str, value: float) -> None:
        """Set the presence or a component of the pose in the image, with the angle in degrees."""
        if name != "presence":
            self.change_pose(handle, name, value)
            return
        self.state = self._followed(self.state.with_presence(handle, value), self._level(handle))

    @torch.no_grad()
    def set_mode(self, mode: str) -> None:
        """Show the capsules below the top level in one of the modes; the top level stays."""
        super().set_mode(mode)
        if mode == "posterior":
            self.state = self.state.with_levels_of(self.parse, first=1)
        else:
            self.state = self._followed(self.state, level=0)

    def handle_at(self, index: int, part: bool) -> int:
        handle = self.state.levels[-1].start + index
        return handle if part else self.state.root(handle)

    def place_of(self, handle: int) -> Tensor:
        return self.state.placed().pose[handle]

    def move(self, handle: int, pose: Tensor) -> None:
        moved = self.state.moved(handle, pose)
        keeps = self.mode == "prior mean"  # the likeliest children move with their parents
        self.state = moved if keeps else self._followed(moved, self._level(handle))

    def parts(self) -> Capsules:
        placed, parts = self.state.placed(), self.state.levels[-1]
        return Capsules(placed.presence[None, parts], placed.pose[None, parts])

    def _level(self, handle: int) -> int:
        return next(i for i, s in enumerate(self.state.levels) if handle < s.stop)

    def _followed(self, tree: Tree, level: int) -> Tree:
        """Return the tree whose capsules below `level` follow those above as the mode says."""
        if self.mode == "prior mean":
            return expected(self.model, tree, level)
        if self.mode == "posterior":
            return tree
        placed, do = tree.placed(), {}
        for above, place in list(zip(self.model.levels, tree.levels, strict=True))[: level + 1]:
            do[f"{above.name}_presence"] = placed.presence[None, place].round()
            do[f"{above.name}_pose"] = placed.pose[None, place]
        return self.counterfactual(do)

    def _children(self) -> Tensor:
        """Return the number of present children of each capsule, (capsules,)."""
        present, parent = self.state.placed().presence > 0.5, self.state.parent
        return torch.bincount(parent[present & (parent >= 0)], minlength=len(present))
