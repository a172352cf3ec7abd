"""The choice of discrete sites of a program that can be summed out exactly, in parallel."""

from typing import TYPE_CHECKING

from pyro import poutine
from pyro.poutine.enum_messenger import EnumMessenger
from torch import Tensor

from capsule_zoo.guides.per_image.base import families_of
from capsule_zoo.guides.per_image.site_distributions import UnservedSite
from capsule_zoo.inference.examination.refusals import UnservedProgram
from capsule_zoo.inference.log_weight import plate_nesting
from capsule_zoo.models.common.trace_density import scored_sites

if TYPE_CHECKING:
    from capsule_zoo.inference.examination.program import ProgramModel


def enumerate_sites(model: "ProgramModel", rows: Tensor) -> "ProgramModel":
    """Return the model with those discrete sites summed out for which the sum is exact.

    Raises:
        UnservedProgram: a site can neither be summed out nor be drawn by a guide.
    """
    discrete = {site.name for site in model.sites if site.discrete}
    if discrete:
        model = model.enumerating(discrete)
        wrong = read_outside(model, rows[:1])
        model = model.enumerating(discrete - wrong) if wrong else model
    if not model.latent_sites:  # a guide needs a site to sample
        model = model.enumerating(set())
    try:
        families_of(model)
    except UnservedSite as error:
        raise UnservedProgram(str(error)) from None
    return model


def read_outside(model: "ProgramModel", rows: Tensor) -> set[str]:
    """Return the enumerated sites used outside of their plates, where sums would be wrong."""
    nesting = plate_nesting(poutine.trace(model).get_trace(rows))
    try:
        trace = poutine.trace(EnumMessenger(-1 - nesting)(model)).get_trace(rows)
        trace.compute_log_prob()
        trace.pack_tensors()
    except (ValueError, RuntimeError, IndexError):  # shapes of all values of a site do not fit
        return {site.name for site in model.sites if site.enumerated}
    sites = scored_sites(trace)
    plates = {
        name: {f.name for f in site["cond_indep_stack"] if f.vectorized}
        for name, site in sites.items()
    }
    result = set()
    for name in [site.name for site in model.sites if site.enumerated]:
        infer = sites[name]["infer"]
        symbol = infer["_dim_to_symbol"][infer["_enumerate_dim"]]
        for other, site in sites.items():
            read = symbol in site["packed"]["log_prob"]._pyro_dims
            if read and plates[name] - plates[other]:
                result.add(name)
    return result
