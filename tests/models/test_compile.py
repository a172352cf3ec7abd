"""The tensor functions inside the models compile, to the same values and gradients.

Routings compile in pieces: their votes collect gradients of all iterations in one place, which the
compiler leaves as it is.
"""

import pyro
import pytest
import torch

from capsule_zoo.guides import DynamicRouting, EMRouting, VBRouting
from capsule_zoo.guides.parts.ridge import fit_code, fit_pose
from capsule_zoo.inference.objectives.importance_weighted import log_mean_exp, score_credit
from capsule_zoo.models.constellations.similarities import Noise, fit_of, log_evidence
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import parent_log_weights
from capsule_zoo.models.parts.pixel_mixture import PixelMixture
from capsule_zoo.models.parts.templates import over, visibility, warp_templates
from capsule_zoo.models.routing.vector_capsules import margin_loss, route_classes, squash


def random(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.rand(shape, generator=generator, dtype=torch.double)


def drawn_pixels(templates, raw, images):
    """Draw parts, and compute the log density of images, as part-whole capsules do."""
    layers = warp_templates(templates, poses.from_parameters(raw), (6, 5))
    color, alpha = layers[:, :1], layers[:, 1:]
    composite = over(color, alpha, color.new_zeros(1, 1, 1, 1))
    distribution = PixelMixture(color, visibility(alpha) + 0.1, 0.2)
    return distribution.log_prob(images).sum() + composite.square().sum()


def routed(routing):
    return lambda children, transform: sum(
        part.square().sum() for part in route_classes(children, transform, routing)
    )


def constellation(points, corners):
    fit = fit_of(torch.view_as_complex(points), torch.view_as_complex(corners))
    return log_evidence(fit, Noise(0.1, 0.0), tau=1.0)


CORES = {
    "poses": (
        lambda outer, inner: poses.compose(poses.inverse(outer), poses.from_components(inner + 1)),
        (random(3, 6), random(3, 6)),
    ),
    "drawing": (drawn_pixels, (random(4, 2, 3, 3), random(2, 4, 6), random(2, 1, 1, 6, 5))),
    "parents": (
        lambda presence, affinity: parent_log_weights(presence, affinity, 0.1).softmax(-1),
        (random(2, 3), random(4, 3)),
    ),
    "kinds": (
        lambda target, place, weight: fit_pose(target, place, weight, weight[0, 0, 0])[0],
        (random(2, 1, 4, 6), random(2, 3, 4, 6), random(2, 3, 4, 6)),
    ),
    "codes": (
        lambda rest, slope, weight, code, on, off: fit_code(rest, slope, weight, code, on, off)[0],
        tuple(
            random(*shape)
            for shape in ((2, 3, 4, 6), (2, 3, 4, 6, 2), (2, 3, 4, 6), (3, 4, 2), *[(2, 3, 4)] * 2)
        ),
    ),
    "importance weights": (
        lambda weights: log_mean_exp(weights) + (score_credit(weights) * weights).sum(0),
        (random(5, 3),),
    ),
    "squash and margin": (
        lambda vectors, presences: margin_loss(squash(vectors).norm(dim=-1), presences),
        (random(2, 3, 4), random(2, 3)),
    ),
    "a similarity": (constellation, (random(3, 4, 2), random(1, 4, 2))),
}
ROUTINGS = {kind.__name__: kind(2) for kind in (DynamicRouting, EMRouting, VBRouting)}

pytestmark = [  # of the compiler, about what it does itself
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.mark.parametrize("name", CORES)
def test_compiled_whole_they_give_the_same_values_and_gradients(name):
    core, inputs = CORES[name]
    with pyro.validation_enabled(False):  # checks of distributions do not compile
        agree(core, torch.compile(core, backend="aot_eager", fullgraph=True), inputs)


@pytest.mark.long
@pytest.mark.parametrize("name", ROUTINGS)
def test_compiled_in_pieces_routings_give_the_same_values_and_gradients(name):
    core = routed(ROUTINGS[name])
    agree(core, torch.compile(core, backend="aot_eager"), (random(2, 5, 8), random(5, 8, 3 * 16)))


def agree(core, compiled, inputs):
    results = []
    for call in (core, compiled):
        leaves = [value.clone().requires_grad_() for value in inputs]
        value = call(*leaves)
        slopes = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
        results.append((value.detach(), *(slope for slope in slopes if slope is not None)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)
