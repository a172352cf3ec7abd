"""Check whether the log weight of a pair is a bound, and name the bounded quantity."""

from collections.abc import Callable

from pyro.distributions import Unit
from pyro.poutine import Trace
from torch import as_tensor

from capsule_zoo.inference.check import is_delta, is_discrete, latent_sites
from capsule_zoo.models.common.trace_density import scored_sites


def point_sites(model_trace: Trace, guide_trace: Trace) -> set[str]:
    """Return the continuous sites at which the guide is a Delta and so has no density.

    The Deltas of Pyro's AutoGuides carry the density of an auxiliary site. If that site has a
    density, they are not counted. The auxiliary site belongs to one site (`<site>_unconstrained`,
    `<site>_aux`) or to all.
    """
    wanted, drawn = latent_sites(model_trace), latent_sites(guide_trace)
    dense = {
        name
        for name, site in drawn.items()
        if site["infer"].get("is_auxiliary") and not is_delta(site["fn"])
    }
    auxiliaries = {name: {f"{name}_unconstrained", f"{name}_aux"} for name in wanted}
    shared = dense.difference(*auxiliaries.values())
    return {
        name
        for name, site in drawn.items()
        if name in wanted and is_delta(site["fn"]) and not is_discrete(wanted[name]["fn"])
        if not shared and not auxiliaries[name] & dense
    }


def not_a_bound(model: Callable, model_trace: Trace, points: set[str]) -> list[str]:
    """Return every reason why the log weights are not a bound; an empty list if they are."""
    reasons = []
    if points:
        reasons.append(f"the guide places points at {', '.join(sorted(points))}")
    if not getattr(model, "normalized", True):
        reasons.append("the model is not normalized")
    scaled = [n for n, s in scored_sites(model_trace).items() if (s["scale"] != as_tensor(1)).any()]
    if scaled:
        reasons.append(f"densities are scaled, as by plates that subsample: {', '.join(scaled)}")
    label = model_trace.nodes.get("label")
    if label is not None and label["type"] == "sample" and isinstance(label["fn"], Unit):
        reasons.append("labels enter as a factor, not as a distribution")
    return reasons


def bound_on(model: Callable, model_trace: Trace, presence: str) -> str:
    """Return the name of the quantity that the log weights bound, see `evaluate`."""
    if getattr(model, "supervised", False):
        return "log p(label | image)"
    observed = [
        name
        for name, site in model_trace.nodes.items()
        if site["type"] == "sample" and site["is_observed"] and not isinstance(site["fn"], Unit)
    ]
    suffix = " of the relaxed model" if presence == "relaxed" else ""
    return f"log p({', '.join(sorted(observed))}){suffix}"
