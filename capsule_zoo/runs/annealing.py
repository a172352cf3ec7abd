"""The log-likelihood of a trained entry from both sides, and the nats that its guide loses.

`capsule-zoo evaluate --method anneal` gives annealed bounds of a directed model, see
`inference.annealing`; the experiment `zoo/gaps` gives what each guide loses,
on the same images.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from capsule_zoo.data import Dataset
from capsule_zoo.data.progress import announce
from capsule_zoo.entry import Entry
from capsule_zoo.inference import evaluate
from capsule_zoo.inference.annealing import annealed_bounds, annealed_log_likelihood
from capsule_zoo.inference.annealing.path import AnnealedPath
from capsule_zoo.inference.evaluation.summary import (
    log_mean,
    per_image_elbo,
    pooled_log_weight,
    remark,
    standard_error,
    summarize,
)
from capsule_zoo.inference.posterior.fitted import SemiAmortized, fit_guide
from capsule_zoo.inference.posterior.gauss_newton import CLIMBING
from capsule_zoo.runs.measurements import (
    as_scored,
    general_guides_of,
    refuse_without_bound,
    widened,
)

if TYPE_CHECKING:
    from arviz import InferenceData

WIDEN_STEPS = 200
REFINEMENT = 100  # steps to the points of the Gauss-Newton laws
MODES = 4  # such points for each image
STARTS = "free_form", "corrected"  # general guides, besides Gauss-Newton laws, to start chains at
_LARGE = 512  # numbers of a code above which an image has one point, because of the cost


def anneal_run(
    entry: Entry,
    data: Dataset,
    *,
    particles: int = 100,
    widening: int = WIDEN_STEPS,
    **settings: Any,
) -> dict[str, Any]:
    """Anneal from Gauss-Newton laws to the posterior of test images, in nats per image.

    They are at points refined from the answers of the entry's guide, and chains move by their
    covariance. A model that they do not serve, or whose guide has a higher importance-weighted
    bound, is annealed from the guide itself. A guide of points is widened first, on training
    images, for its own bounds.

    Args:
        particles: draws of the guide for its own bounds.
        widening: updates that widen a guide of points.
        settings: `images`, `seed`, `refinement` and `progress` of `guide_losses`, and what it
            passes on.

    Returns:
        The numbers of `annealed_bounds`; the guide's elbo, iwae, ess and pareto_k on the same
        images; and lost_elbo and lost_iwae, how far both lie under the annealed lower bound of the
        same image. The guide loses at least this much, in expectation, and at most `gap` more.
        `warning` and `remark` say in words where `lower` is below a guide, and where the guide's
        iwae is decided by a few draws.

    Raises:
        ValueError: an entry that gives no bound.
    """
    settings = {"simulated": 16, "particles": particles, "steps": widening, **settings}
    bounds, found = guide_losses(entry, data, (), **settings)
    return bounds | found["encoder"] | {"units": "nats per image"}


def guide_losses(
    entry: Entry,
    data: Dataset,
    names: Sequence[str],
    *,
    images: int,
    particles: int = 1000,
    few: int | None = None,
    steps: int = 200,
    seed: int = 0,
    refinement: int = REFINEMENT,
    modes: int = MODES,
    climbing: int = CLIMBING,
    progress: bool = False,
    **settings: Any,
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Measure what general guides, and the entry's own, lose on test images, in nats per image.

    Args:
        names: general guides; those that do not serve the model, or give no bound, are left out.
            Chains start at the best of Gauss-Newton laws, of the entry's own guide, and of those
            named here that have a density at given latents and can be fitted to simulated images.
        images: number of test images.
        particles: draws of every guide for its bounds.
        few: draws of one more bound, a divisor of `particles`; see `losses`.
        steps: updates of every general guide, and those that widen a guide of points.
        refinement, modes, climbing: `steps`, `modes` and `climbing` of the Gauss-Newton laws from
            which chains start. Codes of more than 512 numbers have one point, and no `mixture`.
        progress: show progress bars.
        settings: arguments of `annealed_log_likelihood`; none are simulated by default.

    Returns:
        The numbers of `annealed_bounds` with seconds, and by guide, the entry's own first as
        "encoder", those of `losses` with milliseconds: the time to fit it and draw once, by image.

    Raises:
        ValueError: an entry that gives no bound.
    """
    refuse_without_bound(entry)
    data = as_scored(entry, data)
    test = data.test[:images].to(next(entry.model.parameters()).device)
    guide = widened(entry, entry.guide, data, steps, seed, progress) or entry.guide
    if AnnealedPath(entry.model.discretized(), None, test.images[:1]).columns > _LARGE:
        modes, names = 1, [name for name in names if name != "mixture"]
    how = dict(refinement=refinement, modes=modes, climbing=climbing, steps=steps)
    announce(f"finding where chains start, for {len(test)} images")
    starts = starts_of(entry, guide, test.images, names, seed=seed, **how)
    settings = {"simulated": 0, "seed": seed, "progress": progress, **settings}
    annealed = annealed_log_likelihood(entry.model, starts, test, **settings)
    lower = log_mean(pooled_log_weight(annealed))
    found, evaluations = {}, {}
    general = general_guides_of(entry)
    for name in ("encoder", *(name for name in names if name in general)):
        began = time.perf_counter()
        fitted = guide
        if name != "encoder":
            pair = entry.summed
            fitted = fit_guide(name, pair.model, pair.guide, test.images, steps=steps, seed=seed)
        if isinstance(fitted, SemiAmortized):
            fitted.fitted(test.images)
        seconds = time.perf_counter() - began
        own = evaluate(entry.model, fitted, test, num_particles=particles, seed=seed, draws=0)
        if not own.attrs["is_bound"]:  # a guide of points that was corrected is one still
            continue
        evaluations[name] = own
        seconds += own.attrs["seconds"] / particles
        found[name] = losses(own, lower, few) | {"milliseconds": 1000 * seconds / len(lower)}
    bounds = annealed_bounds(annealed, evaluations)
    return bounds | {"start": annealed.attrs["start"], "seconds": annealed.attrs["seconds"]}, found


def starts_of(
    entry: Entry,
    guide: nn.Module,
    images: Tensor,
    names: Sequence[str],
    *,
    steps: int,
    seed: int,
    refinement: int,
    modes: int,
    climbing: int,
) -> dict[str, nn.Module]:
    """Return the guides at which chains may start, by name; see `annealed_log_likelihood`.

    They are `guide` itself as "encoder", Gauss-Newton laws, and general guides of `STARTS` that are
    in `names`: those that serve the model, and have a density.
    """
    newton = "gauss_newton" if modes == 1 else "mixture"
    settings = {name: dict(steps=steps) for name in STARTS if name in names}
    settings = {newton: dict(steps=refinement, modes=modes, climbing=climbing), **settings}
    general, dense = general_guides_of(entry), {}
    for name in [name for name in settings if name in general]:
        start = SemiAmortized(entry.guide, kind=name, seed=seed, **settings[name])
        points = evaluate(entry.model, start, images[:2], num_particles=1, draws=0)
        if not points.attrs["point_sites"]:
            dense[name] = start
    return {"encoder": guide, **dense}


def losses(own: "InferenceData", lower: np.ndarray, few: int | None = None) -> dict[str, Any]:
    """Return a guide's elbo and iwae, and how far they lie under bounds on log p(image), (images,).

    Also its ess, pareto_k and names.

    Args:
        few: draws of one more bound, `iwae_<few>`, the mean over all such groups of draws.
    """
    log_weight = pooled_log_weight(own)
    bounds = {"elbo": per_image_elbo(own), "iwae": log_mean(log_weight)}
    if few is not None:
        groups = log_weight.reshape(-1, few, log_weight.shape[1])
        bounds[f"iwae_{few}"] = np.mean([log_mean(group) for group in groups], axis=0)
    found: dict[str, Any] = {name: own.attrs[name] for name in ("data", "guide")}
    for name, values in bounds.items():
        for label, each in ((name, values), (f"lost_{name}", lower - values)):
            found[label], found[f"{label}_se"] = float(each.mean()), standard_error(each)
    summary = summarize(own)
    found |= {name: summary[name] for name in ("ess", "pareto_k", "num_particles")}
    return found | ({"remark": words} if (words := remark(summary)) else {})
