"""Constellations: scenes of points, with an exact guide (Nazabal, Tsagkas and Williams 2021)."""

from typing import Any

import torch
from pyro.infer import Trace_ELBO
from torch import Tensor

from capsule_zoo.data import Dataset
from capsule_zoo.data.points import SHAPES
from capsule_zoo.guides import (
    AmortizedMatching,
    ExactMatching,
    Guide,
    RansacMatching,
    SinkhornMatching,
)
from capsule_zoo.guides.parts.set_transformers import TransformerSizes
from capsule_zoo.inference import SleepPhase, learn_templates
from capsule_zoo.inference.training.stages import Stage
from capsule_zoo.models import Constellations, check_at_least
from capsule_zoo.registry import Entry, check_known, register
from capsule_zoo.zoo.constellations.figures import scene_parses, scene_samples, template_rows

SCENES = 256  # from which templates are learned
STEPS = 800  # of the guide, on samples of the model; see `constellations/learned`

PICTURES = {
    "parses": lambda entry, points: scene_parses(entry.model, entry.guide, points),
    "samples": lambda entry, points: scene_samples(entry.model),
    "templates": lambda entry, points: template_rows({"": entry.model.law()}),
}


def learn_from(model: Constellations, points: Tensor, seed: int = 0, **options: Any) -> list[float]:
    """Learn a model's templates from the first scenes that are not too large, and return nats.

    Scenes of at most two objects are small, and say as much of the templates as the others.

    Args:
        points: (S, N, 2), NaN where absent.
        options: arguments of `learn_templates`.
    """
    largest = sum(sorted(model.sizes)[-2:]) + model.clutter
    return learn_templates(model, points[:SCENES], largest=largest, seed=seed, **options)


def stages(entry: Entry) -> list[Stage]:
    """Return a stage in which templates are learned, or the guide; none if both are given."""
    asleep = isinstance(entry.guide, AmortizedMatching)
    learned = entry.sizes.get("learned", False)
    if not (asleep or learned):
        return []

    def prepare(data: Dataset, seed: int) -> Dataset:
        learn_from(entry.model, data.train.images, seed)
        return data

    words = "the guide, on samples of the model" if asleep else "templates and noise"
    words = f"templates by exact EM, then {words}" if learned else words
    settings: dict[str, Any] = {"objective": entry.objective}
    if asleep:
        settings = {"objective": SleepPhase(), "freeze": "model"}
    before = prepare if learned else None
    needed = STEPS if asleep else 1  # templates are learned before the first step
    return [Stage(words, needed, entry.model, entry.guide, prepare=before, settings=settings)]


@register(
    "constellations",
    small=dict(objects=("square", "triangle"), clutter=4, starts=1, steps=3, width=8),
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
    learned: bool = False,
    width: int = 64,
) -> Entry[Constellations, Guide]:
    """Points are corners of squares and triangles, at any position and angle.

    The templates and the noise may be trained, from these shapes on, or learned from scratch.

    Args:
        objects: names of shapes: square, triangle, pentagon, corner.
        sigma: noise on the templates, in their units; squares are 2 wide.
        sigma_floor: noise on the scene.
        sigma_pose: standard deviation of every number of a pose.
        clutter: the largest number of clutter points.
        starts: runs of EM for each set of objects, in `sinkhorn`.
        steps: steps of EM.
        learned: start with random templates, of which training learns shapes and noise by exact EM;
            only the numbers of corners of `objects` are used.
        width: width of the set transformer, in `amortized`.
    """
    check_at_least(1, starts=starts, steps=steps, width=width)
    for name in objects:
        check_known("shape", name, SHAPES)
    shapes = [torch.tensor(SHAPES[name]) for name in objects]
    if learned:
        if sigma == 0:
            raise ValueError("sigma must be above 0 if learned=True; EM learns it from there")
        shapes = [torch.randn_like(shape) for shape in shapes]
    model = Constellations(
        shapes, sigma=sigma, sigma_floor=sigma_floor, sigma_pose=sigma_pose, clutter=clutter
    )
    return Entry(
        model=model,
        guides={
            "exact": ExactMatching,
            "ransac": RansacMatching,
            "sinkhorn": lambda entry: SinkhornMatching(entry.model, starts, steps),
            "amortized": lambda entry: AmortizedMatching(entry.model, TransformerSizes(width)),
        },
        objective=Trace_ELBO(),
        training=dict(batch_size=64, epochs=1),
        figures=PICTURES,
        stages=stages,
    )
