"""Plates to the left of `images`: what a model computes for many particles, it computes for each.

The contract tests hold every entry to this. Here are sizes, labels and requests that they lack, the
drawing that a guide hands over, enumerated kinds, and autocast.
"""

from collections.abc import Callable
from functools import partial

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO, config_enumerate
from pyro.poutine.util import prune_subsample_sites
from variants import create, small_settings

from capsule_zoo.guides import EMRouting, Guide, RoutedParents
from capsule_zoo.inference import loss_per_image
from capsule_zoo.models import Model, SwitchableGaussians
from capsule_zoo.models.networks.on_request import OnRequest
from capsule_zoo.registry import Entry

WITH_LABELS_OR_REQUESTS = ("cnn", "conditional-autoencoder", "generative-capsnet")
VARIANTS: list[tuple[str, dict]] = [
    *((name, {}) for name in WITH_LABELS_OR_REQUESTS),
    ("generative-capsnet", dict(motion="linear")),
    ("generative-capsnet", dict(motion="linear", preset="shifts", address="learned")),
    ("generative-capsnet:continuous", dict(motion="linear")),
    ("matrix-capsules", dict(routing="VBRouting", likelihood="categorical")),
    ("recurrent-capsules", dict(capsules="every", attention=False)),
    ("recurrent-capsules", dict(capsules="every", likelihood="normal")),
    ("recurrent-capsules", dict(routing=None)),
    ("vae", dict(image_shape=(3, 7, 6), likelihood="bernoulli")),
]
CASES = [
    pytest.param(name, sizes, guide, id="-".join([name, guide, *map(str, sizes.values())]))
    for name, sizes in VARIANTS
    for guide in create(name, **small_settings(name)).guides
]
PARTICLES, IMAGES = 3, 4


def make(name: str, sizes: dict, guide: str) -> Entry:
    pyro.set_rng_seed(0)
    entry = create(name, **{**small_settings(name), **sizes}).use_guide(guide)
    for module in (entry.model, entry.guide):
        module.double().eval()  # or dropout differs from call to call
    return entry


def arguments_for(entry: Entry, labeled: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shape = (IMAGES, *entry.model.image_shape)
    images = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (images, torch.arange(IMAGES) % 2) if labeled else (images,)


def labelings(entry: Entry) -> list[bool]:
    """Return [False, True], without and with labels, if the model knows labels, else [False]."""
    knows = entry.model.supervised or entry.name == "recurrent-capsules"
    return [False, True] if knows else [False]


def on_request(model: Model) -> Callable:
    """Return the model with a different request for each image, if it takes requests."""
    if not isinstance(model, OnRequest):
        return model
    generator = torch.Generator().manual_seed(3)
    request = torch.randn(IMAGES, 2, generator=generator, dtype=torch.float64)
    return partial(model, request=request)


def traced(objective: ELBO, model: Callable, guide: Guide, arguments: tuple) -> tuple:
    """Return the traces of model and guide, with all particles in one."""
    ((model, guide),) = objective._get_traces(model, guide, arguments, {})
    for trace in (model, guide):
        trace.compute_log_prob()
    return prune_subsample_sites(model), prune_subsample_sites(guide)


def particle(trace: poutine.Trace, k: int) -> dict[str, torch.Tensor]:
    """Return the values of one particle, by site."""
    return {name: trace.nodes[name]["value"][k] for name in trace.stochastic_nodes}


def log_densities(
    program: Callable, values: dict, *arguments, **keywords
) -> dict[str, torch.Tensor]:
    """Return the log density of every site of a program without outer plates, (images,) each."""
    conditioned = poutine.condition(program, values)
    trace = prune_subsample_sites(poutine.trace(conditioned).get_trace(*arguments, **keywords))
    trace.compute_log_prob()
    return {n: s["log_prob"] for n, s in trace.nodes.items() if s["type"] == "sample"}


def same_densities(together: poutine.Trace, k: int, alone: dict[str, torch.Tensor]) -> None:
    sites = {n: s for n, s in together.nodes.items() if s["type"] == "sample"}
    assert sites.keys() == alone.keys()
    for name, site in sites.items():
        mine = site["log_prob"].expand(PARTICLES, IMAGES)[k]
        torch.testing.assert_close(mine, alone[name].expand(IMAGES), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "sizes", "guide"), CASES)
def test_every_particle_has_the_densities_that_it_has_alone(name, sizes, guide):
    entry = make(name, sizes, guide)
    for labeled in labelings(entry):
        arguments = arguments_for(entry, labeled)
        objective = Trace_ELBO(PARTICLES, max_plate_nesting=1, vectorize_particles=True)
        requested = on_request(entry.model)
        model, guided = traced(objective, requested, entry.guide, arguments)
        for k in range(PARTICLES):
            values = particle(guided, k)
            assert all(len(value) == IMAGES for value in values.values())
            same_densities(guided, k, log_densities(entry.guide, values, *arguments))
            same_densities(model, k, log_densities(requested, values, *arguments))


@pytest.mark.parametrize(("name", "sizes", "guide"), CASES)
def test_gradients_reach_what_they_reach_without_particles(name, sizes, guide):
    entry = make(name, sizes, guide)
    objective = TraceMeanField_ELBO(PARTICLES, max_plate_nesting=1, vectorize_particles=True)
    arguments = arguments_for(entry, entry.model.supervised)
    reached = []
    for loss in (Trace_ELBO(), objective):
        parameters = [*entry.model.named_parameters(), *entry.guide.named_parameters()]
        for _, parameter in parameters:
            parameter.grad = None
        loss.loss_and_grads(entry.model, entry.guide, *arguments)
        slopes = {n: p.grad for n, p in parameters if p.grad is not None}
        assert all(torch.isfinite(slope).all() for slope in slopes.values())
        reached.append(slopes.keys())
    assert reached[0] == reached[1]


@pytest.mark.parametrize("change", ["moved", "expanded", "in place"])
@pytest.mark.parametrize("name", ["draw", "recurrent-capsules"])
def test_codes_that_were_changed_after_the_guide_are_drawn_again(name, change):
    entry = make(name, {}, "recurrent")
    arguments = arguments_for(entry, name != "draw")
    with torch.no_grad():
        guided = poutine.trace(entry.guide).get_trace(*arguments)
        code = guided.nodes["z_2"]["value"]
        if change == "in place":
            code.add_(1.0)
        else:
            guided.nodes["z_2"]["value"] = code + 1 if change == "moved" else code.expand(1, -1, -1)
        values = {n: guided.nodes[n]["value"] for n in entry.guide.covers}
        fresh = entry.model.image_distribution(entry.model.draw(list(values.values()))).mean
        with pyro.plate("outer", PARTICLES, dim=-2):
            replayed = poutine.replay(entry.model, trace=guided)
            trace = poutine.trace(replayed).get_trace(*arguments)
    mean = trace.nodes["image"]["fn"].mean
    torch.testing.assert_close(mean, fresh.expand(mean.shape), rtol=1e-10, atol=1e-10)


def test_kinds_summed_out_are_the_sum_over_kinds():
    entry = make("generative-capsnet", {}, "variational")
    model, guide = entry.model.discretize(), entry.guide.discretize()
    (images,) = arguments_for(entry, False)
    poses = particle(poutine.trace(guide).get_trace(images), slice(None))
    kind, model = poses.pop("object_kind"), on_request(model)
    expected = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for one in torch.eye(kind.shape[-1], dtype=torch.float64):
            values = {**poses, "object_kind": one.expand_as(kind)}
            log_p, log_q = (log_densities(program, values, images) for program in (model, guide))
            log_q = log_q["object_kind"]
            expected += (log_q.exp() * (log_q - sum(log_p.values()))).sum()
    kinds = poutine.block(poutine.condition(guide, poses), hide=list(poses))
    loss = TraceEnum_ELBO(max_plate_nesting=1).loss(
        poutine.condition(model, poses), config_enumerate(kinds, "parallel"), images
    )
    torch.testing.assert_close(torch.tensor(loss, dtype=torch.float64), expected)


def test_the_mixture_of_votes_has_the_same_free_energy_for_every_particle():
    torch.manual_seed(0)
    layer = SwitchableGaussians(5, 3, 4, beta_u=-4.0, noise=0.1).double()
    guide = config_enumerate(RoutedParents(layer, EMRouting(2, anneal=0)), "parallel")
    votes = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    presence = torch.rand(2, 5, dtype=torch.float64)
    one = TraceEnum_ELBO(max_plate_nesting=2)
    several = TraceEnum_ELBO(PARTICLES, max_plate_nesting=2, vectorize_particles=True)
    losses = [objective.loss(layer, guide, votes, presence) for objective in (one, several)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


@pytest.mark.parametrize("labeled", [False, True])
@pytest.mark.parametrize(("name", "sizes", "guide"), CASES)
def test_autocast_to_half_the_digits_changes_little(name, sizes, guide, labeled):
    entry = make(name, sizes, guide)
    if labeled not in labelings(entry):
        pytest.skip("the model knows no labels")
    for module in (entry.model, entry.guide):
        module.float()
    images, *labels = arguments_for(entry, labeled)
    arguments = (images.float(), *labels)
    losses = []
    for enabled in (False, True):
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = loss_per_image(entry.objective, entry.model, entry.guide, *arguments)
        loss.backward()
        losses.append(loss.item())
    parameters = [*entry.model.parameters(), *entry.guide.parameters()]
    assert all(torch.isfinite(p.grad).all() for p in parameters if p.grad is not None)
    assert losses[1] == pytest.approx(losses[0], rel=0.05, abs=0.05)
