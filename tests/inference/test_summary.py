"""The headline numbers of an evaluation, from weights that were written down by hand."""

import math

import numpy as np
import pytest

from capsule_zoo.inference import summarize
from capsule_zoo.inference.evaluation.inference_data import inference_data
from capsule_zoo.inference.evaluation.summary import remark


def evaluation(weights, is_bound=1, seconds=6.0):
    """Return an InferenceData of weights (chains, draws, images)."""
    groups = {"sample_stats": {"log_weight": (["chain", "draw", "image"], np.log(weights))}}
    attributes = {
        "is_bound": is_bound,
        "seconds": seconds,
        "bound_on": "log p(image)",
        "presence": "none",
        "data": "images",
        "num_images": np.shape(weights)[-1],
    }
    return inference_data(groups, attributes)


def test_the_headline_numbers_of_four_draws_for_two_images():
    """Weights 1, 1, 2, 4 and 3, 3, 3, 3, in two chains of two draws."""
    weights = np.array([[[1.0, 3], [1, 3]], [[2, 3], [4, 3]]])
    summary = summarize(evaluation(weights))
    elbo = (3 * math.log(2) / 4, math.log(3))
    iwae = (math.log(8 / 4), math.log(3))
    assert summary["elbo"] == pytest.approx(sum(elbo) / 2)
    assert summary["elbo_se"] == pytest.approx((elbo[1] - elbo[0]) / 2)  # of two: half the distance
    assert summary["iwae"] == pytest.approx(sum(iwae) / 2)
    assert summary["iwae_se"] == pytest.approx((iwae[1] - iwae[0]) / 2)
    assert summary["ess"] == pytest.approx((8**2 / (1 + 1 + 4 + 16) + 4) / 2)
    assert math.isnan(summary["pareto_k"]) and math.isnan(summary["map_objective"])
    assert summary["seconds_per_image"] == pytest.approx(3.0)
    assert (summary["num_particles"], summary["num_images"]) == (4, 2)


def test_equal_weights_of_many_nats_lose_nothing_in_the_sum():
    """In float32 a sum of a thousand weights of exp(-60,000) is a nat too low."""
    weights = np.full((1, 1000, 1), -60_000.25, np.float32)
    groups = {"sample_stats": {"log_weight": (["chain", "draw", "image"], weights)}}
    idata = inference_data(groups, evaluation(np.ones((1, 1, 1))).attrs)
    summary = summarize(idata)
    assert summary["iwae"] == summary["elbo"] == pytest.approx(-60_000.25, abs=1e-6)
    assert summary["ess"] == pytest.approx(1000, abs=1e-3)


def test_pareto_k_is_the_median_over_images_of_the_heavy_tails():
    """Two images have weights from a Pareto distribution of shape .9, one has equal weights."""
    random = np.random.default_rng(0)
    heavy = random.pareto(1 / 0.9, size=(1, 4000, 2)) + 1
    weights = np.concatenate([heavy, np.full((1, 4000, 1), 2.0)], axis=-1)
    assert summarize(evaluation(weights))["pareto_k"] == pytest.approx(0.9, abs=0.15)
    assert summarize(evaluation(weights[..., 1:]))["pareto_k"] == pytest.approx(0.45, abs=0.15)


def test_a_few_draws_that_decide_the_bound_deserve_a_remark():
    """A hundred draws of weight 1 to 2, and for each image one of e^9."""
    weights = np.random.default_rng(0).uniform(1, 2, size=(1, 101, 3))
    assert remark(summarize(evaluation(weights))) == ""
    weights[0, 40] = np.exp(9)
    summary = summarize(evaluation(weights))
    assert summary["iwae"] - summary["elbo"] > 3 and summary["pareto_k"] > 0.7
    message = remark(summary)
    assert message.startswith("few draws decide: ELBO 3.9 nats below IWAE, Pareto k ")
    assert message.endswith("more draws raise the IWAE")
    assert remark(summary | {"pareto_k": 0.6}) == remark(summary | {"pareto_k": math.nan}) == ""
    assert remark(summary | {"elbo": summary["iwae"] - 0.9}) == ""
    assert remark(summarize(evaluation(weights, is_bound=0))) == ""


def test_what_is_not_a_bound_has_no_bounds():
    summary = summarize(evaluation(np.ones((1, 2, 3)), is_bound=0))
    assert all(math.isnan(summary[name]) for name in ("elbo", "elbo_se", "iwae", "iwae_se"))
    assert summary["map_objective"] == 0 and summary["ess"] == pytest.approx(2)
