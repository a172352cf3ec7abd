"""The data set Toys3D: rendered toys of simple solids under varying views and lights.

Toys3D replaces smallNORB without a download. It has smallNORB's 5 categories, 10 instances of each
(5 to train on, 5 to test), 18 azimuths, 9 elevations, 6 lightings, gray, 96x96. A toy is a dozen
ellipsoids, boxes and tapered cylinders whose sizes and positions vary from instance to instance.
Each view is cast by parallel rays against the solids, exactly, and shaded by one lamp and the sky.

>>> toys = Toys3D()                       # minutes the first time, then from the user's cache
>>> toys.train.select(azimuth=range(6)).split(size=48)
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.files import user_cache, written_whole
from capsule_zoo.data.progress import track
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.viewpoints import AZIMUTHS, CATEGORIES, ELEVATIONS, views_of_grid

INSTANCES = 10
_VERSION = 1  # version of the pictures, a part of the name of the cached file
_FAR = 1e6
_BACKGROUND = 0.78
_LIGHTINGS = (  # lamp's direction (right, up, towards the camera); strengths of lamp and sky
    ((-1.0, 1.0, 1.0), 0.9, 0.15),
    ((1.0, 1.0, 1.0), 0.75, 0.3),
    ((0.0, 1.5, 0.4), 0.8, 0.25),
    ((-1.5, 0.3, 0.6), 0.85, 0.15),
    ((1.5, 0.3, 0.6), 0.7, 0.3),
    ((0.0, 0.2, 1.0), 0.6, 0.25),
)


class Solid(NamedTuple):
    """A solid: an ellipsoid, a box, or a cylinder along z that narrows by `taper` to its top.

    Attributes:
        kind: "ellipsoid", "box" or "cylinder".
        center, half: center and half sizes of the solid, in lengths of about one toy, (3,).
        tilt: radians about the y axis, before it is put at its center.
        shade: albedo in [0, 1].
        taper: 0 for a cylinder, 1 for a cone.
    """

    kind: str
    center: tuple[float, float, float]
    half: tuple[float, float, float]
    tilt: float = 0.0
    shade: float = 0.8
    taper: float = 0.0


_Draw = Callable[[float, float], float]  # draws a number of one instance, uniform from low to high


def _animal(draw: _Draw) -> list[Solid]:
    """Return the solids of an animal: four legs, a long body, a head in front, ears and a tail."""
    length, girth, leg = draw(0.42, 0.6), draw(0.17, 0.27), draw(0.2, 0.42)
    thick, neck, head = draw(0.05, 0.09), draw(0.05, 0.4), draw(0.14, 0.2)
    shade, dark = draw(0.5, 0.95), draw(0.2, 0.5)
    x, z = length + 0.08, girth + neck
    solids = [
        Solid("ellipsoid", (0, 0, 0), (length, girth, girth), shade=shade),
        Solid("cylinder", (0.85 * length, 0, z / 2), (0.09, 0.09, z / 2), 0.3, shade),
        Solid("ellipsoid", (x + 0.06, 0, z), (1.4 * head, head, head), draw(0, 0.5), shade),
        Solid("cylinder", (-length - 0.1, 0, 0.1), (0.03, 0.03, draw(0.1, 0.25)), -0.7, dark),
    ]
    for side in (-1, 1):
        ear = (x - 0.02, side * 0.6 * head, z + head)
        solids.append(Solid("cylinder", ear, (0.05, 0.05, draw(0.06, 0.2)), 0, dark, taper=0.9))
        for front in (-1, 1):
            place = (front * 0.62 * length, side * 0.6 * girth, -0.7 * girth - leg / 2)
            solids.append(Solid("cylinder", place, (thick, thick, leg / 2 + 0.05), 0, dark))
    return solids


def _human(draw: _Draw) -> list[Solid]:
    """Return the solids of an upright human: trunk, head, hat, two arms and two legs."""
    trunk, leg, wide = draw(0.26, 0.38), draw(0.22, 0.34), draw(0.15, 0.24)
    swing, arms = draw(0.0, 0.5), draw(0.2, 0.32)
    shade, dark, skin = draw(0.4, 0.9), draw(0.15, 0.5), draw(0.7, 1.0)
    solids = [
        Solid("cylinder", (0, 0, 0), (0.65 * wide, wide, trunk), 0, shade, draw(-0.3, 0.3)),
        Solid("ellipsoid", (0, 0, trunk + 0.16), (0.14, 0.13, 0.16), 0, skin),
        Solid("cylinder", (0, 0, trunk + 0.32), (0.16, 0.16, draw(0.03, 0.12)), 0, dark, 0.5),
    ]
    for side in (-1, 1):
        foot = (side * swing * leg, side * 0.5 * wide, -trunk - leg)
        solids.append(Solid("cylinder", foot, (0.08, 0.08, leg), -side * swing, dark))
        hand = (-side * swing * arms, side * (wide + 0.07), 0.75 * trunk - arms)
        solids.append(Solid("cylinder", hand, (0.06, 0.06, arms), side * swing, shade))
    return solids


def _airplane(draw: _Draw) -> list[Solid]:
    """Return the solids of an airplane: a fuselage, two wings, a tail with a fin, and engines."""
    length, girth, span = draw(0.6, 0.8), draw(0.09, 0.15), draw(0.5, 0.8)
    chord, tail = draw(0.1, 0.2), draw(0.2, 0.32)
    shade, dark = draw(0.6, 1.0), draw(0.3, 0.7)
    wing, low = draw(-0.05, 0.2), draw(-0.6, 0.6) * girth
    solids = [
        Solid("ellipsoid", (0, 0, 0), (length, girth, girth), 0, shade),
        Solid("box", (wing, 0, low), (chord, span, 0.02), 0, shade),
        Solid("box", (-0.88 * length, 0, 0.02), (0.5 * chord, tail, 0.018), 0, dark),
        Solid("box", (-0.88 * length, 0, draw(0.12, 0.2)), (0.09, 0.018, 0.15), -0.3, dark),
        Solid("ellipsoid", (0.55 * length, 0, 0.6 * girth), (0.16, 0.6 * girth, 0.07), 0, 0.25),
    ]
    for side in (-1, 1):
        place = (wing + 0.05, side * draw(0.3, 0.6) * span, low - 0.06)
        solids.append(Solid("ellipsoid", place, (0.14, 0.05, 0.05), 0, dark))
    return solids


def _wheels(places: list[float], side: float, low: float, radius: float) -> list[Solid]:
    """Return the solids of wheels, round along x and z and thin along y."""
    at = [(x, s * side, low) for x in places for s in (-1, 1)]
    return [Solid("ellipsoid", place, (radius, 0.07, radius), 0, 0.12) for place in at]


def _truck(draw: _Draw) -> list[Solid]:
    """Return the solids of a truck: a cab in front of a load or a tank, on six wheels."""
    load, tall, wide = draw(0.4, 0.55), draw(0.1, 0.3), draw(0.2, 0.27)
    shade, dark, radius = draw(0.5, 1.0), draw(0.3, 0.9), draw(0.11, 0.15)
    cab = draw(0.15, 0.24)
    solids = [
        Solid("box", (0, 0, -0.14), (load + 0.22, 0.8 * wide, 0.04), 0, 0.2),
        Solid("box", (load + 0.08, 0, cab - 0.1), (0.15, wide, cab), 0, shade),
        Solid("box", (load + 0.2, 0, cab + 0.02), (0.04, 0.85 * wide, 0.08), 0.1, 0.15),
        Solid("box", (load + 0.27, 0, -0.05), (0.08, 0.9 * wide, 0.1), 0, dark),
    ]
    if draw(0, 1) < 0.35:  # a tank
        solids.append(
            Solid("ellipsoid", (-0.15, 0, tall), (load + 0.05, wide, tall + 0.1), 0, dark)
        )
    else:
        solids.append(Solid("box", (-0.15, 0, tall - 0.1), (load, wide, tall), 0, dark))
    return solids + _wheels([-load + 0.05, -load + 0.32, load + 0.12], wide, -0.22, radius)


def _car(draw: _Draw) -> list[Solid]:
    """Return the solids of a car: a low body with a cabin on top and four wheels."""
    length, wide, low = draw(0.55, 0.7), draw(0.24, 0.31), draw(0.09, 0.13)
    cabin, roof, back = draw(0.24, 0.4), draw(0.1, 0.18), draw(-0.25, 0.02)
    shade, radius = draw(0.35, 1.0), draw(0.11, 0.15)
    solids = [
        Solid("box", (0, 0, 0), (length, wide, low), 0, shade),
        Solid(
            "ellipsoid", (0.5 * length, 0, 0.6 * low), (0.52 * length, 0.9 * wide, low), 0, shade
        ),
        Solid("ellipsoid", (back, 0, low), (cabin + 0.12, 0.85 * wide, 1.4 * roof), 0, 0.2),
        Solid("box", (back, 0, low + roof), (0.75 * cabin, 0.75 * wide, 0.4 * roof), 0, shade),
    ]
    if draw(0, 1) < 0.4:  # a spoiler
        solids.append(Solid("box", (-length, 0, low + 0.1), (0.05, 0.9 * wide, 0.02), 0, shade))
    return solids + _wheels([-0.6 * length, 0.6 * length], wide, -low, radius)


_MAKERS: dict[str, Callable[[_Draw], list[Solid]]] = dict(
    zip(CATEGORIES, (_animal, _human, _airplane, _truck, _car), strict=True)
)


def make_toy(category: str, instance: int, seed: int = 0) -> list[Solid]:
    """Return the solids of one toy, a function of the given numbers.

    Raises:
        ValueError: there is no such category.
    """
    if category not in _MAKERS:
        raise ValueError(f"category must be one of {CATEGORIES}, not {category!r}")
    number = (seed * len(CATEGORIES) + CATEGORIES.index(category)) * INSTANCES + instance
    generator = seeded_generator(number)
    return _MAKERS[category](
        lambda low, high: low + (high - low) * torch.rand((), generator=generator).item()
    )


def camera(azimuth: Tensor, elevation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the camera's axes, unit vectors right, up and towards it, (views, 3) each."""
    zero = torch.zeros_like(azimuth)
    right = torch.stack([-azimuth.sin(), azimuth.cos(), zero], -1)
    level, steep = elevation.cos(), elevation.sin()
    towards = torch.stack([level * azimuth.cos(), level * azimuth.sin(), steep], -1)
    return right, torch.linalg.cross(towards, right), towards


def cast(solids: list[Solid], origin: Tensor, ray: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the first hits of rays: distances (...), unit normals (..., 3) and albedos (...).

    The distance is _FAR where a ray hits nothing.

    Args:
        origin, ray: start and unit direction of each ray, (..., 3).
    """
    nearest = torch.full(origin.shape[:-1], _FAR)
    normal, shade = torch.zeros_like(origin), torch.zeros(origin.shape[:-1])
    for solid in solids:
        half = torch.tensor(solid.half)
        cosine, sine = math.cos(solid.tilt), math.sin(solid.tilt)
        rotation = torch.tensor([[cosine, 0, sine], [0, 1, 0], [-sine, 0, cosine]])
        start = (origin - torch.tensor(solid.center)) @ rotation / half
        distance, slope = _HITS[solid.kind](start, ray @ rotation / half, solid.taper)
        hit = distance < nearest
        nearest = torch.where(hit, distance, nearest)
        slope = F.normalize(slope / half @ rotation.T, dim=-1)
        normal = torch.where(hit[..., None], slope, normal)
        shade = torch.where(hit, solid.shade, shade)
    return nearest, normal, shade


def _hit_ball(start: Tensor, ray: Tensor, taper: float) -> tuple[Tensor, Tensor]:
    """Intersect rays with the unit ball."""
    a, b = ray.square().sum(-1), (start * ray).sum(-1)
    discriminant = b.square() - a * (start.square().sum(-1) - 1)
    distance = (-b - discriminant.clamp_min(0).sqrt()) / a
    distance = torch.where((discriminant > 0) & (distance > 0), distance, _FAR)
    return distance, start + distance[..., None] * ray


def _hit_box(start: Tensor, ray: Tensor, taper: float) -> tuple[Tensor, Tensor]:
    """Intersect rays with the cube [-1, 1]^3."""
    ray = torch.where(ray.abs() < 1e-9, 1e-9, ray)
    entry, axis = ((-ray.sign() - start) / ray).max(-1)
    leave = ((ray.sign() - start) / ray).amin(-1)
    distance = torch.where((entry < leave) & (entry > 0), entry, _FAR)
    face = F.one_hot(axis, 3) * -ray.sign()
    return distance, face


def _hit_cylinder(start: Tensor, ray: Tensor, taper: float) -> tuple[Tensor, Tensor]:
    """Intersect rays with radius 1 - taper (1 + z) / 2 for z in [-1, 1], with both ends."""
    middle, narrow = 1 - taper / 2, taper / 2
    radius, change = middle - narrow * start[..., 2], -narrow * ray[..., 2]
    a = ray[..., :2].square().sum(-1) - change.square()
    b = (start[..., :2] * ray[..., :2]).sum(-1) - radius * change
    c = start[..., :2].square().sum(-1) - radius.square()
    discriminant = b.square() - a * c
    root = discriminant.clamp_min(0).sqrt()
    a = torch.where(a.abs() < 1e-9, 1e-9, a)
    best, slope = torch.full_like(a, _FAR), torch.zeros_like(start)
    for distance in ((-b - root) / a, (-b + root) / a):
        point = start + distance[..., None] * ray
        inside = (discriminant > 0) & (distance > 0) & (point[..., 2].abs() <= 1)
        hit = inside & (distance < best)
        wide = middle - narrow * point[..., 2]
        side = torch.cat([point[..., :2], (narrow * wide)[..., None]], -1)
        best, slope = torch.where(hit, distance, best), torch.where(hit[..., None], side, slope)
    for end in (-1.0, 1.0):
        distance = (end - start[..., 2]) / torch.where(ray[..., 2].abs() < 1e-9, 1e-9, ray[..., 2])
        point = start + distance[..., None] * ray
        within = point[..., :2].square().sum(-1) <= (middle - narrow * end) ** 2
        hit = within & (distance > 0) & (distance < best)
        face = torch.tensor([0.0, 0.0, end]).expand_as(start)
        best, slope = torch.where(hit, distance, best), torch.where(hit[..., None], face, slope)
    return best, slope


_HITS = {"ellipsoid": _hit_ball, "box": _hit_box, "cylinder": _hit_cylinder}


def render(
    solids: list[Solid], azimuth: Tensor, elevation: Tensor, size: int = 96, samples: int = 2
) -> Tensor:
    """Render a toy under each of the six lightings, (views, 6, size, size), in [0, 1].

    Args:
        azimuth, elevation: angles of the camera, in radians, (views,).
        size: height and width, in pixels.
        samples: rays for each pixel along either axis.
    """
    right, up, towards = camera(azimuth, elevation)
    fine = size * samples
    axis = (torch.arange(fine) + 0.5) / fine * 2 - 1
    across, down = axis[None, :, None], -axis[:, None, None]
    frame = [v[:, None, None] for v in (right, up, towards)]  # (views, 1, 1, 3)
    origin = across * frame[0] + down * frame[1] + 4 * frame[2]
    distance, normal, shade = cast(solids, origin, (-frame[2]).expand_as(origin))
    facing = torch.stack([(normal * vector).sum(-1) for vector in frame], -1)
    lamps, strength, sky = map(torch.tensor, zip(*_LIGHTINGS, strict=True))
    direct = (facing @ F.normalize(lamps, dim=-1).T).clamp_min(0)
    light = strength * direct + sky * (1 + normal[..., 2:]) / 2
    gray = shade[..., None] * light  # (views, fine, fine, 6)
    backdrop = _BACKGROUND * (0.7 + 0.3 * strength / 0.9)
    gray = torch.where((distance < _FAR)[..., None], gray, backdrop).clamp(0, 1)
    return F.avg_pool2d(gray.movedim(3, 1), samples)


class Toys3D:
    """The data set Toys3D, rendered once and kept in a cache.

    Args:
        size: height and width, in pixels.
        seed: seed of the toys.
        cache: folder for the rendered images; the user's cache by default.
        azimuths, elevations, instances: number of each, for a smaller set.

    Attributes:
        train, test: `Views`, of instances 0 to 4 and 5 to 9 of each category.
    """

    def __init__(
        self,
        size: int = 96,
        seed: int = 0,
        cache: str | Path | None = None,
        *,
        azimuths: int = AZIMUTHS,
        elevations: int = ELEVATIONS,
        instances: int = INSTANCES,
    ) -> None:
        self.size = size
        self.seed = seed
        self.counts = azimuths, elevations, instances
        folder = user_cache() if cache is None else Path(cache)
        shape = "x".join(map(str, (instances, elevations, azimuths, size)))
        file = folder / f"toys3d-{_VERSION}-{seed}-{shape}.npy"
        images = self._load_or_render(
            file
        )  # (categories, instances, elevations, azimuths, lights, H, W)
        half = instances // 2
        self.train = views_of_grid(images[:, :half], "toys3d/train")
        self.test = views_of_grid(images[:, half:], "toys3d/test", half)

    def _load_or_render(self, file: Path) -> Tensor:
        if not file.exists():
            images = self._render_toys().numpy()
            with written_whole(file) as stream:
                np.save(stream, images)
        return torch.from_numpy(np.load(file))

    def _render_toys(self) -> Tensor:
        azimuths, elevations, instances = self.counts
        azimuth = torch.arange(azimuths) * (2 * math.pi / azimuths)
        angles = torch.linspace(math.radians(30), math.radians(70), elevations)
        toys = []
        names = [*itertools.product(CATEGORIES, range(instances))]
        for category, instance in track(names, "rendering toys", "toys"):
            solids = make_toy(category, instance, self.seed)
            views = [
                render(solids, azimuth, torch.full_like(azimuth, angle), self.size)
                for angle in angles.tolist()
            ]
            toys.append((torch.stack(views) * 255).round().to(torch.uint8))
        return torch.stack(toys).unflatten(0, (len(CATEGORIES), instances))
