"""Time tensor cores of the models with `torch.compile`, compared with no compilation.

A core is a pure function of tensors: the mixture of pixels of part-whole capsules, drawn from
templates and poses, and the routing of class capsules by agreement and by EM. Each is timed forward
and backward, with the sizes of the entries' training. The first calls, which compile, are not
counted; they take a quarter of a minute each and more.

A ratio above 1 means that compiling makes training slower. This is why `fit` does not compile.
"""

import warnings
from collections.abc import Callable

import torch
from harness import Benchmark, Contestant, Contestants, main
from torch import Tensor

from capsule_zoo.guides import DynamicRouting, EMRouting
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.pixel_mixture import PixelMixture
from capsule_zoo.models.parts.templates import visibility, warp_templates
from capsule_zoo.models.routing.parent_distribution import Routing
from capsule_zoo.models.routing.vector_capsules import route_classes

IMAGES, PARTS, TEMPLATE, SIZE = 128, 24, 11, 28
CHILDREN, CLASSES, LENGTH = 144, 10, 16
BACKEND = "inductor"
Core = Callable[..., Tensor]


def drawing(templates: Tensor, raw: Tensor, presence: Tensor, images: Tensor) -> Tensor:
    """Return the mean log density of images as mixtures of parts, drawn at their poses."""
    layers = warp_templates(templates, poses.from_parameters(raw), (SIZE, SIZE))
    alpha = layers[:, 1:] * presence.T[:, None, :, None, None]
    return PixelMixture(layers[:, :1], visibility(alpha) + 0.1, 0.2).log_prob(images).mean()


def routing(kind: Routing) -> Core:
    """Return the sum of squares of the class capsules that routing computes from children."""

    def core(children: Tensor, transform: Tensor) -> Tensor:
        parts = route_classes(children, transform, kind)
        return torch.stack([part.square().sum() for part in parts]).sum()

    return core


def cores() -> dict[str, tuple[Core, tuple[Tensor, ...]]]:
    """Return every core with its inputs; all inputs except the images need gradients."""
    torch.manual_seed(0)
    templates = torch.rand(PARTS, 2, TEMPLATE, TEMPLATE)
    drawn = (templates, 0.3 * torch.randn(IMAGES, PARTS, 6), torch.rand(IMAGES, PARTS))
    images = torch.rand(IMAGES, 1, 1, SIZE, SIZE)
    votes = (torch.randn(IMAGES, CHILDREN, 8), 0.1 * torch.randn(CHILDREN, 8, CLASSES * LENGTH))
    for leaf in (*drawn, *votes):
        leaf.requires_grad_()
    return {
        "drawing": (drawing, (*drawn, images)),
        "dynamic": (routing(DynamicRouting(3)), votes),
        "em": (routing(EMRouting(3)), votes),
    }


def step(core: Core, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that computes a core's value and gradients."""

    def run() -> tuple[Tensor, ...]:
        value = core(*inputs)
        leaves = [leaf for leaf in inputs if leaf.requires_grad]
        return (value.detach(), *torch.autograd.grad(value, leaves))

    return run


def steps() -> dict[str, dict[str, Contestant]]:
    """Return two steps for every core, by core: not compiled and compiled."""
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
    return {
        name: {
            "eager": step(core, inputs),
            "compiled": step(torch.compile(core, backend=BACKEND), inputs),
        }
        for name, (core, inputs) in cores().items()
    }


def make() -> Contestants:
    of_cores = steps()
    single = {
        f"{mode}_{name}": run for name, runs in of_cores.items() for mode, run in runs.items()
    }

    def all_of(mode: str) -> Contestant:
        return lambda: [runs[mode]() for runs in of_cores.values()]

    return {"eager": all_of("eager"), "compiled": all_of("compiled"), **single}


def check() -> None:
    for runs in steps().values():
        for ours, theirs in zip(runs["eager"](), runs["compiled"](), strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3 * ours.abs().max().item())


if __name__ == "__main__":
    data = (
        f"{IMAGES} images: {PARTS} parts of {TEMPLATE}x{TEMPLATE} on {SIZE}x{SIZE} pixels; "
        f"{CHILDREN} children of {CLASSES} capsules"
    )
    main(Benchmark("compiled", make, check, "eager", ("compiled",), data))
