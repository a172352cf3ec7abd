"""Numbers with standard errors, and figures, for the results of several experiments."""

import fnmatch
import re
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Split
from capsule_zoo.inference import Comparison, evaluate, summarize
from capsule_zoo.inference.sample_quality import Reading, frechet
from capsule_zoo.records import Number, Numbers
from capsule_zoo.registry import Entry, draw_figure

BOOTSTRAPS = 2000  # number of resampled sets of images
BINS = 10  # number of bins of the calibration error
TIGHTNESS = ("ess", "pareto_k")  # diagnostics of log weights: how loose may an IWAE bound be?


def mean_and_error(values: Tensor | np.ndarray | list[float]) -> Number:
    """Return the mean, its standard error (None for one value) and the number of values."""
    values, count = torch.as_tensor(values, dtype=torch.float64), len(values)
    apart = values - values[0]  # exactly zero if all are equal
    error = (apart.std() / count**0.5).item() if count > 1 else None
    return (values[0] + apart.mean()).item(), error, count


def single(value: float, count: int = 1) -> Number:
    """Return a number without a standard error, and its sample size."""
    return float(value), None, count


def over_seeds(outcomes: Sequence[Mapping[str, Sequence]]) -> Numbers:
    """Return the mean of each number over seeds, with its error; one seed keeps its own errors.

    Numbers that a seed lacks are left out.
    """
    if len(outcomes) == 1:
        return {name: (number[0], number[1], number[2]) for name, number in outcomes[0].items()}
    shared = [name for name in outcomes[0] if all(name in outcome for outcome in outcomes)]
    return {name: mean_and_error([outcome[name][0] for outcome in outcomes]) for name in shared}


def with_worst(outcomes: Sequence[Mapping[str, Sequence]], pattern: str = "*") -> Numbers:
    """Return the means of `over_seeds`, and the worst seed's value of names that fit a pattern."""
    names = [
        n for n in fnmatch.filter(outcomes[0], pattern) if all(n in outcome for outcome in outcomes)
    ]
    lowest = {f"{name}_worst": min(tuple(outcome[name]) for outcome in outcomes) for name in names}
    return over_seeds(outcomes) | lowest


def means_of(outcomes: Mapping[str, Sequence[Mapping[str, Sequence]]]) -> dict[str, Numbers]:
    """Return the mean numbers of a study's runs, by variant; see `over_seeds`."""
    return {name: over_seeds(runs) for name, runs in outcomes.items()}


def ratio(part: Tensor, whole: Tensor) -> Number:
    """Return the ratio of two means over common images, with a first-order standard error."""
    fraction = part.mean() / whole.mean()
    _, error, count = mean_and_error((part - fraction * whole) / whole.mean())
    return fraction.item(), error, count


def calibration_error(confidence: Tensor, right: Tensor) -> float:
    """Return the expected calibration error: mean |confidence - accuracy| over bins.

    Args:
        confidence: probabilities of the predicted classes, (N,).
        right: True where the prediction is correct, (N,).
    """
    index = (confidence * BINS).long().clamp(max=BINS - 1)
    apart = torch.zeros(BINS).index_add(0, index, confidence.float() - right.float())
    return (apart.abs().sum() / len(right)).item()


def median_and_error(values: Tensor, seed: int) -> Number:
    """Return the median of values (N,), its bootstrap standard error, and their number."""
    numbers, random = values.double().cpu().numpy(), np.random.default_rng(seed)
    again = np.median(random.choice(numbers, (BOOTSTRAPS, len(numbers))), axis=1)
    return float(np.median(numbers)), float(again.std()), len(numbers)


def squared_error(painted: Tensor, images: Tensor) -> Number:
    """Return the mean over images (N, C, H, W) of squared errors summed over pixels."""
    return mean_and_error((painted - images).square().sum((1, 2, 3)))


def held_out_bounds(entry: Entry, images: Split, particles: int, seed: int) -> Numbers:
    """Return the bounds `elbo` and `iwae_<particles>` of the discrete model, and `TIGHTNESS`."""
    idata = evaluate(entry.model, entry.guide, images, num_particles=particles, seed=seed, draws=0)
    summary, count = summarize(idata), len(images)
    tightness = {name: (summary[name], None, count) for name in TIGHTNESS}
    return {
        "elbo": (summary["elbo"], summary["elbo_se"], count),
        f"iwae_{particles}": (summary["iwae"], summary["iwae_se"], count),
        **{name: number for name, number in tightness.items() if np.isfinite(number[0])},
    }


def looks(samples: Reading, real: Reading) -> Numbers:
    """Return samples' Frechet distance to real images, confidence, and number of used classes."""
    return {
        "frechet": frechet(samples.features, real.features),
        "confidence": mean_and_error(samples.confidence),
        "classes": count_used_classes(samples.classes),
    }


def count_used_classes(classes: np.ndarray) -> Number:
    """Return the effective number of classes (N,): the exponential of their entropy."""
    fractions = np.bincount(classes) / len(classes)
    used = fractions[fractions > 0]
    return single(np.exp(-(used * np.log(used)).sum()), len(classes))


def bounds_of_rows(table: Comparison) -> dict[str, Numbers]:
    """Return the bounds of a comparison's rows that are bounds, by quantity, then by row.

    The quantities are `elbo`, `iwae_<particles>`, `elbo_difference` and `TIGHTNESS`. The difference
    to the first bound is paired over images; the first bound has no difference.
    """
    bounds, iwae = table[table["is_bound"]], f"iwae_{table.attrs['num_particles']}"
    return {
        **numbers_of_columns(bounds, {"elbo": "elbo", iwae: "iwae"}),
        **numbers_of_columns(bounds.iloc[1:], {"elbo_difference": "elbo_difference"}),
        **numbers_of_columns(bounds, {name: name for name in TIGHTNESS}),
    }


def numbers_of_columns(table: Comparison, columns: Mapping[str, str]) -> dict[str, Numbers]:
    """Return the finite numbers in columns of a comparison, by quantity, then by row.

    A number has a standard error if the table has one in a column `<column>_se`.

    Args:
        columns: the column of each quantity.
    """
    numbers: dict[str, Numbers] = {}
    for quantity, column in columns.items():
        for name, row in table.iterrows():
            if np.isfinite(row[column]):
                error = float(row[f"{column}_se"]) if f"{column}_se" in row else None
                number = float(row[column]), error, table.attrs["num_images"]
                numbers.setdefault(quantity, {})[snake_case(name)] = number
    return numbers


def measures_of_rows(table: Comparison) -> dict[str, Numbers]:
    """Return a comparison's bounds, the MAP objectives of other rows, and the times of all rows."""
    columns = {"map": "map_objective", "seconds_per_image": "seconds_per_image"}
    return bounds_of_rows(table) | numbers_of_columns(table, columns)


def group_by_quantity(variants: Mapping[str, Mapping[str, Number]]) -> dict[str, Numbers]:
    """Regroup numbers by variant and quantity as numbers by quantity, then variant."""
    rotated: dict[str, Numbers] = {}
    for variant, numbers in variants.items():
        for quantity, number in numbers.items():
            rotated.setdefault(quantity, {})[variant] = number
    return rotated


def snake_case(row: Hashable) -> str:
    """Return a name in snake case: "free-form normal" becomes `free_form_normal`."""
    return re.sub("[^a-z]+", "_", str(row).lower())


def pictures(entry: Entry, images: Tensor) -> dict[str, Figure]:
    """Draw every figure of an entry, by name."""
    return {n: draw_figure(figure, entry, lambda: images) for n, figure in entry.figures.items()}
