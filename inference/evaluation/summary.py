"""The main metrics of an evaluation, in nats per image, over all chains and draws."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from capsule_zoo.inference.evaluation.inference_data import pareto_shape

if TYPE_CHECKING:
    from arviz import InferenceData

HEAVY = 0.7  # Pareto shape above which a few draws decide an importance-weighted bound
_FAR_BELOW = 1.0  # nats from the ELBO to the IWAE above which there is a remark


def summarize(idata: "InferenceData") -> dict[str, float | int | bool]:
    """Compute the main metrics of an evaluation, or of several joined by `arviz.concat`.

    All chains and draws are pooled. `idata.attrs["bound_on"]` names the quantity that the bounds
    refer to, and `idata.attrs["presence"]` names the kind of presences that were drawn; see
    `evaluate`.

    Returns:
        elbo, iwae (log-mean-exp of K weights; Burda, Grosse and Salakhutdinov 2016) and their
        standard errors over images, NaN where the evaluation is not a bound; map_objective, the
        mean log weight where it is not one, and NaN where it is; ess, the mean over images of the
        effective number of draws; pareto_k, the median over images of the Pareto shape;
        seconds_per_image, for all K draws; is_bound; num_particles, K, over all chains; num_images.

    Raises:
        ValueError: evaluations were joined that measure different things, or different images, or
            have the same seed.
    """
    refuse_mixture(idata)
    _refuse_joined_images(idata)
    _refuse_same_draws(idata)
    log_weight = pooled_log_weight(idata)
    draws, images = log_weight.shape
    bound = all(each_value(idata.attrs["is_bound"]))
    elbo = per_image_elbo(idata)
    iwae = log_mean(log_weight)
    ess = np.exp(2 * log_sum(log_weight) - log_sum(2 * log_weight))
    nan = float("nan")
    return {
        "elbo": float(elbo.mean()) if bound else nan,
        "elbo_se": standard_error(elbo) if bound else nan,
        "iwae": float(iwae.mean()) if bound else nan,
        "iwae_se": standard_error(iwae) if bound else nan,
        "map_objective": nan if bound else float(elbo.mean()),
        "ess": float(ess.mean()),
        "pareto_k": float(np.median(pareto_shape(log_weight.T))),
        "seconds_per_image": float(sum(each_value(idata.attrs["seconds"]))) / images,
        "is_bound": bound,
        "num_particles": draws,
        "num_images": images,
    }


def remark(summary: Mapping[str, Any]) -> str:
    """Return a warning on how to interpret `summarize`'s metrics, or "".

    It says where a few draws decide the IWAE: the Pareto shape is above .7, and the ELBO more than
    a nat below the IWAE.
    """
    if not summary["is_bound"]:
        return ""
    below = summary["iwae"] - summary["elbo"]
    if not (summary["pareto_k"] > HEAVY and below > _FAR_BELOW):
        return ""
    return (
        f"few draws decide: ELBO {below:.1f} nats below IWAE, Pareto k {summary['pareto_k']:.1f}; "
        "more draws raise the IWAE"
    )


def pooled_log_weight(idata: "InferenceData") -> np.ndarray:
    """Return the log weights of all chains and draws, (chains * draws, images), in float64.

    Sums of many weights in float32 lose nats where weights have thousands of them.
    """
    return pool_chains(idata.sample_stats["log_weight"]).astype(np.float64)


def pool_chains(values: Any) -> np.ndarray:
    """Flatten chains and draws of a variable (chain, draw, image) to (draws, images)."""
    array = values.transpose("chain", "draw", ...).values
    return array.reshape(-1, array.shape[-1])


def log_mean(log_weight: np.ndarray) -> np.ndarray:
    """Return the log of the mean over the first dim."""
    return log_sum(log_weight) - np.log(len(log_weight))


def log_mean_error(log_weight: np.ndarray) -> np.ndarray:
    """Return the Monte Carlo standard error of `log_mean`, in nats; at most about 1.

    It is the relative standard error of the mean weight. It is 1 for one draw, or if no weight is
    above 0: the largest error that weights can show.
    """
    draws = len(log_weight)
    if draws == 1:
        return np.ones(log_weight.shape[1:])
    with np.errstate(invalid="ignore"):
        weight = np.exp(log_weight - log_weight.max(0))
        fraction = weight.std(0, ddof=1) / weight.mean(0) / np.sqrt(draws)
    return np.where(np.isfinite(fraction), fraction, 1.0)


def log_sum(log_weight: np.ndarray) -> np.ndarray:
    """Return the log of the sum over the first dim."""
    return np.logaddexp.reduce(log_weight, axis=0)


def per_image_elbo(idata: "InferenceData") -> np.ndarray:
    """Return the mean log weight of each image over chains and draws, (images,), in nats."""
    return pooled_log_weight(idata).mean(0)


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean over images; NaN for a single image."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def refuse_mixture(idata: "InferenceData") -> None:
    """Raise ValueError if evaluations of several quantities, or of several images, were joined."""
    for name in ("presence", "bound_on", "data", "num_images", "checksum"):
        values = sorted({str(value) for value in each_value(idata.attrs.get(name, ""))})
        if len(values) > 1:
            remedy = AT_ONCE if name in ("data", "num_images", "checksum") else ""
            raise ValueError(
                f"idata joins evaluations whose {name!r} differs ({', '.join(values)}); "
                f"summarize each one separately{remedy}"
            )


AT_ONCE = (
    ", or evaluate all images at once: evaluate(model, guide, DataLoader(images, batch_size=500), "
    "draws=0) reads them batch by batch"
)


def _refuse_joined_images(idata: "InferenceData") -> None:
    """Raise ValueError if evaluations of different images were concatenated along the images."""
    log_weight = idata.sample_stats["log_weight"]
    numbers, expected = log_weight["image"].values, int(each_value(idata.attrs["num_images"])[0])
    if len(np.unique(numbers)) < len(numbers) or len(numbers) > expected:
        raise ValueError(
            f"idata holds {len(numbers)} images, but is described as an evaluation of {expected}; "
            f"summarize each one separately{AT_ONCE}"
        )


def _refuse_same_draws(idata: "InferenceData") -> None:
    """Raise ValueError if evaluations with one seed were joined, which repeats their draws."""
    sizes, attrs = idata.sample_stats["log_weight"].sizes, idata.attrs
    if "seed" not in attrs:  # weights that `evaluate` did not compute
        return
    particles, chains = (each_value(attrs[name]) for name in ("num_particles", "num_chains"))
    joined = max(len(particles), len(chains))
    if joined == 1:
        joined = sizes["chain"] * sizes["draw"] // (particles[0] * chains[0])
    seeds = each_value(attrs["seed"])
    if len(set(seeds)) < joined:
        raise ValueError(
            f"idata joins {joined} evaluations with the seed {', '.join(map(str, set(seeds)))}, "
            "whose draws are the same and would be counted twice; give each a seed of its own"
        )


def each_value(attribute: Any) -> list[Any]:
    """Return all values of an attribute of one evaluation or of several joined ones.

    `arviz.concat` turns an attribute whose values differ into a list (and into a nested list if it
    joins joined evaluations). netCDF turns that list into an array. Both keep a value that is
    shared.
    """
    if not isinstance(attribute, list | tuple | np.ndarray):
        return [attribute]
    return [value for entry in attribute for value in each_value(entry)]
