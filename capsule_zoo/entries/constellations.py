"""Constellations: scenes of points, with an exact guide (Nazabal, Tsagkas and Williams 2021)."""

from __future__ import annotations

import torch
from pyro.infer import Trace_ELBO

from capsule_zoo.data.constellations import SHAPES
from capsule_zoo.figures.constellations import scene_parses, scene_samples
from capsule_zoo.guides.constellations import (
    ExactMatching,
    RansacMatching,
    SinkhornMatching,
)
from capsule_zoo.models import Constellations, check_at_least
from capsule_zoo.nearest import unknown
from capsule_zoo.registry import Entry, register

PICTURES = {
    "parses": lambda entry, points: scene_parses(entry.model, entry.guide, points),
    "samples": lambda entry, points: scene_samples(entry.model),
}


@register(
    "constellations",
    small=dict(objects=("square", "triangle"), clutter=4, starts=1, steps=3),
    data="constellations",
)
def constellations(
    objects: tuple[str, ...] = ("square", "triangle", "square"),
    sigma: float = 0.1,
    sigma_floor: float = 0.01,
    sigma_pose: float = 0.5,
    clutter: int = 0,
    starts: int = 10,
    steps: int = 40,
) -> Entry:
    """Points are corners of squares and triangles; see `capsule_zoo.models.constellations`.

    The templates and the noise may be trained, from these shapes on.

    Args:
        objects: names of shapes: square, triangle, pentagon, corner.
        sigma: noise on the templates, in their units; squares are 2 wide.
        sigma_floor: noise on the scene.
        sigma_pose: deviation of every number of a pose.
        clutter: the largest number of clutter points.
        starts: runs of EM for each set of objects, in `sinkhorn`.
        steps: steps of EM.
    """
    check_at_least(1, starts=starts, steps=steps)
    for name in objects:
        if name not in SHAPES:
            raise ValueError(unknown("shape", name, list(SHAPES)))
    model = Constellations(
        [torch.tensor(SHAPES[name]) for name in objects],
        sigma=sigma,
        sigma_floor=sigma_floor,
        sigma_pose=sigma_pose,
        clutter=clutter,
    )
    return Entry(
        model=model,
        guides={
            "exact": lambda entry: ExactMatching(entry.model),
            "ransac": lambda entry: RansacMatching(entry.model),
            "sinkhorn": lambda entry: SinkhornMatching(entry.model, starts, steps),
        },
        objective=Trace_ELBO(),
        training=dict(ExactMatching.fit_settings, batch_size=64, epochs=1),
        figures=PICTURES,
    )
