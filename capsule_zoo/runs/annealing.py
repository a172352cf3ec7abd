"""The log-likelihood of a trained entry from both sides, and the nats that its guide loses.

capsule-zoo anneal     annealed bounds of a directed model; see
                       `inference.posterior.annealing.annealed`
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import logsumexp
from torch import nn

from capsule_zoo.data import Dataset, Split
from capsule_zoo.inference import annealed_bounds, annealed_log_likelihood, evaluate, widen
from capsule_zoo.inference.evaluation.summary import (
    per_image_elbo,
    pooled_log_weight,
    standard_error,
    summarize,
)
from capsule_zoo.registry import Entry
from capsule_zoo.runs.measurements import WIDEN_IMAGES, as_scored, refuse_without_bound

WIDEN_STEPS = 200


def anneal_run(
    entry: Entry,
    data: Dataset,
    *,
    images: int,
    particles: int = 100,
    seed: int = 0,
    widening: int = WIDEN_STEPS,
    **settings: Any,
) -> dict[str, Any]:
    """Anneal from an entry's guide to the posterior of test images, in nats per image.

    A guide of points is widened first, on training images.

    Args:
        images: number of test images.
        particles: draws of the guide for its own bounds.
        widening: updates that widen a guide of points.
        settings: arguments of `annealed_log_likelihood`.

    Returns:
        The numbers of `annealed_bounds`; the guide's elbo, iwae, ess and pareto_k on the same
        images; and lost_elbo and lost_iwae, how far both lie under the annealed lower bound of the
        same image. The guide loses at least this much, in expectation, and at most `gap` more.

    Raises:
        ValueError: an entry that gives no bound.
    """
    refuse_without_bound(entry)
    data = as_scored(entry, data)
    test = data.test[:images]
    guide = with_density(entry, data, widening, seed)
    own = evaluate(entry.model, guide, test, num_particles=particles, seed=seed, draws=0)
    annealed = annealed_log_likelihood(entry.model, guide, test, seed=seed, **settings)
    lower = _log_mean(pooled_log_weight(annealed))
    bounds = {"elbo": per_image_elbo(own), "iwae": _log_mean(pooled_log_weight(own))}
    found: dict[str, Any] = {"data": own.attrs["data"], "guide": own.attrs["guide"]}
    found |= annealed_bounds(annealed)
    for name, values in bounds.items():
        found[name] = float(values.mean())
        found[f"{name}_se"] = standard_error(values)
        found[f"lost_{name}"] = float((lower - values).mean())
        found[f"lost_{name}_se"] = standard_error(lower - values)
    summary = summarize(own)
    found |= {name: summary[name] for name in ("ess", "pareto_k", "num_particles")}
    return found | {"seconds": annealed.attrs["seconds"], "units": "nats per image"}


def with_density(entry: Entry, data: Dataset, steps: int, seed: int) -> nn.Module:
    """Return the entry's guide, widened on training images if it places points."""
    glance = evaluate(entry.model, entry.guide, data.test[:2], num_particles=1, draws=0)
    if not glance.attrs["point_sites"]:
        return entry.guide
    points: Split = data.train[:WIDEN_IMAGES]
    return widen(entry.model, entry.guide, points, steps=steps, seed=seed)


def _log_mean(log_weight: np.ndarray) -> np.ndarray:
    """Return the log of the mean weight of every image, (images,)."""
    return logsumexp(log_weight, axis=0) - np.log(len(log_weight))
