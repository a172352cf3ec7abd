"""Kinds of shape codes compared with k-means clusters, in miniature."""

import numpy as np
import pyro
import pytest
import torch
from miniature import few_digits, names_in_record

from capsule_zoo.experiments import Options
from capsule_zoo.experiments.shape_codes import clusters as experiment
from capsule_zoo.experiments.shape_codes.clusters import cluster
from capsule_zoo.registry import create, small_settings

OPTIONS = Options(progress=False, processes=1)


@pytest.fixture(autouse=True)
def in_miniature(monkeypatch):
    few = few_digits(60, 20, size=12)

    def made(*_):
        pyro.set_rng_seed(0)
        return create("shape-codes", **small_settings("shape-codes"))

    own = experiment.load
    monkeypatch.setattr(experiment, "load_dataset", lambda name, root: few)
    monkeypatch.setattr(experiment, "load", lambda name: made() if name == "shown" else own(name))


def test_kinds_and_k_means_name_the_same_images(tmp_path):
    small = dict(weights="shown", components=5, numbers=(2, 10))
    found, _ = names_in_record("shape-codes/clusters", OPTIONS, tmp_path, **small)
    assert {
        f"classes_found_k_means_{of}_{n}" for of in ("pixels", "parts") for n in (2, 10)
    } < found
    assert "classes_found_kinds_64" in found and "classes_one_to_one_k_means_parts_10" in found


def test_clusters_are_made_by_training_rows_alone():
    train = np.array([[0.0], [0.1], [5.0], [5.1]])
    known, asked = cluster(train, np.array([[0.2], *[[50.0]] * 9]), 2, seed=0)
    assert torch.equal(asked[0], known[0]) and torch.equal(asked[1], known[2])
    assert torch.equal(known.sum(0), torch.tensor([2.0, 2.0]))
