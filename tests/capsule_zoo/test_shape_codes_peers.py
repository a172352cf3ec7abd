"""Shape codes beside real digits, VAEs and k-means, and choices of settings, in miniature."""

import numpy as np
import pyro
import pytest
import torch
from miniature import few_digits, names_in_record

from capsule_zoo.experiments import Options
from capsule_zoo.experiments.shape_codes import peers as experiment
from capsule_zoo.experiments.shape_codes.peers import cluster, halves
from capsule_zoo.registry import create, small_sizes

OPTIONS = Options(progress=False, processes=1)


@pytest.fixture(autouse=True)
def in_miniature(monkeypatch):
    few = few_digits(60, 20, size=12)

    def made(*_):
        pyro.set_rng_seed(0)
        return create("shape-codes", **small_sizes("shape-codes"))

    own = experiment.load
    monkeypatch.setattr(experiment, "load_dataset", lambda name, root: few)
    monkeypatch.setattr(experiment, "on_published_parts", made)
    monkeypatch.setattr(experiment, "load", lambda name: made() if name == "shown" else own(name))


def test_kinds_are_chosen_on_validation_images(monkeypatch, tmp_path):
    """And nothing is read of the test images."""
    read, own = [], experiment.classes_found
    monkeypatch.setattr(
        experiment,
        "classes_found",
        lambda *both: read.append([len(b) for b in both[0]]) or own(*both),
    )
    small = dict(kinds=(2,), sigmas=(0.01, 0.025), steps=2)
    found, _ = names_in_record("shape-codes/choices", OPTIONS, tmp_path, **small)
    assert {"classes_found_2_kinds_sigma_0025", "classes_found_2_kinds_sigma_001"} <= found
    assert read == [[60, 8], [60, 8]]  # training and validation images; there are 20 test images


def test_kinds_and_k_means_name_the_same_images(tmp_path):
    small = dict(weights="shown", components=5, numbers=(2, 10))
    found, _ = names_in_record("shape-codes/clusters", OPTIONS, tmp_path, **small)
    assert {
        f"classes_found_k_means_{of}_{n}" for of in ("pixels", "parts") for n in (2, 10)
    } < found
    assert "classes_found_kinds_64" in found and "classes_one_to_one_k_means_parts_10" in found


@pytest.mark.filterwarnings("ignore:covariance")  # 60 codes of 22 numbers, in float32
def test_samples_are_compared_beside_real_digits(tmp_path):
    small = dict(weights=("shown",), steps=4, sigmas=(0.2,), images=10)
    found, figures = names_in_record("shape-codes/peers", OPTIONS, tmp_path, **small)
    rows = ["shown", "training_digits", "other_test_digits", "vae_sigma_02", "vae_sigma_02_fitted"]
    assert {f"frechet_{row}" for row in rows} <= found and figures == {""}
    assert "late_gain_vae_sigma_02" in found


def test_clusters_are_made_by_training_rows_alone():
    train = np.array([[0.0], [0.1], [5.0], [5.1]])
    known, asked = cluster(train, np.array([[0.2], *[[50.0]] * 9]), 2, seed=0)
    assert torch.equal(asked[0], known[0]) and torch.equal(asked[1], known[2])
    assert torch.equal(known.sum(0), torch.tensor([2.0, 2.0]))


def test_halves_have_no_image_in_common():
    first, second = halves(torch.arange(9), 4, seed=0)
    assert len({*first.tolist(), *second.tolist()}) == 8
