"""Every experiment describes its result, keeps its seed and ignores no option."""

import pytest
import torch

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Experiment, Options, load_or_train
from capsule_zoo.experiments.common.findings import (
    bounds_of_rows,
    calibration_error,
    group_by_quantity,
    mean_and_error,
    median_and_error,
    over_seeds,
    with_worst,
)
from capsule_zoo.inference import Comparison
from capsule_zoo.registry import create, save_entry, small_settings


def test_an_experiment_draws_by_its_seed():
    toy = Experiment("toy/draw", lambda options: torch.rand(()).item(), "digits")
    first, again, other = (toy(Options(seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_numbers_of_variants_are_turned_over():
    rows = {"a": {"elbo": (1.0, None, 2), "ess": (3.0, None, 2)}, "b": {"elbo": (4.0, 0.5, 2)}}
    expected = {"elbo": {"a": (1.0, None, 2), "b": (4.0, 0.5, 2)}, "ess": {"a": (3.0, None, 2)}}
    assert group_by_quantity(rows) == expected


def test_a_run_of_another_entry_is_not_measured(tmp_path):
    save_entry(create("vae", **small_settings("vae")), tmp_path, data="digits")
    data = load_dataset("digits")
    with pytest.raises(ValueError, match=r"run must be of 'part-whole', but .* is of 'vae'"):
        load_or_train("part-whole", data, Options(run=str(tmp_path), progress=False))


def test_a_given_run_is_measured_as_it_is(tmp_path):
    entry = create("vae", **small_settings("vae"))
    save_entry(entry, tmp_path, data="digits")
    run_entry = load_or_train(
        "vae", load_dataset("digits"), Options(run=str(tmp_path), progress=False)
    )
    state = run_entry.model.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in entry.model.state_dict().items())


def test_a_mean_has_its_standard_error_unless_it_is_of_one():
    values = [1.0, 2.0, 6.0]
    for form in (values, torch.tensor(values), torch.tensor(values).numpy()):
        assert mean_and_error(form) == (3.0, pytest.approx((7 / 3) ** 0.5), 3)
    assert mean_and_error([4.0]) == (4.0, None, 1)


def test_rows_that_are_no_bound_give_no_metric():
    rows = {
        "free-form, Normal": dict(elbo=-3.0, elbo_se=0.2, iwae=-2.0, iwae_se=0.1, is_bound=True),
        "points": dict(map_objective=9.0, is_bound=False),
        "last": dict(elbo=-4.0, elbo_se=0.3, iwae=-3.0, iwae_se=0.2, is_bound=True),
    }
    rows["last"] |= dict(elbo_difference=-1.0, elbo_difference_se=0.05)
    for name, (ess, pareto_k) in {
        "free-form, Normal": (2.5, 0.8),
        "last": (7.0, torch.inf),
    }.items():
        rows[name] |= dict(ess=ess, pareto_k=pareto_k)
    rows["points"]["ess"] = 1.5
    table = Comparison.from_dict(rows, orient="index")
    table.attrs = {"num_particles": 7, "num_images": 5}
    expected = {
        "elbo": {"free_form_normal": (-3, 0.2, 5), "last": (-4, 0.3, 5)},
        "iwae_7": {"free_form_normal": (-2, 0.1, 5), "last": (-3, 0.2, 5)},
        "elbo_difference": {"last": (-1, 0.05, 5)},  # paired, to the first bound
        "ess": {"free_form_normal": (2.5, None, 5), "last": (7.0, None, 5)},
        "pareto_k": {"free_form_normal": (0.8, None, 5)},  # infinite without a tail of weights
    }
    assert bounds_of_rows(table.astype({"is_bound": bool})) == expected


def test_means_over_seeds_are_of_what_all_seeds_have():
    metrics = [{"elbo": (1.0, 0.1, 5), "pareto_k": (0.5, None, 5)}, {"elbo": (3.0, 0.1, 5)}]
    assert over_seeds(metrics) == {"elbo": (2.0, 1.0, 2)}
    assert over_seeds(metrics[:1]) == metrics[0]


def test_calibration_error_by_hand():
    """One bin holds .95 and 1, too sure by .8 in all; one .22 and .25, too unsure by .53."""
    confidence = torch.tensor([0.95, 0.95, 0.95, 0.95, 1.0, 0.22, 0.25])
    right = torch.tensor([True, True, True, False, True, True, False])
    assert calibration_error(confidence, right) == pytest.approx((0.8 + 0.53) / 7)


def test_the_worst_seed_is_the_one_with_the_lowest_value():
    """It comes with its own error; a number that a seed lacks has neither mean nor worst."""
    metrics = [
        {"right": (0.9, 0.1, 5), "loss": (3.0, 0.1, 5), "early": (0.5, 0.1, 5)},
        {"right": (0.7, 0.2, 6), "loss": (1.0, 0.1, 5)},
        {"right": (0.8, 0.3, 7), "loss": (2.0, 0.1, 5), "early": (0.1, 0.1, 5)},
    ]
    summary = with_worst(metrics, "[re]*")
    assert summary["right_worst"] == (0.7, 0.2, 6) and summary["right"][0] == pytest.approx(0.8)
    assert summary.keys() == {"right", "loss", "right_worst"}


def test_the_error_of_a_median_is_that_of_normal_draws():
    """The standard error of a median of n normal draws is sqrt(pi / 2n); the bootstrap finds it."""
    draws = torch.randn(2001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value, error, count = median_and_error(draws, seed=0)
    assert value == draws.median() and count == 2001
    assert error == pytest.approx((torch.pi / 2 / count) ** 0.5, rel=0.3)
    assert median_and_error(draws, seed=0)[1] == error
