"""The part-whole experiments run from end to end in miniature and name what they promise."""

import math

import numpy as np
import pyro
import pytest
import torch
from miniature import few_digits

from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.part_whole import classification as part_whole
from capsule_zoo.experiments.part_whole import refine as part_whole_refine
from capsule_zoo.experiments.part_whole.refine import Race, fastest
from capsule_zoo.records import read_record
from capsule_zoo.registry import create, load, save_entry

METHODS = ("plain", "scheduled")


@pytest.fixture
def small_digits(monkeypatch):
    """Use a few digits for every data set."""
    few = few_digits(80, 16)
    monkeypatch.setattr(part_whole, "load_dataset", lambda *args, **kwargs: few)


def test_classify_measures_a_given_run_without_training(small_digits, tmp_path):
    torch.manual_seed(0)
    entry = create("part-whole", objects=3, parts=4)
    run_folder = tmp_path / "run"
    save_entry(entry, run_folder, data="digits", seed=0)
    options = Options(run=str(run_folder), progress=False)
    result, _ = reproduce("part-whole/classify", options, folder=tmp_path)
    state = load(run_folder).model.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in result.entry.model.state_dict().items())
    record = read_record("part-whole/classify", tmp_path)
    assert record["command"] == f"capsule-zoo reproduce part-whole/classify --run {run_folder}"
    wanted = {"probe_presence", "probe_parts", "probe_drawn", "probe_components"}
    assert wanted < set(record["metrics"])


def test_principal_components_are_uncorrelated_and_span_the_images():
    images = torch.randn(
        40, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    few, whole = (part_whole.principal_components(images, n)(None, images) for n in (4, 32))
    assert few.shape == (40, 4) and whole.shape == (40, 9)  # 32 of nine pixels
    law = np.cov(whole.T)
    assert abs(law - np.diag(law.diagonal())).max() < 1e-12
    spread = np.cov(images.flatten(1).numpy().T)
    assert np.allclose(law.diagonal(), np.linalg.eigvalsh(spread)[::-1])
    assert np.allclose(few, whole[:, :4])


def test_probes_are_fitted_on_some_training_images_and_on_all(small_digits, monkeypatch):
    asked = []
    monkeypatch.setattr(part_whole, "linear_probe", lambda *args: asked.append(args))
    pyro.set_rng_seed(0)
    entry, data = create("part-whole", objects=3, parts=4), part_whole.load_dataset()
    few = dict(list(part_whole.READERS.items())[:2])
    found = part_whole.fit_probes(entry, data, few, probed=30)
    names = ["probe_presence", "probe_presence_pose"]
    assert list(found) == [name + ending for name in names for ending in ("", "_all")]
    assert [len(features) for features, *_ in asked] == [30, 80, 30, 80]
    for features, labels, _, test_labels in asked:
        assert torch.equal(labels, data.train.labels[: len(features)])
        assert torch.equal(test_labels, data.test.labels)


def test_drawn_presences_are_binary_and_parts_need_no_object(small_digits):
    pyro.set_rng_seed(0)
    entry, data = create("part-whole", objects=3, parts=4), part_whole.load_dataset()
    drawn, again, other = (
        part_whole.READERS["probe_drawn"](entry.guide, data.test.images, seed=seed)
        for seed in (0, 0, 1)
    )
    assert set(np.unique(drawn)) == {0.0, 1.0} and drawn.shape == (len(data.test), 3)
    assert (drawn == again).all() and (drawn != other).any()
    shares = part_whole.READERS["probe_presence"](entry.guide, data.test.images)
    assert ((shares > 0) & (shares < 1)).all()
    parts = part_whole.READERS["probe_parts"](entry.guide, data.test.images)
    assert parts.shape == (len(data.test), 4 * (1 + 6))


def test_guides_compares_every_guide_and_keeps_relaxed_bounds_apart(small_digits, tmp_path):
    options = Options(minutes=0.01, progress=False)
    result, _ = reproduce("part-whole/guides", options, folder=tmp_path, particles=10)
    bounds = result.table[result.table["is_bound"]]
    assert set(result.table.index) - set(bounds.index) == {"delta"}
    assert {"normal", "low rank", "routing", "semi-amortized"} <= set(bounds.index)
    assert (bounds["elbo"] < bounds["iwae"]).all()
    metrics = read_record("part-whole/guides", tmp_path)["metrics"]
    assert {"iwae_10_low_rank", "ess_semi_amortized", "map_autodelta_relaxed"} <= set(metrics)
    relaxed = {n for n in metrics if n.startswith("elbo_") and n.endswith("relaxed")}
    assert {"elbo_free_form_normal_relaxed", "elbo_autonormal_relaxed"} <= relaxed
    assert "elbo_autodelta_relaxed" not in relaxed


def test_refine_races_both_methods_upright_and_rotated(monkeypatch, tmp_path):
    monkeypatch.setattr(part_whole_refine, "load_dataset", lambda *a, **k: few_digits(80, 16))
    monkeypatch.setattr(part_whole_refine, "PLAIN_RATES", (1e-3,))
    monkeypatch.setattr(part_whole_refine, "RATES", (0.03,))
    options = Options(minutes=0.01, progress=False)
    settings = dict(images=8, plain_steps=12, budgets=(4, 11))
    reproduce("part-whole/refine", options, folder=tmp_path, **settings)
    metrics = read_record("part-whole/refine", tmp_path)["metrics"]
    for name in ("upright", "rotated"):
        value = {key: metrics[f"{name}_{key}"]["value"] for key in ("goal", "start")}
        arrived = [metrics[f"{name}_{method}_arrived"]["value"] for method in METHODS]
        ends = [metrics[f"{name}_{method}_end"]["value"] for method in METHODS]
        assert max(arrived) == 1 and max(ends) >= value["goal"] > value["start"] - 2
        seconds = [metrics[f"{name}_{method}_seconds"]["value"] for method in METHODS]
        assert metrics[f"speedup_{name}"]["value"] == pytest.approx(seconds[0] / seconds[1])


def test_a_race_ends_where_the_smoothed_objective_reaches_the_goal():
    climb = Race(torch.arange(101.0), begin=0.0, end=100.0, seconds=50.0, rate=0.1)
    # ten steps have a mean of 60 when the last of them is at 64.5
    assert climb.arrival(60.0) == pytest.approx(50 * 65 / 100)
    assert math.isinf(climb.arrival(1000.0))
    assert climb.arrival(98.0) == 50.0  # the end alone, scored with fresh noise, is above it
    slow, high = climb._replace(seconds=80.0), climb._replace(path=climb.path + 1, end=101.0)
    assert fastest([slow, climb], 60.0) is climb
    assert fastest([climb, high], 1000.0) is high
    assert high.numbers(1000.0)["arrived"][0] == 0 and high.numbers(1000.0)["steps"][0] == 100
    assert climb.numbers(60.0)["steps"][0] == 65
