"""Machines small enough to be summed by hand, with exact values computed without their own code.

The capsule RBM is summed from its energy as the paper writes it. Models with binary latents are
listed state by state. A chain of single capsules has an exact recognition half in closed form.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import pyro
import torch
import torch.nn.functional as F
from pyro import distributions as dist
from pyro import poutine
from pyro.poutine import Trace
from torch import Tensor, nn

from capsule_zoo.guides import Guide, RecognitionMachine
from capsule_zoo.guides.recognition import RecognitionLayer
from capsule_zoo.inference.calibration import Outcome, calibration_of
from capsule_zoo.inference.log_weight import log_density
from capsule_zoo.models import CapsuleHelmholtzMachine, CapsuleRBM
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.units.exponential_family import BernoulliUnits, GaussianUnits, Units

Values = Mapping[str, Tensor]
AnyModule = TypeVar("AnyModule", bound=nn.Module)
GAUSSIANS: dict[str, Any] = dict(visible_family="gaussian", hidden_family="gaussian")
DRAWS = 31  # from the posterior for each draw from the prior


def randomized(module: AnyModule, scale: float = 0.8) -> AnyModule:
    """Return the module in float64, with new random values for every parameter."""
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn_like(parameter))
    if isinstance(module, CapsuleRBM):
        module.keep_normalizable()
    return module


def shifted(module: AnyModule, scale: float = 0.3) -> AnyModule:
    """Return the module with every parameter moved at random, away from where it starts."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += scale * torch.randn_like(parameter)
    return module


def binary(*shape: int) -> Tensor:
    """Return all binary values of a shape, (states, *shape)."""
    listed = list(itertools.product([0.0, 1.0], repeat=math.prod(shape)))
    return torch.tensor(listed, dtype=torch.float64).view(-1, *shape)


def energy_machine(
    kind: type[CapsuleRBM] = CapsuleRBM, scale: float = 0.8, **options: Any
) -> CapsuleRBM:
    """Return a capsule RBM (2x2 pixels, two capsules of two units), or an RBM of three units."""
    sizes = (2, 2) if kind.switched else (3,)
    return randomized(kind((1, 2, 2), *sizes, **options), scale)


def helmholtz_pair(
    *sizes: Any, scale: float = 0.8, **options: Any
) -> tuple[CapsuleHelmholtzMachine, RecognitionMachine]:
    """Return a Helmholtz machine and its guide, with the same random parameters on every call."""
    torch.manual_seed(3)
    model = CapsuleHelmholtzMachine(*sizes, **options).double()
    guide = RecognitionMachine(model)
    return randomized(model, scale), randomized(guide, scale)


# The capsule RBM, from its energy


def exact_draws(model: CapsuleRBM, number: int, beta: float = 1.0) -> tuple[dict, Tensor]:
    """Draw capsules, by site, and images (number, C, H, W) independently from exp(-E) / Z.

    Pixels and switches are listed, and the hidden units are integrated out. If pixels are Gaussian,
    the hidden units are Gaussian too, and given the switches both have one joint Gaussian.

    Args:
        beta: factor of the couplings.
    """
    with torch.no_grad():
        if isinstance(model.visible, GaussianUnits):
            switch, pixels, hidden = _gaussian_draws(model, number)
        else:
            pixels, switch, log_mass, field = masses(model, beta)
            indices = torch.multinomial(log_mass.softmax(0), number, replacement=True)
            pixels, switch = pixels[indices], switch[indices]
            hidden = _conjugate(model.hidden, field[indices])[1].sample()
    values = {"capsule_switch": switch} if model.switched else {}
    return {**values, "capsule_hidden": hidden}, pixels.unflatten(1, model.image_shape)


def masses(model: CapsuleRBM, beta: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List x, z, log sum_h exp(-E) and b + z m for every pair of binary image and switches."""
    count, capsules, _ = model.weight.shape
    switches = binary(capsules) if model.switched else torch.ones(1, 1).double()
    pairs = torch.cartesian_prod(torch.arange(2**count), torch.arange(len(switches)))
    pixels, switch = binary(count)[pairs[:, 0]], switches[pairs[:, 1]]
    pull = beta * torch.einsum("sm,mkj->skj", pixels, model.weight)
    field = model.hidden.bias + switch[..., None] * pull
    log_mass = pixels @ model.visible.bias.flatten() + _conjugate(model.hidden, field)[0]
    if model.switched:
        coupled = beta * torch.einsum("sm,mk,sk->s", pixels, model.switch_weight, switch)
        log_mass = log_mass + switch @ model.switch_bias + coupled
    return pixels, switch, log_mass, field


def _conjugate(units: Units, natural: Tensor) -> tuple[Tensor, dist.TorchDistribution]:
    """Return log sum_h exp(natural h + log base(h)), (states,), and the units' distribution."""
    if isinstance(units, BernoulliUnits):
        log_sums, distribution = F.softplus(natural), dist.Bernoulli(logits=natural)
    elif isinstance(units, GaussianUnits):
        precision = units.log_precision.exp()
        log_sums = natural**2 / (2 * precision) + (2 * math.pi / precision).log() / 2
        distribution = dist.Normal(natural / precision, precision**-0.5)
    else:
        log_sums, distribution = natural.exp(), dist.Poisson(natural.exp())
    return log_sums.sum((-2, -1)), distribution


def _gaussian_draws(model: CapsuleRBM, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw switches, and pixels and hidden units, which are Gaussian given the switches."""
    count, capsules, units = model.weight.shape
    switch = binary(capsules)  # (states, K)
    coupling = (model.weight * switch[:, None, :, None]).flatten(2)
    scale = torch.cat([u.log_precision.exp().flatten() for u in (model.visible, model.hidden)])
    precision = torch.diag(scale).repeat(len(switch), 1, 1)
    precision[:, :count, count:], precision[:, count:, :count] = -coupling, -coupling.mT
    bias = model.visible.bias.flatten() + switch @ model.switch_weight.T
    bias = torch.cat([bias, model.hidden.bias.flatten().expand(len(switch), -1)], 1)
    distribution = dist.MultivariateNormal(
        torch.linalg.solve(precision, bias[..., None])[..., 0], precision_matrix=precision
    )
    log_mass = (
        (bias * distribution.mean).sum(1) / 2 - precision.logdet() / 2 + switch @ model.switch_bias
    )
    indices = torch.multinomial(log_mass.softmax(0), number, replacement=True)
    pixels, hidden = distribution.sample((number,))[torch.arange(number), indices].tensor_split(
        [count], 1
    )
    return switch[indices], pixels, hidden.unflatten(1, (capsules, units))


# Models with binary latents, state by state


def replay_trace(values: Values) -> Trace:
    """Return a trace of these values for `poutine.replay`; the other sites will be drawn."""
    trace = Trace()
    for name, value in values.items():
        trace.add_node(name, name=name, type="sample", value=value, is_observed=False, infer={})
    return trace


def log_joint(model: Model, values: Values, images: Tensor) -> Tensor:
    """Compute log p(x, z), (B,), in nats, up to the model's own constant."""
    trace = poutine.trace(poutine.replay(model, trace=replay_trace(values))).get_trace(images)
    return log_density(trace, images)


def values_of(guide: Guide, images: Tensor, seed: int = 0, **settings: Any) -> dict[str, Tensor]:
    """Return what a guide draws for images with a seed, by site."""
    torch.manual_seed(seed)
    nodes = poutine.trace(guide).get_trace(images, **settings).nodes
    return {name: site["value"] for name, site in nodes.items() if name in guide.covers}


def list_states(model: Model, guide: nn.Module, images: Tensor) -> tuple[dict, Tensor, Tensor]:
    """List all values of the binary sites, (states, ...), with their log p and log q, (states, B).

    The other sites of the guide have to be points, which may depend on the binary sites.
    """
    sites = [site.name for site in model.latent_sites if site.discrete]
    with torch.no_grad(), poutine.block():
        nodes = poutine.trace(guide).get_trace(images[:1]).nodes
    shapes = {name: nodes[name]["value"].shape[1:] for name in sites}
    columns = binary(sum(shape.numel() for shape in shapes.values()))
    parts = columns.split([shape.numel() for shape in shapes.values()], 1)
    values = {n: p.unflatten(1, s) for (n, s), p in zip(shapes.items(), parts, strict=True)}
    trace = replay_trace({name: v.repeat_interleave(len(images), 0) for name, v in values.items()})
    repeated = images.repeat(len(columns), 1, 1, 1)
    proposed = poutine.trace(poutine.replay(guide, trace=trace)).get_trace(repeated)
    scored = poutine.trace(poutine.replay(model, trace=proposed)).get_trace(repeated)
    log_p, log_q = (log_density(trace_sites, repeated) for trace_sites in (scored, proposed))
    return values, log_p.view(-1, len(images)), log_q.view(-1, len(images))


def at(sites: Iterable[Site], dims: Mapping[str, int], values: Values) -> Callable[..., None]:
    """Return a guide that puts all its mass on these values, (B, ...) by site."""

    def guide(images: Tensor, labels: Tensor | None = None) -> None:
        covered = [site for site in sites if not site.enumerated]
        sizes = {
            plate: size
            for site in covered
            for plate, size in zip(site.plates, values[site.name].shape, strict=False)
        }
        plates = {name: pyro.plate(name, size, dim=dims[name]) for name, size in sizes.items()}
        for site in covered:
            with ExitStack() as stack:
                for name in site.plates:
                    stack.enter_context(plates[name])
                pyro.sample(site.name, dist.Delta(values[site.name], event_dim=site.event_dim))

    return guide


# Exact recognition


def chain_machine() -> tuple[CapsuleHelmholtzMachine, RecognitionMachine]:
    """Return two layers of one capsule with one binary unit, and a guide with the exact posterior.

    Given a state (z, h) below, the log-odds of the states above are linear in it, as in a
    recognition layer. The biases e and c account for the cost of the states above. Let L(z, h) be
    the log prior of a layer minus the log-partition of the layer below it. Then

        e = L(1, 1) - L(1, 0) - b,    c = L(1, 0) - log[exp L(0, 0) + exp L(0, 1)] + B(b).
    """
    model = randomized(CapsuleHelmholtzMachine((1, 1, 3), (1, 1), 1), 1.2)
    guide = RecognitionMachine(model, centered=False).double()
    top, lower = model.layers
    for layer, push in ((top, -1.0), (lower, -2.0)):
        layer.switch_bias.data.fill_(push)
    lower.coupling.switch_weight.data.add_(4)  # otherwise the top layer hardly affects the image
    z, h = binary(2).T  # (4,) each: 00, 01, 10, 11

    def log_distribution(switch: Tensor, hidden: Tensor, z: Tensor, h: Tensor) -> Tensor:
        """Return log p(z, h) from the natural parameters of the switch and of the unit if on."""
        return z * switch - F.softplus(switch) + h * hidden - F.softplus(hidden)

    with torch.no_grad():
        bias, told = lower.hidden.bias.squeeze(), lower.coupling.weight.squeeze()
        pull, push = z * h * told, z * lower.coupling.switch_weight.squeeze()
        off, on = F.softplus(bias), F.softplus(bias + pull)
        odds = lower.switch_bias.squeeze() + push
        spent = F.softplus(odds + on - off) + off  # lower layer, given (z, h) of the top
        log_top = log_distribution(top.switch_bias.squeeze(), top.hidden.bias.squeeze(), z, h)
        _recognize(
            guide.layers[1], log_top - spent, top.hidden.bias, told, lower.coupling.switch_weight
        )
        below = torch.stack(
            [  # the lower layer's distribution, with the top summed out
                (log_top + i * odds + j * (bias + i * pull) - spent).logsumexp(0)
                for i, j in zip(z, h, strict=True)
            ]
        )
        weight, gate = model.weight[:, 0, 0], model.switch_weight[:, 0]
        field = model.visible.bias.flatten() + z[:, None] * (gate + h[:, None] * weight)
        _recognize(
            guide.layers[0], below - F.softplus(field).sum(1), lower.hidden.bias, weight, gate
        )
    return model, guide


def _recognize(
    layer: RecognitionLayer, distribution: Tensor, bias: Tensor, weight: Tensor, gate: Tensor
) -> None:
    """Write e, c and the mirrored couplings into a recognition layer; `distribution` is L, (4,)."""
    layer.coupling.weight.copy_(weight.reshape(layer.coupling.weight.shape))
    layer.coupling.switch_weight.copy_(gate.reshape(layer.coupling.switch_weight.shape))
    layer.hidden_bias.copy_(distribution[3] - distribution[2] - bias)
    layer.switch_bias.copy_(
        distribution[2] - distribution[:2].logsumexp(0) + F.softplus(bias).squeeze()
    )


# Calibration of a guide


def calibrated(
    model: Model, guide: Callable, values: Values, images: Tensor, draws: int = DRAWS
) -> Outcome:
    """Test the ranks of prior draws among a guide's draws, for all sites and the log joint.

    Args:
        values: draws of the model's latents, (N, ...) by site.
        images: images drawn with these latents, (N, C, H, W).
    """
    return calibration_of(model, guide, values, images, draws).outcome


@torch.no_grad()
def prior_draws(model: Model, number: int) -> tuple[dict, Tensor]:
    """Draw all latents of a model, by site, and the images, (number, C, H, W)."""
    nodes = poutine.trace(model).get_trace(batch_size=number).nodes
    sites = {site.name: nodes[site.name]["value"] for site in model.sites}
    return sites, nodes["_RETURN"]["value"]
