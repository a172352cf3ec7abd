"""The losses of guides, in nats of log p(data), compared with annealed chains.

Chains start at the best of several guides, and the annealed lower bound stands for log p. A guide
loses at least its distance below that bound.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from capsule_zoo.data import Split
from capsule_zoo.data.progress import track
from capsule_zoo.guides.per_image.site_distributions import UnservedSite
from capsule_zoo.inference.annealing import annealed_bounds, annealed_log_likelihood
from capsule_zoo.inference.check import one_line
from capsule_zoo.inference.evaluation.evaluate import evaluate
from capsule_zoo.inference.evaluation.summary import (
    log_mean,
    per_image_elbo,
    pooled_log_weight,
    remark,
    standard_error,
    summarize,
)
from capsule_zoo.inference.not_finite import NonFiniteGuide
from capsule_zoo.inference.posterior.fitted import SemiAmortized
from capsule_zoo.models.base import Model

if TYPE_CHECKING:
    from arviz import InferenceData


class Losses(NamedTuple):
    """The result of `measure_losses`: bounds, one row of metrics per guide, and evaluations.

    Attributes:
        bounds: the numbers of `annealed_bounds`, with start and seconds.
        rows: the numbers of each guide, see `losses`, with milliseconds: the time to fit it and
            draw once, by image.
        annealed: the annealing.
        evaluations: the evaluation of each guide.
        guides: the guides as they were fitted.
    """

    bounds: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    annealed: "InferenceData"
    evaluations: "dict[str, InferenceData]"
    guides: dict[str, nn.Module]


def measure_losses(
    model: Model,
    starts: Mapping[str, nn.Module],
    test: Split | Tensor,
    guides: Mapping[str, Callable[[], nn.Module]],
    *,
    particles: int,
    group_size: int | None,
    seed: int,
    draws: int = 0,
    left_out: dict[str, str] | None = None,
    **annealing: Any,
) -> Losses:
    """Measure the losses of several guides on one set of images, in nats per image.

    Args:
        starts: guides at which chains may start.
        test: the images.
        guides: functions that return a guide fitted to these images, by name.
        particles: draws of every guide for its bounds.
        group_size: draws of one more bound, a divisor of `particles`; see `losses`.
        seed: seed of everything.
        draws: posterior draws of every guide to keep.
        left_out: gets the reason why a guide cannot be fitted or is not finite, by name, and an
            interrupt ends the loop after the first guide; None lets every error out. The caller
            then shows the progress of the loop.
        annealing: arguments of `annealed_log_likelihood`.
    """
    annealed = annealed_log_likelihood(model, starts, test, seed=seed, **annealing)
    lower = log_mean(pooled_log_weight(annealed))
    rows: dict[str, dict[str, Any]] = {}
    evaluations, fitted = {}, {}
    enabled = None if left_out is None else False
    for name, fit_one in track([*guides.items()], "measuring guides", "guides", enabled=enabled):
        began = time.perf_counter()
        try:
            guide = fit_one()
            if isinstance(guide, SemiAmortized):
                guide.refined_to(test if isinstance(test, Tensor) else test.images)
            seconds = time.perf_counter() - began
            idata = evaluate(model, guide, test, num_particles=particles, seed=seed, draws=draws)
            if not idata.attrs["is_bound"]:  # a guide of points that was corrected is one still
                continue
            seconds += idata.attrs["seconds"] / particles
            evaluations[name], fitted[name] = idata, guide
            rows[name] = losses(idata, lower, group_size) | {
                "milliseconds": 1000 * seconds / len(lower)
            }
        except (UnservedSite, NonFiniteGuide) as error:
            if left_out is None:
                raise
            left_out[name] = one_line(error)
            continue
        except KeyboardInterrupt:
            if left_out is None or not rows:
                raise
            names = [*guides]
            left_out |= dict.fromkeys(names[names.index(name) :], "the call was interrupted")
            break
    bounds = annealed_bounds(annealed, evaluations)
    bounds |= {name: annealed.attrs[name] for name in ("start", "seconds")}
    return Losses(bounds, rows, annealed, evaluations, fitted)


def losses(
    idata: "InferenceData", lower: np.ndarray, group_size: int | None = None
) -> dict[str, Any]:
    """Return a guide's elbo and iwae, and their distances below a bound on log p(image).

    Also its ess, pareto_k and names.

    Args:
        group_size: draws of one more bound, `iwae_<group_size>`, the mean over groups of draws.
    """
    log_weight = pooled_log_weight(idata)
    bounds = {"elbo": per_image_elbo(idata), "iwae": log_mean(log_weight)}
    if group_size is not None:
        groups = log_weight.reshape(-1, group_size, log_weight.shape[1])
        bounds[f"iwae_{group_size}"] = np.mean([log_mean(group) for group in groups], axis=0)
    result: dict[str, Any] = {name: idata.attrs[name] for name in ("data", "guide")}
    for name, values in bounds.items():
        for label, element in ((name, values), (f"lost_{name}", lower - values)):
            result[label], result[f"{label}_se"] = float(element.mean()), standard_error(element)
    summary = summarize(idata)
    result |= {name: summary[name] for name in ("ess", "pareto_k", "num_particles")}
    return result | ({"remark": message} if (message := remark(summary)) else {})
