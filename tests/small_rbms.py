"""Small capsule RBMs, with their energy written out as in the paper, for brute force."""

import math

import machines
import torch

from capsule_zoo.models import RBM, CapsuleRBM

PAIRS = [
    ("bernoulli", "bernoulli"),
    ("bernoulli", "gaussian"),
    ("bernoulli", "poisson"),
    ("gaussian", "bernoulli"),
    ("gaussian", "gaussian"),
    ("poisson", "bernoulli"),
    ("poisson", "poisson"),
]


def randomized(model, scale=0.6):
    """Return the model in float64, with the same random values of its parameters on every call."""
    torch.manual_seed(3)
    return machines.randomized(model, scale)


def small(visible_family="bernoulli", hidden_family="bernoulli", kind=CapsuleRBM):
    """Return a machine whose every state can be listed: binary sides have more units."""
    units = 2 if hidden_family == "bernoulli" else 1
    visible = (1, 2, 2) if (visible_family, hidden_family) == ("bernoulli", "bernoulli") else 1
    families = dict(visible_family=visible_family, hidden_family=hidden_family)
    if kind is RBM:
        return randomized(RBM(visible, 2 * units, **families))
    return randomized(CapsuleRBM(visible, 2, units, **families))


def binary_images(number=12):
    """Return binary images of 2x2 pixels, the same ones on every call."""
    torch.manual_seed(4)
    return torch.randint(2, (number, 1, 2, 2)).double()


def support(family):
    """Return every value of a unit, and the log of the measure that each represents."""
    if family == "bernoulli":
        return torch.arange(2.0, dtype=torch.float64), 0.0
    if family == "poisson":
        return torch.arange(50.0, dtype=torch.float64), 0.0
    return torch.linspace(-30, 30, 121, dtype=torch.float64), math.log(0.5)


def states(family, *shape):
    """Return all values of units of this shape, (states, *shape), and their log measure."""
    values, log_measure = support(family)
    count = math.prod(shape)
    listed = torch.cartesian_prod(*[values] * count).view(-1, *shape)
    return listed, log_measure * count


def switches(model):
    """Return all values of the switches, (states, K)."""
    if not model.switched:
        return torch.ones(1, 1, dtype=torch.float64)
    return machines.binary(model.num_capsules)


def log_base_measure(units, family, value):
    if family == "gaussian":
        return -0.5 * units.precision * value**2
    return -torch.lgamma(value + 1) if family == "poisson" else torch.zeros_like(value)


def negative_energy(model, families, x, z, h):
    """Compute -E(x, h, z) with the paper's sums; x (..., C, H, W), z (..., K), h (..., K, J)."""
    visible, hidden = model.visible, model.hidden
    terms = visible.bias * x + log_base_measure(visible, families[0], x)
    total = terms.flatten(-3).sum(-1)
    terms = hidden.bias * h + log_base_measure(hidden, families[1], h)
    total = total + terms.flatten(-2).sum(-1)
    pixels = x.flatten(-3)
    for k in range(model.num_capsules):
        for j in range(model.num_units):
            total = total + z[..., k] * (pixels @ model.weight[:, k, j]) * h[..., k, j]
        if model.switched:
            total = total + z[..., k] * (model.switch_bias[k] + pixels @ model.switch_weight[:, k])
    return total


def table_given(model, families, x):
    """Return -E of every (z, h) for one image (C, H, W): energies (Z, H), z, h, log measure."""
    z = switches(model)
    h, log_measure = states(families[1], model.num_capsules, model.num_units)
    energies = negative_energy(model, families, x[None, None], z[:, None], h[None])
    return energies + log_measure, z, h


def log_masses(model, families):
    """Compute log sum_{z, h} exp(-E) of every image (with its measure); return the images too."""
    images, log_measure = states(families[0], *model.image_shape)
    rows = [table_given(model, families, x)[0].flatten().logsumexp(0) for x in images]
    return torch.stack(rows) + log_measure, images
