"""Refusal of Pyro programs that cannot be a model of the zoo, with remedies."""

from collections.abc import Mapping
from typing import Any

from pyro.distributions import Unit
from pyro.distributions.torch import Independent
from torch import Tensor

from capsule_zoo.guides.per_image.site_distributions import base_distribution
from capsule_zoo.inference.check import is_discrete


class UnservedProgram(ValueError):
    """The error for a program that is not supported; one line names the site and the remedy."""


def refuse_unserved(program: str, sites: Mapping[str, dict]) -> None:
    """Raise UnservedProgram, naming the first site that is not supported.

    Args:
        program: name of the program.
        sites: its sites in a first run, by name.
    """
    if all(site["is_observed"] for site in sites.values()):
        raise UnservedProgram(
            f"{program} has no latent site, so that there is nothing to infer; draw one by "
            "pyro.sample without obs="
        )
    if not any(site["is_observed"] for site in sites.values()):
        raise UnservedProgram(
            f"{program} observes no site, so that there is no data to explain; pass obs= to a "
            'pyro.sample, or give its values by name, {"site": values}'
        )
    for name, site in sites.items():
        if reason := _problem(site):
            raise UnservedProgram(f"site {name!r} of {program} {reason}")


def _problem(site: dict) -> str:
    """Return why a site is not supported, and the remedy; "" if it is."""
    distribution = site["fn"]
    if isinstance(base_distribution(distribution), Unit):
        return (
            "is a pyro.factor, so that the joint density is not normalized and log p(data) has no "
            "meaning; write it as pyro.sample(..., obs=...)"
        )
    for frame in site["cond_indep_stack"]:
        if frame.full_size is not None and frame.size != frame.full_size:
            return (
                f"lies in plate {frame.name!r}, which subsamples {frame.size} of "
                f"{frame.full_size}; leave out subsample_size"
            )
    if isinstance(site["scale"], Tensor) or site["scale"] != 1:
        return "is scaled by poutine.scale, so that its density is not normalized; leave it out"
    shape = distribution.batch_shape
    plate_dims = {frame.dim for frame in site["cond_indep_stack"] if frame.vectorized}
    bare = [dim for dim in range(-len(shape), 0) if shape[dim] > 1 and dim not in plate_dims]
    if bare:
        return (
            f"has a batch dim of {shape[bare[0]]} outside of any plate; write .to_event"
            f"({-bare[0]}), or draw it within pyro.plate"
        )
    if site["is_observed"]:
        value = site["value"]
        if not isinstance(value, Tensor) or value.isinf().any():
            return "observes values that are not finite numbers; NaN may mark missing ones"
        return _misfit(distribution, value)
    if is_discrete(distribution) and not distribution.has_enumerate_support:
        return (
            f"is drawn from {_family(distribution)}, whose discrete values are "
            "countless, so that they cannot be summed out; sum them out by hand, or draw a "
            "Categorical"
        )
    return ""


def _family(distribution: Any) -> str:
    return type(base_distribution(distribution)).__name__


def _misfit(distribution: Any, value: Tensor) -> str:
    """Return why a distribution has no density at an observed value; "" if it has."""
    shape, form = tuple(distribution.shape()), tuple(value.shape)
    if len(form) > len(shape) or any(
        size not in (1, whole) for size, whole in zip(form[::-1], shape[::-1], strict=False)
    ):
        return f"observes values of shape {form}, but draws {shape}; give data of that shape"
    missing = value.isnan().expand(shape)
    rank = distribution.event_dim
    if rank and missing.any():
        part = missing.flatten(-rank)
        independent = (
            isinstance(distribution, Independent) and distribution.reinterpreted_batch_ndims == rank
        )
        if not independent and bool((part.any(-1) != part.all(-1)).any()):
            return (
                f"is drawn from {_family(distribution)}, of which a part cannot be "
                "missing; give independent values by .to_event, or leave these rows out"
            )
    return ""
