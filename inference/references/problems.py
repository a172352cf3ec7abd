"""The reference problems: three small models, each with one image.

part-whole        An object of two parts, of which each may be absent, in an image of 6x6 pixels.
                  18 continuous numbers (three poses); the three presences are summed out.
constellation     Six points of a scene: a triangle and a rod may be present, and up to three points
                  may be clutter. 8 numbers (two poses); presences and matchings are summed out. The
                  posterior is exact: a mixture of normal distributions, one for each matching.
generative-capsnet
                  A picture of 5x6 pixels that a network of part capsules paints from one of two
                  kinds, a pose and the jitter of three parts. 8 numbers; the kind is summed out.

Their files hold the parameters of the model, the image, the draws and how they were made. Every
image was drawn from its model.
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capsule_zoo.inference.references.reference import Reference
from capsule_zoo.inference.training.checkpoint import load_checkpoint
from capsule_zoo.models import Constellations, GenerativeCapsNet, Model, PartWholeCapsules
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.constellations.matching_distributions import corner_table
from capsule_zoo.models.parts.painted_parts import ObjectPose, Painting
from capsule_zoo.models.parts.parent_selection import Belonging

FOLDER = Path(__file__).resolve().parent / "files"
TRIANGLE = ((-1.0, -1.0), (1.0, -1.0), (0.0, 1.0))
ROD = ((-1.0, 0.0), (0.0, 0.3), (2.0, 0.0))


class Problem(NamedTuple):
    """A reference problem: functions that build its model and list its discrete values.

    Attributes:
        build: returns the model, with parameters that the file replaces.
        settings: returns every joint value of the discrete sites, (settings, ...) by site, from the
            model and the image.
    """

    build: Callable[[], Model]
    settings: Callable[[Any, Tensor], dict[str, Tensor]]


def _part_whole() -> Model:
    return PartWholeCapsules(
        (1, 6, 6),
        objects=1,
        parts=2,
        painting=Painting(template_size=3, sigma_image=0.3),
        pose=ObjectPose(sigma_top=0.2),
        belonging=Belonging(
            sigma_min=0.1, sigma_off=0.3, sigma_dummy=0.3, epsilon=0.2, dummy_presence=0.3
        ),
    ).discretize()


def _presences(model: Model, images: Tensor) -> dict[str, Tensor]:
    every = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3))).to(images)
    return {"object_presence": every[:, :1], "part_presence": every[:, 1:]}


def _constellation() -> Model:
    templates = [torch.tensor(TRIANGLE), torch.tensor(ROD)]
    return Constellations(templates, sigma=0.0, sigma_floor=0.15, sigma_pose=0.5, clutter=3)


def _matchings(model: Constellations, points: Tensor) -> dict[str, Tensor]:
    """List every matching of a scene without absent points, with its presences."""
    number, distribution = points.shape[1], model.distribution()
    owner = corner_table(distribution)[0][1:]
    presences, codes = [], []
    for presence in itertools.product((0.0, 1.0), repeat=len(distribution.sizes)):
        corner_codes = (torch.tensor(presence)[owner] > 0).nonzero()[:, 0] + 1
        if not 0 <= number - len(corner_codes) <= model.clutter:
            continue
        for slots in itertools.permutations(range(number), len(corner_codes)):
            code = torch.zeros(number, dtype=torch.long)
            code[list(slots)] = corner_codes
            codes.append(code)
            presences.append(presence)
    return {
        "object_presence": torch.tensor(presences).to(points),
        "point_corner": torch.stack(codes),
    }


def _generative_capsnet() -> Model:
    sizes = dict(kinds=2, pose=2, parts=3, length=3, hidden=4, maps=2, channels=3)
    return GenerativeCapsNet((1, 5, 6), **sizes, jitter=0.2, sigma_image=0.4).discretize()


def _kinds(model: GenerativeCapsNet, images: Tensor) -> dict[str, Tensor]:
    return {"object_kind": torch.eye(model.kinds).to(images)}


PROBLEMS: dict[str, Problem] = {
    "constellation": Problem(_constellation, _matchings),
    "generative-capsnet": Problem(_generative_capsnet, _kinds),
    "part-whole": Problem(_part_whole, _presences),
}


def list_references() -> list[str]:
    """Return the names that `load_reference` takes, sorted."""
    return sorted(PROBLEMS)


def build(name: str) -> Model:
    """Build the model of a problem in float64, with constant parameters.

    Raises:
        ValueError: there is no problem of that name.
    """
    if name not in PROBLEMS:
        raise ValueError(f"unknown reference problem {name!r}; there are {list_references()}")
    with use_seed(0):
        model = PROBLEMS[name].build()
    if isinstance(model.space, ImageSpace):
        model.space = ImageSpace(model.image_shape, (-math.inf, math.inf))  # noise is unbounded
    return model.double().eval().requires_grad_(False)


def load_reference(name: str) -> Reference:
    """Load a reference posterior by name, one of `list_references()`.

    Only safetensors are read.

    Raises:
        ValueError: there is no problem of that name.
        CheckpointError: its file is missing or damaged.
    """
    model = build(name)
    held = load_checkpoint(FOLDER / f"{name}.safetensors")
    model.load_state_dict(held.pop("model"))
    held["draws"] = held["draws"].double()
    settings = PROBLEMS[name].settings(model, held["images"])
    return Reference(name=name, model=model, settings=settings, **held)
