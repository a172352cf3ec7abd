"""Variants of the part-whole story in miniature: other likelihoods, other images."""

import pytest
import torch
from miniature import few_digits, names_in_record
from PIL import Image

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments import training as photographs
from capsule_zoo.experiments.part_whole import variants as part_whole_variants
from capsule_zoo.experiments.part_whole.variants import ProbesInTraining, learn_both
from capsule_zoo.inference.training.settings import Check
from capsule_zoo.records import read_record
from capsule_zoo.registry import create

METRICS = {"probe_presence", "probe_presence_pose", "squared_error", "training_images"}
METRICS |= {"elbo", "iwae_50", "ess"}  # pareto_k is left out where it is infinite
OPTIONS = Options(minutes=0.01, progress=False)


@pytest.fixture
def digits():
    return few_digits(80, 16)


def check_record(name, variants, folder):
    metrics = read_record(name, folder)["metrics"]
    found = {metric for metric in metrics if not metric.startswith("pareto_k_")}
    assert found == {f"{metric}_{variant}" for metric in METRICS for variant in variants}
    for variant in variants:
        assert metrics[f"elbo_{variant}"]["value"] < metrics[f"iwae_50_{variant}"]["value"]
        assert metrics[f"squared_error_{variant}"]["value"] > 0
    stem = name.rpartition("/")[2]
    pictures = {file.stem for file in (folder / "part-whole").glob("*.png")}
    kinds = ("parses", "templates", "samples")
    assert pictures == {f"{stem}_{variant}_{kind}" for variant in variants for kind in kinds}


def test_likelihoods_trains_both_and_measures_both_alike(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(part_whole_variants, "load_dataset", lambda *args, **kwargs: digits)
    reproduce("part-whole/likelihoods", OPTIONS, folder=tmp_path)
    check_record("part-whole/likelihoods", ("composite", "mixture"), tmp_path)


def test_variants_start_alike(digits):
    """With one seed, likelihoods differ and initial parameters do not."""
    starts = []
    for kind in ("composite", "mixture"):
        made, _ = learn_both(kind, digits, OPTIONS, 1e-9, likelihood=kind)
        starts.append(made.model.state_dict())
        assert made.model.painting.likelihood == kind
    assert all(torch.equal(value, starts[1][name]) for name, value in starts[0].items())


def test_colors_trains_on_clothes_and_on_a_folder_of_photographs(tmp_path, monkeypatch, digits):
    generator = torch.Generator().manual_seed(0)
    for part, number in (("train", 30), ("test", 6)):
        for label in ("cat", "dog"):
            folder = tmp_path / "data" / "cifar10" / part / label
            folder.mkdir(parents=True)
            for i in range(number):
                pixels = torch.randint(256, (12, 12, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    options = Options(minutes=0.01, progress=False, data_root=tmp_path / "data")
    found = photographs.photographs("cifar10", options)
    assert found.image_shape == (3, 12, 12) and len(found.train) == 54
    asked = []

    def load(name, root=None):
        asked.append(name)
        return load_dataset(name, root) if name.startswith("folder:") else digits

    for module in (part_whole_variants, photographs):
        monkeypatch.setattr(module, "load_dataset", load)
    reproduce("part-whole/colours", options, folder=tmp_path)
    assert asked == ["fashion-mnist", f"folder:{tmp_path / 'data' / 'cifar10'}"]
    check_record("part-whole/colours", ("fashion_mnist", "cifar10"), tmp_path)


def test_without_a_folder_the_data_set_of_that_name_is_meant(tmp_path, monkeypatch, digits):
    asked = []

    def load(name, root=None):
        asked.append((name, root))
        return digits

    monkeypatch.setattr(photographs, "load_dataset", load)
    photographs.photographs("cifar10", Options(data_root=tmp_path))
    monkeypatch.delenv("CAPSULE_ZOO_DATA", raising=False)
    photographs.photographs("cifar10", Options())
    assert asked == [("cifar10", tmp_path), ("cifar10", None)]


def test_sensitivity_tries_variants_and_probes_them_as_they_learn(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(part_whole_variants, "load_dataset", lambda *args, **kwargs: digits)
    options = Options(progress=False, processes=1)
    chosen = ("three_levels", "sampled")
    steps = dict(steps=4, tightening=2)
    settings = dict(variants=chosen, points=2, probed=16, images=4, particles=3, **steps)
    metrics, figures = names_in_record("part-whole/sensitivity", options, tmp_path, **settings)
    wanted = {"probe_presence", "probe_presence_pose", "elbo", "iwae_3", "ess"}
    assert metrics == {f"{metric}_{variant}" for metric in wanted for variant in chosen}
    assert figures == {""}


def test_probes_in_training_go_on_from_their_file(digits, tmp_path):
    torch.manual_seed(0)
    entry = create("part-whole", image_shape=digits.image_shape, objects=3, parts=4)
    path = tmp_path / "curve.json"
    curve = ProbesInTraining(digits, 16, path)
    for step in (10, 20):
        curve(Check(entry.model, entry.guide, step, 0, 1.0, 0.0, 0.0))
    again = ProbesInTraining(digits, 16, path)
    assert again.found == curve.found
    for step in (20, 30):
        again(Check(entry.model, entry.guide, step, 0, 1.0, 0.0, 0.0))
    assert [row[0] for row in again.found] == [10, 20, 30]
    assert all(0 <= row[1] <= 1 for row in again.found)
