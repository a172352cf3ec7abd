"""Comparisons of all guides, and annealings of trained entries, in miniature."""

import json

import numpy as np
import pytest
import torch
from miniature import few_digits, names_in_record
from terminal import Terminal

from capsule_zoo.data.datasets import load_tests
from capsule_zoo.experiments import Options, training
from capsule_zoo.experiments.zoo import guide_swaps
from capsule_zoo.inference import evaluate, summarize
from capsule_zoo.inference.annealing import annealed_bounds, annealed_log_likelihood
from capsule_zoo.inference.posterior import fitted
from capsule_zoo.inference.posterior.gauss_newton import gauss_newton
from capsule_zoo.records import read_record
from capsule_zoo.registry import create, load, save_entry, small_settings
from capsule_zoo.runs import annealing, measurements
from capsule_zoo.runs import folder as runs

pytestmark = pytest.mark.filterwarnings("ignore:lower is too low")  # with so few temperatures
OPTIONS = Options(progress=False, processes=1)
TINY = dict(chains=2, temperatures=2, leapfrogs=1, refinement=1, modes=2)


def anneal_shortly(patch):
    """Let `zoo/gaps` anneal as `TINY` says, also entries that it anneals for longer."""
    patch.setattr(guide_swaps, "ANNEALING", TINY | dict(particles=4, group_size=4, steps=1))
    patch.setattr(guide_swaps, "IMAGES", 3)
    patch.setattr(guide_swaps, "TRAINING", 2)
    patch.setattr(guide_swaps, "SIMULATED", 2)
    patch.setattr(guide_swaps, "SETTINGS", {"scenes": {"prior_fraction": 0.5, "modes": 1}})


@pytest.fixture
def small(monkeypatch, few_climbs):
    """Use few small digits, and entries of small sizes that are not published."""
    dataset = few_digits(32, 8, size=12)
    anneal_shortly(monkeypatch)
    monkeypatch.setattr(guide_swaps, "load_dataset", lambda name, root: dataset)
    monkeypatch.setattr(runs, "load_dataset", lambda *_, **__: dataset)

    def made(name, image_shape, preset=None):
        return create(name, **{**small_settings(name, preset), "image_shape": image_shape})

    monkeypatch.setattr(training, "create", made)
    return dataset


def test_the_first_parameters_come_from_the_seed_alone(small):
    entries = []
    for state, seed in enumerate((0, 0, 1)):
        torch.manual_seed(state)
        options = Options(progress=False, seed=seed)
        entries.append(guide_swaps.open_trained("vae", options, 1)[0])
    first, again, other = (pair.model.state_dict() for pair in entries)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_gaps_and_losses_are_measured_for_every_entry(small, tmp_path, monkeypatch):
    monkeypatch.setattr(guide_swaps, "ANNEALED", ("vae",))
    monkeypatch.setattr(guide_swaps, "LOSING", ("free_form", "gauss_newton"))
    names, figures = names_in_record("zoo/gaps", OPTIONS, tmp_path)
    rows = "encoder", "free_form", "gauss_newton"
    columns = "lost_elbo", "lost_iwae", "iwae_4", "ess", "milliseconds"
    assert {f"{column}_vae_{row}" for column in columns for row in rows} <= names
    assert {"gap_vae", "lower_vae", "simulated_upper_vae"} <= names and figures == {""}
    metrics = read_record("zoo/gaps", tmp_path)["metrics"]
    assert metrics["gap_vae"]["n"] == 2 and metrics["lower_vae"]["n"] == 3
    numbers = {name: number["value"] for name, number in metrics.items()}
    for row in rows:
        lost = numbers["lower_vae"] - numbers[f"elbo_vae_{row}"]
        assert numbers[f"lost_elbo_vae_{row}"] == pytest.approx(lost, abs=1e-3)
        assert numbers[f"iwae_4_vae_{row}"] == pytest.approx(numbers[f"iwae_vae_{row}"], abs=1e-3)


def test_scenes_are_annealed_given_their_number_of_objects(mnist_root):
    scenes = load("scenes-mnist"), load_tests("multi-mnist:train=20,test=40", mnist_root)
    entry, data = guide_swaps.with_objects(*scenes, 2)
    assert set(data.test.objects.counts.tolist()) == {2}
    assert "scene_presence" not in {site.name for site in entry.model.sites}


@pytest.mark.long
def test_points_are_widened_before_they_are_annealed(small):
    sizes = {**small_settings("part-whole"), "image_shape": (1, 12, 12)}
    entry = create("part-whole", **sizes)
    metrics = annealing.anneal_run(
        entry, small, images=2, particles=2, steps=2, simulated=2, **TINY
    )
    assert metrics["guide"] == "Widened" and np.isfinite(metrics["gap"])
    assert metrics["lost_elbo"] >= metrics["lost_iwae"]


@pytest.mark.long
def test_chains_may_start_at_every_guide_with_a_density(small):
    """The best is chosen by `annealed_log_likelihood`; corrected points remain points."""
    vae, parts = (
        create(name, **{**small_settings(name), "image_shape": (1, 12, 12)})
        for name in ("vae", "part-whole")
    )
    arguments = dict(seed=0, steps=1, refinement=1, modes=1, climbing=4)
    names, subset = ("low_rank", "free_form", "corrected"), small.test.images[:3]
    guides = annealing.starts_of(vae, vae.guide, subset, names, **arguments)
    assert [*guides] == ["encoder", "gauss_newton", "free_form", "corrected"]
    assert guides["encoder"] is vae.guide and guides["gauss_newton"].settings["modes"] == 1
    settings = dict(chains=2, temperatures=6, leapfrogs=1, simulated=2, prior_fraction=0.2)
    for name in ("free_form", "corrected"):  # each alone serves, also for simulated images
        idata = annealed_log_likelihood(vae.model, {name: guides[name]}, subset, **settings)
        assert np.isfinite(annealed_bounds(idata)["gap"]) and idata.attrs["start"] == name
    guides = annealing.starts_of(parts, parts.guide, subset, names, **arguments | {"modes": 2})
    assert [*guides] == ["encoder", "mixture", "free_form"]


def far_distributions(*arguments, **options):
    distributions = gauss_newton(*arguments, **options)
    distributions.locs["image_code"].data += 100
    return distributions


def test_chains_start_at_the_guide_where_it_is_better_than_its_distributions(small, monkeypatch):
    entry = create("vae", **{**small_settings("vae"), "image_shape": (1, 12, 12)})
    settings = dict(images=3, particles=4, steps=1, refinement=5, modes=1, temperatures=6, chains=4)
    metrics, _ = annealing.guide_losses(entry, small, (), **settings)
    assert metrics["start"] == "gauss_newton"
    monkeypatch.setitem(fitted._PER_IMAGE, "gauss_newton", far_distributions)
    metrics, _ = annealing.guide_losses(entry, small, (), **settings)
    assert metrics["start"] == "encoder"


def test_a_guide_above_the_chains_is_told_in_the_table_and_by_the_command(small, monkeypatch):
    entry = create("vae", **{**small_settings("vae"), "image_shape": (1, 12, 12)})
    monkeypatch.setattr(annealing, "starts_of", lambda _, guide, *__, **___: {"encoder": guide})
    settings = dict(images=3, particles=100, steps=1, temperatures=2, chains=1, leapfrogs=1)
    with pytest.warns(UserWarning, match="lower is too low.*'gauss_newton' is"):
        metrics, _ = annealing.guide_losses(entry, small, ("gauss_newton",), **settings)
    assert "'gauss_newton'" in metrics["warning"] and metrics["images_exceeded"] >= 1
    numbers = guide_swaps.numbers_of(metrics, guide_swaps.BOUNDS, 3, 0)
    assert numbers["images_exceeded"] == (metrics["images_exceeded"], None, 3)


def test_gray_images_are_binarized_for_binary_pixels_alone(small):
    for name, binary in (("vae", False), ("capsule-helmholtz", True), ("rbm", True)):
        entry = create(name, **{**small_settings(name), "image_shape": (1, 12, 12)})
        assert measurements.draws_binary_pixels(entry.model) == binary
        test = measurements.scoring_data(entry, small).test
        assert ("binarized(0)" in test.name) == binary
        assert set(test.images.unique().tolist()) == {0.0, 1.0} or not binary
    normal = create("vae", **small_settings("vae"), likelihood="bernoulli")
    assert measurements.draws_binary_pixels(normal.model)
    binary = small.binarize(3)
    assert measurements.scoring_data(normal, binary) is binary  # it is binary already


def test_evaluate_scores_the_binarized_images(small):
    sizes = {**small_settings("capsule-helmholtz"), "image_shape": (1, 12, 12)}
    entry = create("capsule-helmholtz", **sizes)
    metrics = measurements.evaluate_run(entry, small, images=6, particles=3, seed=0)
    assert "binarized(0)" in metrics["data"]
    subset = small.binarize().test[:6]
    again = summarize(evaluate(entry.model, entry.guide, subset, num_particles=3, draws=0))
    assert metrics["elbo"] == again["elbo"] and {"ess", "pareto_k"} <= metrics.keys()


def test_evaluate_by_annealing_prints_and_keeps_both_sides(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = create("vae", **{**small_settings("vae"), "image_shape": (1, 12, 12)})
    save_entry(entry, tmp_path / "run", data="digits")
    options = ["--images", "2", "--chains", "2", "--temperatures", "2", "--simulated", "2"]
    printed = Terminal(capsys).run("evaluate", "run", "--method", "anneal", *options, "--json")
    metrics = json.loads(printed.splitlines()[-1])
    assert {"lower", "gap", "lost_elbo", "lost_elbo_se", "ess"} <= metrics.keys()
    assert "lost_elbo  " in printed and metrics["num_simulated"] == 2
    record = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert record["anneal"]["lower"] == pytest.approx(metrics["lower"])
