"""The latent sites of a traced program, and its log density, image by image."""

from collections import OrderedDict

from pyro.ops.contract import contract_tensor_tree
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor

IMAGES_PLATE = "images"


def latent_sites(trace: Trace) -> dict[str, dict]:
    """Return the unobserved sample sites of a trace, by name."""
    return {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site["is_observed"] and not site_is_subsample(site)
    }


def log_score(trace: Trace, images: Tensor) -> Tensor:
    """Return the log density of draws without a gradient of their own, (B,), in nats.

    Args:
        images: (B, C, H, W).
    """
    drawn = [site for site in latent_sites(trace).values() if not site["fn"].has_rsample]
    terms = [site["fn"].log_prob(site["value"]).reshape(len(images), -1).sum(1) for site in drawn]
    return sum(terms, images.new_zeros(len(images)))


def log_density(trace: Trace, images: Tensor) -> Tensor:
    """Return the log density of everything in a trace, image by image.

    Sites that were enumerated in parallel are summed out exactly.

    Args:
        trace: the trace of a program that was run on `images`.
        images: (B, C, H, W).

    Returns:
        (B,), in nats.

    Raises:
        ValueError: a site lies outside the plate "images", and there are several.
    """
    trace = prune_subsample_sites(trace)
    trace.compute_log_prob()
    trace.pack_tensors()
    plates = set(trace.plate_to_symbol.values())
    terms: list[Tensor] = []
    factors: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
    summed: set[str] = set()
    for name, site in trace.nodes.items():
        if site["type"] != "sample":
            continue
        frames = [frame.name for frame in site["cond_indep_stack"] if frame.vectorized]
        if IMAGES_PLATE not in frames and len(images) > 1:
            raise ValueError(
                f"site {name!r} lies outside the plate {IMAGES_PLATE!r}, so its density belongs "
                "to no one image; draw it inside pyro.plate('images', ...), make it a parameter, "
                "or evaluate one image at a time"
            )
        term = site["packed"]["log_prob"]
        if chosen := set(term._pyro_dims) - plates:
            summed |= chosen
            ordinal = frozenset(trace.plate_to_symbol[frame] for frame in frames)
            factors.setdefault(ordinal, []).append(term)
        else:
            terms.append(term)
    contracted = contract_tensor_tree(factors, summed)
    terms += [term for group in contracted.values() for term in group]
    kept = trace.plate_to_symbol.get(IMAGES_PLATE)
    return sum((_sum_all_but(kept, term) for term in terms), images.new_zeros(len(images)))


def _sum_all_but(kept: str | None, term: Tensor) -> Tensor:
    """Sum a packed tensor over every dim but one; packing has dropped the dims of size 1."""
    symbols = term._pyro_dims  # type: ignore[attr-defined]  # left there by packing
    others = [dim for dim, symbol in enumerate(symbols) if symbol != kept]
    return term.sum(others) if others else term
