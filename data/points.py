"""Scenes of points in the plane: corners of a few objects under random similarities.

Every object of a list of templates is present with probability 1/2; at least one is. Noise is added
to the corners of its template, whose sides are 2 long. The template is then scaled to mean square
distance 1 from its center, and moved by a similarity y ~ Normal(0, I_4) with

    x = F y,    F = [1 0 p_x p_y; 0 1 p_y -p_x]    # for a corner p

The scene is shifted and scaled as a whole, so that its smallest coordinate is -1 and its largest 1.
Clutter, uniform in the square [-1, 1]^2, may be added to it, and the order of the points is random.

References:
    Kosiorek, Sabour, Teh & Hinton 2019 (arXiv 1906.06818), section 3.1.
    Nazabal, Tsagkas & Williams 2021 (arXiv 2103.06676).
"""

import math
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data.files import expand_home
from capsule_zoo.data.own_pictures import divide_at_random
from capsule_zoo.data.pictures import load_arrays
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.sources import Source

SQUARE = ((-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0))
TRIANGLE = ((-1.0, -1.0), (1.0, -1.0), (0.0, 1.0))
SHAPES: dict[str, tuple[tuple[float, float], ...]] = {
    "square": SQUARE,
    "triangle": TRIANGLE,
    "pentagon": ((-1.0, 0.0), (0.0, -1.0), (1.0, -0.5), (1.0, 0.5), (0.0, 1.0)),
    "corner": ((-1.0, -1.0), (0.0, -1.0), (1.0, -1.0), (1.0, 0.0), (1.0, 1.0)),
}
TEMPLATES = (SQUARE, TRIANGLE, SQUARE)
TRAINING, TESTING = 10_000, 2000  # numbers of scenes of the data set "constellations"
VALIDATION = 200  # number of training scenes that are held out for validation
Templates = Sequence[Sequence[Sequence[float]] | Tensor]


@dataclass(frozen=True, eq=False)
class Scenes:
    """A set of scenes of points, with the object and corner of every point.

    Attributes:
        points: (S, N, 2); NaN where a scene has fewer points than N.
        present: (S, N), False where there is no point.
        objects: number of each point's object, (S, N); -1 for clutter and for absent points.
        corners: number of each point's corner in its object, (S, N), or -1.
    """

    points: Tensor
    present: Tensor
    objects: Tensor
    corners: Tensor

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: slice | Tensor) -> "Scenes":
        return Scenes(
            self.points[index], self.present[index], self.objects[index], self.corners[index]
        )


def draw_scenes(
    number: int,
    sigma: float = 0.1,
    *,
    clutter: int = 0,
    templates: Templates = TEMPLATES,
    seed: int = 0,
) -> Scenes:
    """Draw scenes of points in double precision, always equal for equal arguments.

    Args:
        number: number of scenes.
        sigma: standard deviation of the noise on every corner, in the units of the templates.
        clutter: the largest number of clutter points; their number is uniform from 0 to this.
        templates: the corners of every object, each (corners, 2), centered on their mean.
        seed: not negative.

    Raises:
        ValueError: a number that is out of range, or a template with fewer than two points.
    """
    shapes = check_templates(templates)
    number, clutter = operator.index(number), operator.index(clutter)
    if number < 1 or clutter < 0:
        raise ValueError(
            f"number must be at least 1 and clutter at least 0, not {number} and {clutter}"
        )
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma must be a finite number and at least 0, not {sigma!r}")
    generator = seeded_generator(seed)
    objects = torch.repeat_interleave(
        torch.arange(len(shapes)), torch.tensor([len(shape) for shape in shapes])
    )
    corners = torch.cat([torch.arange(len(shape)) for shape in shapes])
    presence = _presences(number, len(shapes), generator)[:, objects]
    placed = _place_objects(number, shapes, sigma, generator)
    points = rescale_points(placed.masked_fill(~presence[..., None], _NAN))
    count = torch.randint(clutter + 1, (number, 1), generator=generator)
    noise = 2 * torch.rand(number, clutter, 2, generator=generator, dtype=torch.float64) - 1
    points = torch.cat([points, noise], 1)
    present = torch.cat([presence, torch.arange(clutter) < count], 1)
    stray = torch.full((clutter,), -1)
    order = torch.rand(present.shape, generator=generator).masked_fill(~present, 2).argsort(1)
    present = present.gather(1, order)
    return Scenes(
        points.gather(1, order[..., None].expand_as(points)).masked_fill(~present[..., None], _NAN),
        present,
        torch.cat([objects, stray])[order].masked_fill(~present, -1),
        torch.cat([corners, stray])[order].masked_fill(~present, -1),
    )


_NAN = float("nan")


def check_templates(templates: Templates) -> tuple[Tensor, ...]:
    """Return templates as centered float64 tensors (corners, 2).

    Raises:
        ValueError: no template, one with fewer than two different points, or one with NaN.
    """
    shapes = [torch.as_tensor(template, dtype=torch.float64) for template in templates]
    if not shapes:
        raise ValueError("templates is empty; give the corners of one object or more")
    return tuple(_center_template(index, shape) for index, shape in enumerate(shapes))


def _center_template(index: int, shape: Tensor) -> Tensor:
    if shape.dim() != 2 or shape.shape[1] != 2 or not torch.isfinite(shape).all():
        raise ValueError(
            f"template {index} must be finite numbers (corners, 2), not {tuple(shape.shape)}"
        )
    if len(shape) < 2 or not (shape - shape[0]).abs().max() > 0:
        raise ValueError(
            f"template {index} has fewer than two different points, so that its scale and its "
            "angle cannot be inferred; give two points or more"
        )
    return shape - shape.mean(0)


def _presences(number: int, objects: int, generator: torch.Generator) -> Tensor:
    """Draw presences (number, objects) with probability 1/2, given at least one present object."""
    codes = torch.randint(1, 2**objects, (number, 1), generator=generator)
    return (codes >> torch.arange(objects)) % 2 == 1


def _place_objects(
    number: int, shapes: Sequence[Tensor], sigma: float, generator: torch.Generator
) -> Tensor:
    """Draw the corners of all objects, (number, corners, 2), before the scene is rescaled."""
    placed = []
    for shape in shapes:
        noise = torch.randn(number, *shape.shape, generator=generator, dtype=torch.float64)
        radius = shape.square().sum(1).mean().sqrt()
        local = torch.view_as_complex((shape + sigma * noise) / radius)
        pose = torch.randn(number, 1, 4, generator=generator, dtype=torch.float64)
        place = torch.complex(pose[..., 0], pose[..., 1])
        rotation = torch.complex(pose[..., 2], -pose[..., 3])
        placed.append(torch.view_as_real(place + rotation * local))
    return torch.cat(placed, 1)


def rescale_points(points: Tensor) -> Tensor:
    """Shift and scale scenes (S, N, 2) to [-1, 1], both axes alike; NaN stays NaN."""
    absent = points.isnan()
    low = points.masked_fill(absent, math.inf).amin((1, 2), keepdim=True)
    high = points.masked_fill(absent, -math.inf).amax((1, 2), keepdim=True)
    return 2 * (points - low) / (high - low) - 1


def constellations() -> Source:
    """Return a data set of scenes with noise 0.1; the label is the number of objects less 1."""
    train, test = (
        draw_scenes(number, 0.1, seed=seed) for seed, number in enumerate((TRAINING, TESTING))
    )
    parts = [(scenes.points.float(), _labels(scenes)) for scenes in (train, test)]
    names = tuple(f"{count} objects" for count in range(1, len(TEMPLATES) + 1))
    return Source(parts[0], parts[1], names, validation=VALIDATION)


def constellations_of(path: Path) -> Source:
    """Read the user's scenes of points as a data set without labels.

    Every scene is shifted and scaled to the square [-1, 1]^2, as by `runs.objects.parse_file`. A
    fixed fifth of the scenes is for testing.

    Raises:
        MissingData, ValueError: see `read_scenes`; or the file holds a single scene.
    """
    points, _, templates = read_scenes(path)
    if templates is not None:
        warnings.warn(
            f"the templates in {path} are not read, because a model has its own; name their shapes "
            "by --set objects, or give the file to capsule_zoo.runs.objects.parse_file",
            stacklevel=2,
        )
    points = rescale_points(points.double()).float()
    return divide_at_random(path, (points, None), ())


def _labels(scenes: Scenes) -> Tensor:
    """Return the label of each scene: its number of objects, less 1."""
    objects = torch.arange(len(TEMPLATES))
    return (scenes.objects[:, None] == objects[:, None]).any(-1).sum(-1) - 1


def read_scenes(path: str | Path) -> tuple[Tensor, Tensor, tuple[Tensor, ...] | None]:
    """Read a user's scenes: points (S, N, 2), present (S, N), and templates if the file has any.

    The file is a NumPy archive (`numpy.savez`) of `points`, and optionally of `present` and of
    `templates` (objects, corners, 2), in which NaN pads the smaller templates. Without `present`
    every point is there that is not NaN.

    Raises:
        MissingData: there is no such file, or it is not such an archive.
        ValueError: its arrays do not fit.
    """
    path = expand_home(path)
    arrays = load_arrays(path)
    if "points" not in arrays:
        raise ValueError(
            f"{path} lacks points; it holds {', '.join(arrays) or 'none'}; write it by "
            "numpy.savez(path, points=...)"
        )
    points, present = check_points(arrays["points"], arrays.get("present"))
    if "templates" not in arrays:
        return points, present, None
    templates = torch.as_tensor(np.asarray(arrays["templates"], dtype=np.float64))
    if templates.dim() != 3:
        raise ValueError(
            f"templates must be (objects, corners, 2), padded by NaN, not {tuple(templates.shape)}"
        )
    return points, present, check_templates([t[~t.isnan().any(1)] for t in templates])


def check_points(points: Any, present: Any = None) -> tuple[Tensor, Tensor]:
    """Check points (S, N, 2) and their mask (S, N), and return both; absent points become NaN.

    Raises:
        ValueError: shapes that do not fit, values that are not finite where a point is present, or
            a scene with fewer than two different points.
    """
    points = torch.as_tensor(points)
    if not points.is_floating_point():
        points = points.double()
    if points.dim() != 3 or points.shape[-1] != 2 or not len(points):
        raise ValueError(
            f"points must be (S, N, 2), one scene or more in the plane, not {tuple(points.shape)}"
            + "; add the missing dimension with points[None]" * (points.shape[1:] == (2,))
        )
    points = mask_points(points, ~points.isnan().all(-1) if present is None else present)
    present = ~points.isnan().any(-1)
    absent = ~present[..., None]
    low, high = points.masked_fill(absent, math.inf), points.masked_fill(absent, -math.inf)
    if (degenerate := (present.sum(1) < 2) | (low.amin(1) == high.amax(1)).all(-1)).any():
        raise ValueError(
            f"scene {int(degenerate.nonzero()[0])} has fewer than two points, or all in one place, "
            "which say nothing of an object's scale and angle; leave such scenes out"
        )
    return points, present


def mask_points(points: Tensor, present: Any = None) -> Tensor:
    """Replace points (S, N, 2) by NaN where `present` (S, N) is 0; None keeps all points.

    Raises:
        ValueError: a mask of another shape, of other numbers than 0 and 1, or a point that is
            present but not finite.
    """
    points = torch.as_tensor(points)
    if present is None:
        return points
    present = torch.as_tensor(present, device=points.device)
    if points.dim() != 3 or present.shape != points.shape[:-1]:
        raise ValueError(
            f"present must be {tuple(points.shape[:-1])}, one number for each point of points "
            f"{tuple(points.shape)}, not {tuple(present.shape)}"
        )
    if not ((present == 0) | (present == 1)).all():
        raise ValueError("present must hold 0 and 1, or False and True, only")
    if not points[present.bool()].isfinite().all():
        raise ValueError(
            "points holds NaN or infinite coordinates of points that are present; set present to 0 "
            "there, or clean them"
        )
    return points.masked_fill(~present.bool()[..., None], _NAN)
