"""The one place that knows which arviz is installed.

Up to 0.23 `from_dict` takes groups as keywords and accepts a nested dict silently and wrongly; from
1.0 on it takes the nested dict. Pareto smoothing has moved, and changed its sign, as well.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from arviz import InferenceData

_MODERN = int(version("arviz").split(".")[0]) >= 1  # arviz itself takes seconds to import
_FEWEST_DRAWS = 25  # with fewer, the tail is too short for a Pareto law to be fitted


def inference_data(
    groups: dict[str, dict[str, np.ndarray]],
    dims: dict[str, list[str]],
    attributes: dict[str, Any],
) -> InferenceData:
    """An InferenceData (a DataTree from arviz 1.0 on) with the given groups.

    Args:
        groups: arrays by group and variable; (chain, draw, ...) but in `observed_data`.
        dims: names of each variable's dims behind chain and draw; those left out are numbered.
        attributes: of the whole.
    """
    import arviz

    if _MODERN:
        return arviz.from_dict(groups, dims=dims, attrs={"/": attributes})
    return arviz.from_dict(**groups, dims=dims, attrs=attributes)


def pareto_shape(log_weight: np.ndarray) -> np.ndarray:
    """Shape k of the Pareto law of the largest weights, over the last dim (draws).

    Below .7 importance sampling with these draws can be trusted (Vehtari et al. 2024,
    arXiv 1507.02646). Zero where all weights are equal, infinite where the tail
    has no fit, NaN with fewer than 25 draws.
    """
    if log_weight.shape[-1] < _FEWEST_DRAWS:
        return np.full(log_weight.shape[:-1], np.nan)
    with np.errstate(all="ignore"):
        if _MODERN:
            from arviz_stats.base import array_stats

            shape = array_stats.psislw(-log_weight)[1]  # takes log likelihoods, negated weights
        else:
            import arviz

            shape = arviz.psislw(log_weight)[1]
    equal = np.ptp(log_weight, axis=-1) <= 1e-9 * (1 + np.abs(log_weight).max(-1))
    return np.where(equal, 0.0, np.nan_to_num(shape, nan=np.inf, posinf=np.inf))
