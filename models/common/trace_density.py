"""The latent sites of a trace, and its log density for each image."""

from collections import OrderedDict
from collections.abc import Mapping

import torch
from pyro.distributions import Delta, MaskedDistribution
from pyro.distributions.util import scale_and_mask
from pyro.ops.contract import contract_tensor_tree
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

IMAGES_PLATE = "images"


def latent_sites(trace: Trace) -> dict[str, dict]:
    """Return the unobserved sample sites of a trace, by name."""
    return {name: site for name, site in scored_sites(trace).items() if not site["is_observed"]}


def scored_sites(trace: Trace) -> dict[str, dict]:
    """Return the sample sites of a trace that have a density, observed or not, by name."""
    return {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site_is_subsample(site)
    }


def is_deterministic(site: Mapping) -> bool:
    """Return whether a sample site has no density: by `pyro.deterministic` or a reparametrization.

    `poutine.reparam` leaves an observed Delta that is masked out at the site.
    """
    if site["infer"].get("_deterministic"):
        return True
    distribution = site["fn"]
    is_masked_out = isinstance(distribution, MaskedDistribution) and distribution._mask is False
    return site["is_observed"] and is_masked_out and isinstance(distribution.base_dist, Delta)


def is_masked(site: Mapping) -> bool:
    """Return whether a mask leaves out the density of a sample site, or a part of it."""
    masks, distribution = [site["mask"]], site["fn"]
    while hasattr(distribution, "base_dist"):
        if isinstance(distribution, MaskedDistribution):
            masks.append(distribution._mask)
        distribution = distribution.base_dist
    return not all(mask is None or bool(torch.as_tensor(mask).all()) for mask in masks)


def log_score(trace: Trace, images: Tensor) -> Tensor:
    """Return the log density of samples that are not reparametrized, (B,), in nats.

    Args:
        images: (B, C, H, W).
    """
    drawn = {n: site for n, site in latent_sites(trace).items() if not site["fn"].has_rsample}
    return plain_log_density(drawn, images)


def plain_log_density(sites: Mapping[str, dict], images: Tensor) -> Tensor:
    """Return the log density of sites of a trace for each image, (B,), in nats.

    No plate lies outside the images, and nothing is enumerated. It is `log_density` in less than
    half of the time.

    Args:
        sites: sites of a trace, by name.
        images: (B, C, H, W).

    Raises:
        ValueError: a value outside a site's support; see `log_density`.
    """
    total = images.new_zeros(len(images))
    for name, site in sites.items():
        _plates_of(name, site, images)
        try:
            term = site["fn"].log_prob(site["value"])
        except ValueError as error:
            raise ValueError(f"site {name!r} has a value without a density: {error}") from error
        term = scale_and_mask(term, site["scale"], site["mask"])
        total = total + term.reshape(len(images), -1).sum(1)
    return total


def log_density(trace: Trace, images: Tensor) -> Tensor:
    """Return the log density of all sites in a trace for each image.

    Sites that were enumerated in parallel are summed out exactly.

    Args:
        trace: the trace of a program that was run on `images`.
        images: (B, C, H, W).

    Returns:
        (B,), in nats.

    Raises:
        ValueError: a site lies outside the plate "images", and there are several.
    """
    trace.compute_log_prob(lambda name, site: not site_is_subsample(site))
    trace.pack_tensors()
    plates = set(trace.plate_to_symbol.values())
    terms: list[Tensor] = []
    factors: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
    summed: set[str] = set()
    for name, site in scored_sites(trace).items():
        frames = _plates_of(name, site, images)
        term = site["packed"]["log_prob"]
        if dims := set(term._pyro_dims) - plates:
            summed |= dims
            ordinal = frozenset(trace.plate_to_symbol[frame] for frame in frames)
            factors.setdefault(ordinal, []).append(term)
        else:
            terms.append(term)
    contracted = contract_tensor_tree(factors, summed)
    terms += [term for group in contracted.values() for term in group]
    image_symbol = trace.plate_to_symbol.get(IMAGES_PLATE)
    return sum((_sum_all_but(image_symbol, term) for term in terms), images.new_zeros(len(images)))


def _plates_of(name: str, site: dict, images: Tensor) -> list[str]:
    """Return the names of the plates of a site; raise ValueError if it has no density per image."""
    frames = [frame.name for frame in site["cond_indep_stack"] if frame.vectorized]
    if IMAGES_PLATE not in frames and len(images) > 1:
        raise ValueError(
            f"site {name!r} lies outside the plate {IMAGES_PLATE!r}, so its density belongs "
            "to no one image; draw it inside pyro.plate('images', ...), make it a parameter, "
            "or fit (an AutoGuide) and evaluate one image at a time, with batch_size=1"
        )
    return frames


def _sum_all_but(image_symbol: str | None, term: Tensor) -> Tensor:
    """Sum a packed tensor over all dims but one; packing has dropped the dims of size 1."""
    symbols = term._pyro_dims  # type: ignore[attr-defined]  # left there by packing
    others = [dim for dim, symbol in enumerate(symbols) if symbol != image_symbol]
    return term.sum(others) if others else term
