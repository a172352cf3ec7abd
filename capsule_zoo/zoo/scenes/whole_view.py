"""The explorer's view of a whole picture: click to add an object or to take one away.

A handle is a proposal for an object; see `guides.scenes.whole_pictures`. The state holds the
proposals and which of them are present. The number of objects has a posterior: over the presences
of all proposals but those that were taken away by hand.
"""

import torch
from torch import Tensor

from capsule_zoo.explore.view import SQUARE, Control, Position, State, View
from capsule_zoo.guides import Peeling
from capsule_zoo.guides.scenes.clusters import best_of, distribution_of_number
from capsule_zoo.guides.scenes.patches import Patches
from capsule_zoo.guides.scenes.whole_pictures import PictureReader
from capsule_zoo.inference.whole_pictures import SAME, outline
from capsule_zoo.models import Scenes
from capsule_zoo.zoo.scenes.figures import outlined_objects

PATCHES, PRESENCE, TAKEN = "patches", "presence", "taken"
NUMBERS = 5  # likeliest numbers of objects that are listed


class WholePictureView(View):
    """The view of a whole picture; see the module's docstring."""

    help = (
        "Click in the model's picture or in the picture of the objects: on an object to take it "
        "away, elsewhere to add one, which the guide infers there. Drop a picture file on the "
        "image."
    )
    improves = "infer every object again, given all others"
    gain = "the log weight of the likeliest objects"
    names = ("image", "model's picture", "objects")
    modes = ("click adds or takes away", "click selects, drag moves")
    follow = " The buttons say what a click does."

    def __init__(self, model: Scenes, guide: Peeling) -> None:
        super().__init__(model, guide)
        self.leveling = model.leveling

    @property
    def file_shape(self) -> None:
        """The shape that pictures from files are brought to: none, they keep their size."""
        return None

    def read(self, image: Tensor) -> None:
        """Infer the objects of a picture (1, C, H, W) of any size; see `View.read`."""
        if len(image) > 1:
            raise ValueError(f"a view reads one image, not {len(image)}; give one picture")
        leveled = image[0] if self.leveling is None else self.leveling(image[0])
        with torch.no_grad():
            self.reader = PictureReader(self.guide, leveled)
        self.reader.model.space.check(leveled[None])
        channels, height, width = leveled.shape
        self.image, self.image_shape = leveled[None], (channels, height, width)
        self.read_state = self.infer_state()
        self.reset()

    @torch.no_grad()
    def infer_state(self) -> State:
        patches, clusters, _ = self.reader.read()
        return self._state_of(patches, best_of(clusters))

    @torch.no_grad()
    def improve(self, steps: int) -> tuple[State, float]:
        remaining = (self.state[TAKEN] == 0).nonzero()[:, 0]
        patches, presence = self.state[PATCHES][remaining], self.state[PRESENCE][remaining]
        if not presence.any():
            return self.state, 0.0
        new = self.reader.propose_again(patches, presence)
        start = torch.cat([presence, presence.new_zeros(len(new))])
        patches, clusters = self.reader.select(patches.join(new), start)
        better = self._state_of(patches, best_of(clusters))
        gain = self._log_weight(better) - self._log_weight(self.state)
        return (better, gain) if gain > 0 else (self.state, 0.0)

    def _state_of(self, patches: Patches, presence: Tensor) -> State:
        return {PATCHES: patches, PRESENCE: presence, TAKEN: torch.zeros_like(presence)}

    def _log_weight(self, state: State) -> float:
        """Return the log weight of the present objects, in nats, up to a constant."""
        canvas = self.reader.picture.paint(state[PATCHES], state[PRESENCE])
        error = (self.image[0] - canvas).square().nansum()
        score = -0.5 * self.reader.power * error / self.model.sigma_image**2
        return float(score + state[PRESENCE] @ state[PATCHES].log_ratio)

    def handles(self) -> list[str]:
        on = self.state[PRESENCE].tolist()
        names = [f"object {i}{'' if present else ' (absent)'}" for i, present in enumerate(on, 1)]
        return names or ["no object"]

    def controls(self, handle: int) -> dict[str, Control]:
        if not len(self.state[PRESENCE]):
            return {}
        return {"presence": self.control(PRESENCE, handle, 0, 1, step=1)}

    @torch.no_grad()
    def grab(self, position: Position, part: bool) -> int | None:
        """Return the object at a position; in the first mode take it away, or add one there."""
        if (pixel := self.pixel_at(position)) is None:
            return None
        owner = int(self._numbers()[pixel])
        present = self.state[PRESENCE].nonzero()[:, 0]
        handle = int(present[owner - 1]) if owner else None
        if self.mode == self.modes[0]:
            if handle is None:
                handle = self._add(torch.tensor([pixel]))
            else:
                self._take_away(handle)
        return handle

    def _add(self, place: Tensor) -> int:
        """Propose an object about a pixel, given the present ones, and return its handle."""
        patches, presence = self.state[PATCHES], self.state[PRESENCE]
        new = self.reader.propose(place, self.reader.picture.paint(patches, presence))
        more = {PRESENCE: presence.new_ones(1), TAKEN: presence.new_zeros(1)}
        joined = {name: torch.cat([self.state[name], value]) for name, value in more.items()}
        self.state = {PATCHES: patches.join(new), **joined}
        return len(presence)

    def _take_away(self, handle: int) -> None:
        """Take an object away by hand, with all other proposals for it."""
        centers, reach = self.state[PATCHES].pose[:, 1:3], SAME * self.model.size
        near = (centers - centers[handle]).square().sum(1) <= reach**2
        presence = self.state[PRESENCE].masked_fill(near, 0.0)
        self.state = {
            **self.state,
            PRESENCE: presence,
            TAKEN: self.state[TAKEN].masked_fill(near, 1.0),
        }

    def change(self, handle: int, name: str, value: float) -> None:
        super().change(handle, name, value)
        if self.state[PRESENCE][handle]:
            back = torch.tensor([handle])
            self.state = {**self.state, TAKEN: self.state[TAKEN].index_fill(0, back, 0.0)}
        else:
            self._take_away(handle)

    def drag(self, handle: int, start: Position, end: Position) -> None:
        """Move an object by whole pixels, in the second mode."""
        if self.mode == self.modes[0] or not len(self.state[PRESENCE]):
            return
        (row, column), (last_row, last_column) = map(self.row_and_column, (start, end))
        moved = self.state[PATCHES].move(handle, last_column - column, last_row - row)
        self.state = {**self.state, PATCHES: moved}

    def mean_image(self) -> Tensor:
        return self.reader.picture.paint(self.state[PATCHES], self.state[PRESENCE])[None]

    def color_parts(self) -> Tensor:
        return outlined_objects(self.image[0], self._numbers()).movedim(0, -1)

    def _numbers(self) -> Tensor:
        """Return the present object that each pixel shows, from 1; 0 for the ground, (H, W)."""
        present = self.state[PATCHES][self.state[PRESENCE].nonzero()[:, 0]]
        size = self.image_shape[1:]
        return outline(present, torch.Size(size), size)[0]

    def outline(self, handle: int) -> Tensor | None:
        if not len(self.state[PRESENCE]) or not self.state[PRESENCE][handle]:
            return None
        pose = self.state[PATCHES].pose[handle]
        extent = pose.new_tensor(self.image_shape[:0:-1])
        half = self.model.size * pose[0].exp() / extent
        return SQUARE.to(pose) * half + 2 * (pose[1:3] + 0.5) / extent - 1

    def log_likelihood(self) -> float:
        return self.reader.model.log_likelihood(self.image, self.mean_image()[:, None]).item()

    @torch.no_grad()
    def count_probabilities(self) -> Tensor:
        """Return the posterior of the number of objects, (K + 1,)."""
        remaining = self.state[TAKEN] == 0
        clusters = self.reader.clusters(self.state[PATCHES], self.state[PRESENCE])
        return distribution_of_number([cluster.among(remaining) for cluster in clusters])

    def summary(self) -> str:
        likeliest = self.count_probabilities().sort(descending=True)
        pairs = zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
        texts = [f"{n} ({p:.0%})" for p, n in pairs if p >= 0.005][:NUMBERS]
        present = int(self.state[PRESENCE].sum())
        return f"{present} objects are present; posterior of their number: {', '.join(texts)}"
