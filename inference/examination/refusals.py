"""Refusal of Pyro programs that cannot be a model of the zoo, with remedies."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pyro.distributions import Unit
from pyro.distributions.torch import Independent
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints

from capsule_zoo.guides.per_image.site_distributions import base_distribution
from capsule_zoo.inference.check import is_discrete, one_line
from capsule_zoo.models.common.trace_density import is_masked


class UnservedProgram(ValueError):
    """The error for a program that is not supported; one line names the site and the remedy."""


class Statements(Messenger):
    """The messenger that follows the sample statements of a program.

    Attributes:
        place: the statement at which, or after which, the program is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = "before its first site"

    def _pyro_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg):
            self.place = f"at site {msg['name']!r}"

    def _pyro_post_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg):
            self.place = f"after site {msg['name']!r}"

    def describe(self, error: Exception, data: Iterable[Any] = ()) -> str:
        """Return where an error stopped the program, and the error, in a few words.

        Args:
            data: the arguments of the program.
        """
        cause = one_line(error).partition(". We don't support")[0]  # of vmap
        cause = re.sub(r"\(\w+: torch\.Size.*\]\)\)", "", cause)  # shapes of all parameters
        gaps = any(isinstance(value, Tensor) and bool(value.isnan().any()) for value in data)
        remedy = "; NaN may mark observed values alone" if gaps and "invalid" in cause else ""
        return f"it stops {self.place} ({type(error).__name__}: {cause}){remedy}"


def original(error: Exception) -> BaseException:
    """Return the error of a program, without the table of shapes that Pyro's traces add."""
    cause = error.__cause__
    return cause if cause is not None and "Trace Shapes:" in str(error) else error


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
    if not site["is_observed"] and is_masked(site):
        return (
            "is a latent under a mask, so that its density is not normalized; mask observed sites "
            "alone (a latent that no data depend on integrates to 1), or mark missing data by NaN "
            "in place of obs_mask"
        )
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
    if is_discrete(distribution):
        try:
            distribution.enumerate_support(expand=False)
        except NotImplementedError as error:
            return (
                f"is drawn from {_family(distribution)}, whose values differ from row to row "
                f"({one_line(error)}), so that they cannot be summed out; draw a Categorical over "
                "all values, with the probability 0 where there is none"
            )
    return ""


def _family(distribution: Any) -> str:
    return type(base_distribution(distribution)).__name__


def _invalid_value(distribution: Any, value: Tensor) -> str:
    """Return which observed value a distribution cannot draw, at any parameters; "" if none."""
    base = base_distribution(distribution)
    fixed = is_discrete(distribution) or not constraints.is_dependent(type(base).support)
    if not fixed or not base._validate_args:  # by Pyro's setting, or of this distribution
        return ""
    rank = base.support.event_dim
    value = value.expand(distribution.shape())
    missing = value.isnan().flatten(-rank).any(-1) if rank else value.isnan()
    bad = ~(base.support.check(value) | missing)
    if not bad.any():
        return ""
    example = f", such as {value[bad][0].item():.4g}" if bad.shape == value.shape else ""
    return (
        f"observes values that {_family(distribution)} does not draw{example}; give values in "
        f"{base.support}, or pass validate_args=False to the distribution to keep these"
    )


def _misfit(distribution: Any, value: Tensor) -> str:
    """Return why a distribution has no density at an observed value; "" if it has."""
    shape, form = tuple(distribution.shape()), tuple(value.shape)
    if len(form) > len(shape) or any(
        size not in (1, whole) for size, whole in zip(form[::-1], shape[::-1], strict=False)
    ):
        return f"observes values of shape {form}, but draws {shape}; give data of that shape"
    if reason := _invalid_value(distribution, value):
        return reason
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
