"""The watch over splits sees training on test images, and measures of training images."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from miniature import few_digits
from watermarks import Leak, splits_of

from capsule_zoo.data import Binarize, Dataset
from capsule_zoo.experiments import Options, Study
from capsule_zoo.experiments.capsule_helmholtz import bounds as capsule_helmholtz
from capsule_zoo.experiments.capsule_network import classification as capsule_network
from capsule_zoo.experiments.common import findings
from capsule_zoo.experiments.part_whole import classification as part_whole
from capsule_zoo.experiments.recurrent_capsules import strokes as recurrent
from capsule_zoo.experiments.stacked_capsule_autoencoder import clusters as stacked
from capsule_zoo.experiments.training import train
from capsule_zoo.experiments.zoo.equal_network import Task
from capsule_zoo.inference.sample_quality import FeatureClassifier
from capsule_zoo.registry import create, small_settings

OPTIONS = Options(progress=False, minutes=1e-4)


@pytest.fixture
def data():
    return few_digits(20, 10)


@pytest.fixture
def entry(data):
    return create("vae", **{**small_settings("vae"), "image_shape": data.image_shape})


def test_marks_tell_the_splits_apart_also_in_black_and_white(data):
    for name, split in dict(train=data.train, validation=data.validation, test=data.test).items():
        images = split.images
        black_and_white = Binarize()(images, generator=torch.Generator().manual_seed(0))
        for batch in (images, black_and_white, 3 * images - 1, split, images.numpy()):
            assert splits_of(batch) == {name}
    mixed = torch.cat([data.train.images, data.test.images])
    assert splits_of(mixed) == {"train", "test"}
    assert splits_of(torch.zeros(4, 1, 8, 8)) == set()


@pytest.mark.parametrize("wrong", ["validation", "test"])
def test_training_on_another_split_is_a_leak(data, entry, wrong):
    train(entry, data, OPTIONS, steps=1, name="run")
    with pytest.raises(Leak, match="training read images of"):
        train(entry, replace(data, train=getattr(data, wrong)), OPTIONS, steps=1, name="run")


def test_checks_on_another_split_are_a_leak(data, entry):
    wrong = Dataset(data.name, data.train, data.test, data.test)
    with pytest.raises(Leak, match="checks of a training read"):
        train(entry, wrong, OPTIONS, steps=1, name="run")


MEASURES: dict[str, tuple[str, Callable]] = {  # and an entry that it measures on a split
    "evaluate": ("vae", lambda entry, split: findings.held_out_bounds(entry, split, 2, 0)),
    "error_rate": (
        "cnn",
        lambda entry, split: capsule_network.error_rate(entry.model, entry.guide, split),
    ),
    "class_error": ("recurrent-capsules", lambda entry, split: recurrent.class_error(entry, split)),
    "squared_error": (
        "vae",
        lambda _, split: findings.squared_error(split.images + 1, split.images),
    ),
    "reconstruction_error": (
        "capsule-helmholtz",
        lambda entry, split: capsule_helmholtz.reconstruction_error(entry, split.images),
    ),
}


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_of_training_images_is_a_leak(data, name):
    entry_name, measure = MEASURES[name]
    sizes = {**small_settings(entry_name), "image_shape": data.image_shape}
    sizes |= {"classes": data.num_classes} if "classes" in sizes else {}
    entry = create(entry_name, **sizes)
    measure(entry, data.test)
    with pytest.raises(Leak, match=f"{name} read"):
        measure(entry, data.train)


def try_to_measure(job, *, name, is_try=False):
    """Measure the error rate of a new network on one split of digits."""
    digits = few_digits(20, 10)
    shape = {"image_shape": digits.image_shape, "classes": digits.num_classes}
    entry = create("cnn", **{**small_settings("cnn"), **shape})
    capsule_network.error_rate(entry.model, entry.guide, getattr(digits, name))


def try_setting(job, *, name):
    try_to_measure(job, name=name)


TRIED = Task("", "", "", 0.1, 0.0, None, is_try=True)


@pytest.mark.parametrize(
    ("task", "variant", "settings"),
    [
        (try_to_measure, TRIED, {}),
        (try_to_measure, None, {"is_try": True}),
        (try_setting, None, {}),
    ],
)
def test_a_try_of_a_search_that_measures_test_images_is_a_leak(task, variant, settings):
    run = Study({"way": variant}).run
    options = replace(OPTIONS, processes=1)
    run(task, options, name="validation", **settings)
    with pytest.raises(Leak, match=r"error_rate read images of \['test'\], and may .*validation"):
        run(task, options, name="test", **settings)
    Study({"way": replace(TRIED, is_try=False)}).run(try_to_measure, options, name="test")


def test_probes_and_clusters_of_test_features_are_a_leak(data, entry):
    """Also where training features stand among them."""
    sites = list(entry.guide.covers)
    features = {
        name: part_whole.latents(entry.guide, getattr(data, name).images, sites)
        for name in ("train", "test")
    }
    labels = data.train.labels
    for fitted in (part_whole.linear_probe, stacked.cluster_accuracy):
        fitted(features["train"], labels, features["test"], data.test.labels)
        mixed = np.concatenate([features["train"][:10], features["test"]])
        for wrong in (features["test"], mixed):
            with pytest.raises(Leak, match=f"{fitted.__name__} read"):
                fitted(wrong, labels[: len(wrong)], features["test"], data.test.labels)


def test_samples_compared_with_training_images_are_a_leak(data):
    classifier = FeatureClassifier(data.image_shape, data.num_classes)
    drawn = classifier.read(torch.rand(10, *data.image_shape))
    findings.looks(drawn, classifier.read(data.test.images))
    with pytest.raises(Leak, match="looks read"):
        findings.looks(drawn, classifier.read(data.train.images))
