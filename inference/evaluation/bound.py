"""Check whether the log weight of a pair is a bound, and name the bounded quantity."""

from collections.abc import Callable, Mapping

from pyro.distributions import Unit
from pyro.poutine import Trace
from torch import as_tensor
from torch.distributions import biject_to

from capsule_zoo.inference.check import is_delta, is_discrete, latent_sites
from capsule_zoo.models.common.trace_density import is_deterministic, scored_sites


def point_sites(model_trace: Trace, guide_trace: Trace) -> set[str]:
    """Return the continuous sites at which the guide is a Delta and so has no density.

    The Deltas of Pyro's AutoGuides carry the density of an auxiliary site. If that site has a
    density, they are not counted. The auxiliary site belongs to one site (`<site>_unconstrained`,
    `<site>_aux`), or to all that have no such site, and then has as many numbers as these.
    """
    wanted, drawn = latent_sites(model_trace), latent_sites(guide_trace)
    dense = _dense_auxiliaries(drawn)
    auxiliaries = {name: {f"{name}_unconstrained", f"{name}_aux"} for name in wanted}
    points = {
        name
        for name, site in drawn.items()
        if name in wanted and is_delta(site["fn"]) and not is_discrete(wanted[name]["fn"])
        if not auxiliaries[name] & dense
    }
    shared = dense.difference(*auxiliaries.values())
    size = sum(drawn[name]["value"].numel() for name in shared)
    return set() if size == sum(_free_size(wanted[n], drawn[n]) for n in points) else points


def stray_auxiliaries(model_trace: Trace, guide_trace: Trace) -> set[str]:
    """Return auxiliary sites of a guide that have a density, where no Delta carries its draws."""
    wanted, drawn = latent_sites(model_trace), latent_sites(guide_trace)
    carried = any(n in drawn and is_delta(drawn[n]["fn"]) for n in wanted)
    return set() if carried else _dense_auxiliaries(drawn)


def _dense_auxiliaries(drawn: Mapping[str, dict]) -> set[str]:
    """Return the names of auxiliary sites that have a density."""
    return {
        name
        for name, site in drawn.items()
        if site["infer"].get("is_auxiliary") and not is_delta(site["fn"])
    }


def _free_size(wanted: dict, drawn: dict) -> int:
    """Return the number of free numbers in a site's value: n - 1 of n that sum to 1."""
    try:
        return biject_to(wanted["fn"].support).inv(drawn["value"]).numel()
    except NotImplementedError:  # a support without a transform has all of its numbers free
        return drawn["value"].numel()


def not_a_bound(
    model: Callable, model_trace: Trace, guide_trace: Trace, points: set[str]
) -> list[str]:
    """Return every reason why the log weights are not a bound; an empty list if they are."""
    reasons = []
    if points:
        reasons.append(f"the guide places points at {', '.join(sorted(points))}")
    if strays := stray_auxiliaries(model_trace, guide_trace):
        reasons.append(f"the guide draws {', '.join(sorted(strays))}, which the model does not")
    if not getattr(model, "normalized", True):
        reasons.append("the model is not normalized")
    scaled = [n for n, s in scored_sites(model_trace).items() if (s["scale"] != as_tensor(1)).any()]
    if scaled:
        reasons.append(f"densities are scaled, as by plates that subsample: {', '.join(scaled)}")
    factors = {n for n, s in model_trace.nodes.items() if isinstance(s.get("fn"), Unit)}
    if "label" in factors:
        reasons.append("labels enter as a factor, not as a distribution")
    elif factors and not hasattr(model, "normalized"):
        reasons.append(f"{', '.join(sorted(factors))} is a factor, and no distribution")
    return reasons


def bound_on(model: Callable, model_trace: Trace, presence: str) -> str:
    """Return the name of the quantity that the log weights bound, see `evaluate`."""
    if getattr(model, "supervised", False):
        return "log p(label | image)"
    observed = [
        name
        for name, site in model_trace.nodes.items()
        if site["type"] == "sample" and site["is_observed"] and not isinstance(site["fn"], Unit)
        if not is_deterministic(site)
    ]
    suffix = " of the relaxed model" if presence == "relaxed" else ""
    return f"log p({', '.join(sorted(observed))}){suffix}"
