"""The energy models' experiments run from end to end in miniature and name what they promise."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from miniature import compare_small_machines, few_digits

from capsule_zoo.data import Binarize
from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.capsule_helmholtz import headline as capsule_helmholtz
from capsule_zoo.experiments.capsule_rbm import headline as capsule_rbm
from capsule_zoo.experiments.common import energy
from capsule_zoo.experiments.study import Job
from capsule_zoo.experiments.training import train
from capsule_zoo.inference import log_partition
from capsule_zoo.records import read_record
from capsule_zoo.registry import create, save, small_sizes

TIME_UPDATES = capsule_rbm.time_updates
QUICK = Options(minutes=0.005, progress=False, processes=1)


@pytest.fixture(autouse=True)
def miniature(monkeypatch, unpainted):
    """Use few digits for every data set, little annealing and short curves; RBMs are faster."""
    few = few_digits(120, 30, size=12)
    for module in (energy, capsule_rbm):
        monkeypatch.setattr(module, "load_dataset", lambda *args, **kwargs: few)
    compare_small_machines(monkeypatch)
    return few


ANNEALING = dict(temperatures=5, chains=6)


def test_the_probe_is_fitted_on_training_images_and_asked_about_test_images(miniature, monkeypatch):
    given = {}

    def noted(train, labels, test, test_labels):
        given.update(train=train, labels=labels, test=test, test_labels=test_labels)
        return given, None

    monkeypatch.setattr(energy, "probe_scores", noted)
    entry = create("rbm", **{**small_sizes("rbm"), "image_shape": miniature.image_shape})
    energy.probe(entry, miniature)
    for part, split in (("train", miniature.train.binarized()), ("test", miniature.test)):
        expected = list(energy.spectra(entry, split.images).values())[-1]
        np.testing.assert_array_equal(given[part], expected)
    assert torch.equal(given["labels"], miniature.train.labels)
    assert torch.equal(given["test_labels"], miniature.test.labels)


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
    given = {}

    def noted(model, guide, images, **settings):
        given.update(settings, images=images, weight=model.weight)
        with torch.no_grad():
            model.visible.bias.fill_(-7)  # not replaced by the mean of the data

    monkeypatch.setattr(capsule_helmholtz, "pretrain", noted)
    how = capsule_helmholtz.after_pretraining(QUICK, 10.0, 0.2)
    assert how["minutes"] == 8.0
    without = capsule_helmholtz.after_pretraining(QUICK, 10.0, 0.0)
    assert without["start"] is None and without["minutes"] == 10.0
    entry = create("capsule-helmholtz", image_shape=miniature.image_shape)
    train(entry, miniature, QUICK, name="run", start=how["start"], steps=1, lr=1e-9)
    assert given["minutes"] == 1.0 and given["weight"] is entry.model.weight
    assert {settings["checks"].clock for settings in (how, without, given)} == {"processor"}
    assert isinstance(given["inputs"].transform, Binarize)
    assert torch.equal(given["images"], miniature.train.images)
    assert (entry.model.visible.bias + 7).abs().max() < 1e-6
    families = dict(visible_family="gaussian", hidden_family="gaussian")
    how["start"](create("capsule-helmholtz", **families), miniature.train.images)
    assert given["inputs"].transform is None  # of standardized pixels


@pytest.mark.parametrize("share", [0, 0.5])
def test_objectives_start_from_pretrained_layers_if_asked_to(share, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(capsule_helmholtz, "pretrain", lambda *_, **how: calls.append(how))
    objectives, train = [], capsule_helmholtz.train

    def noted(*given, objective, **how):
        objectives.append(objective)
        return train(*given, objective=objective, **how)

    monkeypatch.setattr(capsule_helmholtz, "train", noted)
    settings = dict(particles=3, images=20, share=share)
    reproduce("capsule-helmholtz/objectives", QUICK, folder=tmp_path, **settings)
    assert len(calls) == (4 if share else 0)
    assert all(how["minutes"] == pytest.approx(0.5 * QUICK.minutes / 4 / 2) for how in calls)
    assert [each.recycle_top for each in objectives[:2]] == [True, False]


def test_a_run_that_goes_on_is_not_started_again(miniature, tmp_path):
    options, started = replace(QUICK, runs=tmp_path), []
    for _ in range(2):
        entry = create("capsule-helmholtz", image_shape=miniature.image_shape)
        start = lambda entry, images: started.append(entry)  # noqa: E731
        train(entry, miniature, options, name="run", start=start, steps=1)
    assert len(started) == 1


def test_a_given_run_is_measured_without_training(tmp_path):
    torch.manual_seed(0)
    entry = create("capsule-rbm", image_shape=(1, 12, 12), capsules=3, units=2)
    save(entry, tmp_path / "run", data="digits", seed=0)
    options = Options(run=str(tmp_path / "run"), progress=False)
    result, _ = reproduce("capsule-rbm/mnist", options, folder=tmp_path, **ANNEALING)
    state = result.entry.model.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in entry.model.state_dict().items())


def test_log_likelihoods_are_about_the_exact_value(miniature):
    """The machine's log Z can be summed; AIS and its reverse err by their standard errors."""
    torch.manual_seed(0)
    entry = create("rbm", image_shape=(1, 12, 12), hidden=6)
    entry.model.set_base_rates(miniature.train.images)
    free_energy = entry.model.free_energy(miniature.test.images).detach().numpy()
    exact = -free_energy.mean() - log_partition(entry.model).value
    annealing = capsule_rbm.Annealing(temperatures=300, chains=30)
    found = annealing.log_likelihoods(entry, miniature, QUICK)
    for value, error, count in found.values():
        assert abs(value - exact) < 0.3 and count == 30
        assert error >= 0.99 * np.std(free_energy, ddof=1) / 30**0.5


def test_the_faster_machine_goes_on_until_the_slower_ends(tmp_path, monkeypatch):
    """The RBM takes two thirds of the time, so it makes half as many updates again."""
    made = []
    train = capsule_rbm.train

    def noted(entry, *args, **kwargs):
        made.append((entry.name, kwargs["steps"]))
        return train(entry, *args, **kwargs)

    monkeypatch.setattr(capsule_rbm, "train", noted)
    settings = dict(**ANNEALING, updates=4)
    options = Options(progress=False, processes=1)
    reproduce("capsule-rbm/beside-rbm", options, folder=tmp_path, **settings)
    assert made == [("capsule-rbm", 4), ("rbm", 4), ("rbm", 6)]
    found = read_record("capsule-rbm/beside-rbm", tmp_path)["metrics"]
    minutes = [found[f"core_minutes_{name}"]["value"] for name in ("capsules", "rbm", "rbm_longer")]
    assert minutes == pytest.approx([4 * 0.03 / 60, 4 * 0.02 / 60, 4 * 0.03 / 60])
    assert found["log_likelihood_ais_rbm"]["n"] == 30  # one seed, so that errors are over images
    assert capsule_rbm.longer({"a": 1.0, "b": 2.0}, 10) == {"a_longer": ("a", 20)}


def test_units_are_read_as_they_act(miniature):
    """A hidden unit's mean is zero where its switch is off, and the RBM's is a plain sigmoid."""
    images = miniature.test.images
    machine = create("rbm", image_shape=miniature.image_shape, hidden=5)
    pixels = machine.model.weight.flatten(1)
    field = images.flatten(1) @ pixels + machine.model.hidden.bias.flatten()
    found = capsule_rbm.hidden_means(machine, images)
    np.testing.assert_allclose(found, field.sigmoid().detach(), atol=1e-6)
    capsules = create("capsule-rbm", image_shape=miniature.image_shape, capsules=3, units=2)
    with torch.no_grad():
        capsules.model.switch_bias.copy_(torch.tensor([0.0, -200.0, 0.0]))
    found = capsule_rbm.hidden_means(capsules, images)
    assert found.shape == (30, 6) and (found[:, 2:4] == 0).all() and (found[:, 4:] > 0).all()


def test_updates_are_timed_in_turn(monkeypatch):
    """Every machine is timed once in every round; the mocked clock gives two units per update."""
    ticks = iter(range(0, 10_000, 2 * capsule_rbm.TIMED))
    monkeypatch.setattr(capsule_rbm.time, "process_time", lambda: next(ticks))
    order = []
    monkeypatch.setattr(capsule_rbm, "train", lambda entry, *args, **how: order.append(entry.name))
    job = Job("clock", ("capsules", "rbm"), QUICK)
    rounds = TIME_UPDATES(job)
    assert rounds == {name: [2.0] * capsule_rbm.ROUNDS for name in ("capsules", "rbm")}
    assert order == ["capsule-rbm", "rbm"] * capsule_rbm.ROUNDS
