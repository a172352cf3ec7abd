"""The study of every entry's start in miniature, and what its score means."""

import pytest
import torch
from miniature import few_digits

from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.study import Study
from capsule_zoo.experiments.zoo import starts as zoo_starts
from capsule_zoo.experiments.zoo.starts import first_step, relative_error
from capsule_zoo.inference.evaluation.classification import Share
from capsule_zoo.records import read_record
from capsule_zoo.registry import create, small_sizes

OPTIONS = Options(progress=False, processes=1)


@pytest.fixture
def small(monkeypatch):
    """Use few digits."""
    few = few_digits(32, 16, size=17)
    monkeypatch.setattr(zoo_starts, "load_dataset", lambda name, root: few)
    return few


def test_a_classifier_has_started_where_it_is_right_more_often_than_not(small, monkeypatch):
    sizes = {**small_sizes("cnn"), "classes": 10}
    (job,) = Study({"cnn": sizes}).jobs(OPTIONS)
    rates = iter([0.6, 0.4, 0.1])

    def share(model, guide, split):
        return Share(next(rates), 0.1, len(split))

    monkeypatch.setattr(zoo_starts, "error_rate", share)
    assert first_step(job, data="digits", steps=3, every=1) == (2, pytest.approx(0.8))


def test_a_run_that_never_starts_has_one_step_more_than_its_limit(small, monkeypatch):
    (job,) = Study({"vae": small_sizes("vae")}).jobs(OPTIONS)
    monkeypatch.setattr(zoo_starts, "relative_error", lambda entry, data: 1.0)
    assert first_step(job, data="digits", steps=2, every=1) == (3, 1.0)


def test_the_best_constant_image_scores_one(small, monkeypatch):
    entry = create("vae", **small_sizes("vae"))
    mean = small.train.images.mean(0)
    monkeypatch.setattr(zoo_starts, "infer", lambda guide, images: {})
    painted = mean.expand(len(small.validation), -1, -1, -1)
    monkeypatch.setattr(zoo_starts, "mean_images", lambda *args, **kwargs: painted)
    assert relative_error(entry, small) == pytest.approx(1.0)
    monkeypatch.setattr(zoo_starts, "mean_images", lambda *args, **kwargs: small.validation.images)
    assert relative_error(entry, small) == 0


def test_starts_names_every_entry_and_counts_those_that_do_not_start(small, tmp_path):
    names = ["cnn", "overlapping-capsules", "part-whole", "rbm"]
    settings = dict(seeds=2, steps=2, every=1, entries=tuple(names), small=True)
    reproduce("zoo/starts", OPTIONS, folder=tmp_path, **settings)
    found = read_record("zoo/starts", tmp_path)["metrics"]
    own = {
        f"{kind}_{name.replace('-', '_')}" for kind in ("step", "latest", "error") for name in names
    }
    assert set(found) == own | {"not_started"}
    assert found["not_started"]["n"] == 8
    late = sum(found[f"latest_{name.replace('-', '_')}"]["value"] == 3 for name in names)
    assert found["not_started"]["value"] >= late > 0
    assert torch.isfinite(torch.tensor([metric["value"] for metric in found.values()])).all()
