"""The energy models' experiments run from end to end in miniature and name what they promise."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from miniature import compare_small_machines, few_digits

from capsule_zoo.data import Binarize
from capsule_zoo.experiments import Options
from capsule_zoo.experiments.capsule_helmholtz import bounds as capsule_helmholtz
from capsule_zoo.experiments.capsule_rbm import likelihood as capsule_rbm
from capsule_zoo.experiments.common import energy
from capsule_zoo.experiments.training import train
from capsule_zoo.inference import log_partition
from capsule_zoo.registry import create, small_settings

QUICK = Options(minutes=0.005, progress=False, processes=1)


@pytest.fixture(autouse=True)
def miniature(monkeypatch, unpainted):
    """Use few digits for every data set, little annealing and short curves; RBMs are faster."""
    dataset = few_digits(120, 30, size=12)
    for module in (energy, capsule_rbm):
        monkeypatch.setattr(module, "load_dataset", lambda *args, **kwargs: dataset)
    compare_small_machines(monkeypatch)
    return dataset


def test_the_probe_is_fitted_on_training_images_and_asked_about_test_images(miniature, monkeypatch):
    arguments = {}

    def noted(train, labels, test, test_labels):
        arguments.update(train=train, labels=labels, test=test, test_labels=test_labels)
        return arguments, None

    monkeypatch.setattr(energy, "probe_scores", noted)
    entry = create("rbm", **{**small_settings("rbm"), "image_shape": miniature.image_shape})
    energy.probe(entry, miniature)
    for part, split in (("train", miniature.train.binarize()), ("test", miniature.test)):
        expected = list(energy.spectra(entry, split.images).values())[-1]
        np.testing.assert_array_equal(arguments[part], expected)
    assert torch.equal(arguments["labels"], miniature.train.labels)
    assert torch.equal(arguments["test_labels"], miniature.test.labels)


def test_a_switch_is_silent_if_it_is_on_in_less_than_a_hundredth_of_the_images():
    switches = np.zeros((1000, 4))
    switches[:, 0] = 1
    for capsule, images in ((1, 9), (2, 10)):
        switches[:images, capsule] = 1
    table = energy.use_of_switches({"capsule1_switch": switches})
    numbers = {table.name(q, v): number for q, v, number in table}
    assert numbers["capsule1_switch_silent"] == (2, None, 4)
    assert numbers["capsule1_switch_on"] == (pytest.approx(1.019 / 4), None, 1000)


def test_pretraining_takes_its_share_and_its_weights_are_trained_on(miniature, monkeypatch):
    arguments = {}

    def noted(model, guide, images, **settings):
        arguments.update(settings, images=images, weight=model.weight)
        with torch.no_grad():
            model.visible.bias.fill_(-7)  # not replaced by the mean of the data

    monkeypatch.setattr(capsule_helmholtz, "pretrain", noted)
    options = capsule_helmholtz.with_pretraining(replace(QUICK, minutes=20.0))
    assert options["minutes"] == 18.0
    entry = create("capsule-helmholtz", image_shape=miniature.image_shape)
    train(entry, miniature, QUICK, name="run", start=options["start"], steps=1, lr=1e-9)
    assert arguments["minutes"] == 1.0 and arguments["weight"] is entry.model.weight
    assert isinstance(arguments["inputs"].transform, Binarize)
    assert torch.equal(arguments["images"], miniature.train.images)
    assert (entry.model.visible.bias + 7).abs().max() < 1e-6
    families = dict(visible_family="gaussian", hidden_family="gaussian")
    options["start"](create("capsule-helmholtz", **families), miniature.train.images)
    assert arguments["inputs"].transform is None  # of standardized pixels


def test_log_likelihoods_are_about_the_exact_value(miniature, monkeypatch):
    """The machine's log Z can be summed; AIS and its reverse err by their standard errors."""
    torch.manual_seed(0)
    entry = create("rbm", image_shape=(1, 12, 12), hidden=6)
    entry.model.set_base_rates(miniature.train.images)
    free_energy = entry.model.free_energy(miniature.test.images).detach().numpy()
    exact = -free_energy.mean() - log_partition(entry.model).value
    monkeypatch.setattr(capsule_rbm, "ANNEALING", dict(temperatures=300, chains=30))
    results = capsule_rbm.log_likelihoods(entry, miniature, QUICK)
    for value, error, count in results.values():
        assert abs(value - exact) < 0.3 and count == 30
        assert error >= 0.99 * np.std(free_energy, ddof=1) / 30**0.5
