"""Constellations: scenes of points, with an exact guide (Nazabal, Tsagkas and Williams 2021)."""

from typing import Any

import torch
from torch import Tensor

from capsule_zoo.data import Dataset
from capsule_zoo.data.points import SHAPES
from capsule_zoo.guides import AmortizedMatching, ExactMatching, RansacMatching, SinkhornMatching
from capsule_zoo.inference import SleepPhase, learn_templates
from capsule_zoo.inference.training.stages import Stage
from capsule_zoo.models import Constellations
from capsule_zoo.models.checks import check_known
from capsule_zoo.registry import Entry, register
from capsule_zoo.zoo.constellations.figures import scene_parses, scene_samples, template_rows

SCENES = 256  # number of scenes from which templates are learned
STEPS = 800  # updates of the guide on samples of the model; see `constellations/learned`

PICTURES = {
    "parses": lambda entry, points: scene_parses(entry.model, entry.guide, points),
    "samples": lambda entry: scene_samples(entry.model),
    "templates": lambda entry: template_rows({"": entry.model.distribution()}),
}


def learn_from(model: Constellations, points: Tensor, seed: int = 0, **options: Any) -> list[float]:
    """Learn a model's templates from scenes of few points; return the objective in nats.

    Scenes of at most two objects are fast, and as informative on the templates as larger scenes.

    Args:
        points: (S, N, 2), NaN where absent.
        options: arguments of `learn_templates`.
    """
    largest = sum(sorted(model.sizes)[-2:]) + model.clutter
    return learn_templates(model, points[:SCENES], largest=largest, seed=seed, **options)


def stages(entry: Entry) -> list[Stage]:
    """Return the stage that learns the templates or the guide; no stage if both are given."""
    asleep = isinstance(entry.guide, AmortizedMatching)
    learned = entry.settings.get("learned", False)
    if not (asleep or learned):
        return []

    def prepare(data: Dataset, seed: int) -> Dataset:
        learn_from(entry.model, data.train.images, seed)
        return data

    title = "the guide, on samples of the model" if asleep else "templates and noise"
    title = f"templates by exact EM, then {title}" if learned else title
    settings: dict[str, Any] = {"objective": entry.objective}
    if asleep:
        settings = {"objective": SleepPhase(), "freeze": "model"}
    before = prepare if learned else None
    needed = STEPS if asleep else 1  # templates are learned before the first step
    return [Stage(title, needed, entry.model, entry.guide, prepare=before, settings=settings)]


def shapes(
    objects: tuple[str, ...] = ("square", "triangle", "square"),
    sigma: float = 0.1,
    sigma_floor: float = 0.01,
    sigma_pose: float = 0.5,
    presence: float = 0.5,
    clutter: int = 0,
    learned: bool = False,
) -> Constellations:
    """Points are corners of squares and triangles, at any position and angle.

    The templates and the noise may be trained, from these shapes on, or learned from scratch.

    Args:
        objects: names of shapes: square, triangle, pentagon, corner.
        sigma: standard deviation of noise on the templates, in their units; squares are 2 wide.
        sigma_floor: standard deviation of noise on the scene.
        sigma_pose: standard deviation of every number of a pose.
        presence: prior probability that an object is in a scene.
        clutter: the largest number of clutter points.
        learned: initialize random templates, whose shapes and noise training learns by exact EM;
            of `objects` only the numbers of corners are used.
    """
    for name in objects:
        check_known("shape", name, SHAPES)
    templates = [torch.tensor(SHAPES[name]) for name in objects]
    if learned:
        if sigma == 0:
            raise ValueError("sigma must be above 0 if learned=True; EM learns it from there")
        templates = [torch.randn_like(template) for template in templates]
    return Constellations(templates, sigma, sigma_floor, sigma_pose, presence, clutter)


register(
    "constellations",
    model=shapes,
    guides={
        "exact": ExactMatching,
        "ransac": RansacMatching,
        "sinkhorn": SinkhornMatching,
        "amortized": AmortizedMatching,
    },
    training=dict(batch_size=64, epochs=1),
    figures=PICTURES,
    stages=stages,
    small=dict(
        objects=("square", "triangle"),
        clutter=4,
        guides=dict(sinkhorn=dict(starts=1, steps=3), amortized=dict(width=8)),
    ),
    data="constellations",
)
