"""The only module that depends on the installed version of arviz.

Up to arviz 0.23 an evaluation is an `arviz.InferenceData`; from 1.0 on it is an `xarray.DataTree`.
Both consist of one `xarray.Dataset` for each group. Pareto smoothing has moved between the
versions, and its sign has changed.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from arviz import InferenceData

_MODERN = int(version("arviz").split(".")[0]) >= 1  # arviz itself takes seconds to import
_FEWEST_DRAWS = 25  # with fewer, the tail is too short for a Pareto distribution to be fitted

Variables = dict[str, tuple[list[str], np.ndarray]]


def inference_data(groups: dict[str, Variables], attributes: dict[str, Any]) -> "InferenceData":
    """Make an InferenceData (a DataTree from arviz 1.0 on) with the given groups.

    Every dim gets the coordinates 0, 1, ... A slash in a name, as in `slot_0/image_code`, becomes a
    dot, because netCDF and trees read it as a path.

    Args:
        groups: (dims, array) by group and variable.
        attributes: attributes of the whole; only str, int and float, the types that netCDF stores.
    """
    import xarray

    datasets = {}
    for group, named in groups.items():
        variables = {
            name.replace("/", "."): ([dim.replace("/", ".") for dim in dims], array)
            for name, (dims, array) in named.items()
        }
        sizes = {
            dim: size
            for dims, array in variables.values()
            for dim, size in zip(dims, array.shape, strict=True)
        }
        coordinates = {dim: np.arange(size) for dim, size in sizes.items()}
        datasets[group] = xarray.Dataset(variables, coords=coordinates)
    if _MODERN:
        tree = xarray.DataTree.from_dict(datasets)
        tree.attrs = attributes
        return tree
    from capsule_zoo.inference.evaluation.evaluation_data import EvaluationData

    return EvaluationData(attrs=attributes, **datasets)


def pareto_shape(log_weight: np.ndarray) -> np.ndarray:
    """Return the shape k of a Pareto distribution fitted to the largest weights of the last dim.

    Below .7, importance sampling with these draws can be trusted; with fewer than 2,154 draws,
    below 1 - 1 / log10(draws) (Vehtari et al. 2024, arXiv 1507.02646). A fit to few draws is drawn
    towards .5: an effective number of draws near 1 is the surer sign.

    The shape is zero where all weights are equal, infinite where the tail has no fit, and NaN with
    fewer than 25 draws.
    """
    log_weight = log_weight.astype(np.float64)  # in float32 weights of the tail would become 0
    if log_weight.shape[-1] < _FEWEST_DRAWS:
        return np.full(log_weight.shape[:-1], np.nan)
    with np.errstate(all="ignore"):
        if _MODERN:
            shape = np.apply_along_axis(_tail_shape, -1, log_weight)
        else:
            import arviz

            shape = _fitted_shapes(*arviz.psislw(log_weight))
    equal = np.ptp(log_weight, axis=-1) <= 1e-9 * (1 + np.abs(log_weight).max(-1))
    return np.where(equal, 0.0, np.nan_to_num(shape, nan=np.inf, posinf=np.inf))


def _fitted_shapes(smoothed: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """Return fitted Pareto shapes, with arviz's prior (no fit) and NaN replaced by infinity."""
    return np.where(np.isnan(smoothed).any(-1), np.inf, shape)


def _tail_shape(log_weight: np.ndarray) -> float:
    """Return the Pareto shape of log weights (draws,); infinite where arviz 1 refuses to fit."""
    from arviz_stats.base import array_stats

    try:
        # takes log likelihoods, negated weights
        return float(_fitted_shapes(*array_stats.psislw(-log_weight)))
    except ValueError:  # all values of the tail are the same
        return np.inf
