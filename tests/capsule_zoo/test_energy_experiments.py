"""The energy models' experiments run from end to end in miniature and name what they promise."""

import numpy as np
import pytest
import torch

from capsule_zoo import experiments
from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, energy, reproduce
from capsule_zoo.inference import log_partition
from capsule_zoo.models import RBM
from capsule_zoo.records import read_record
from capsule_zoo.registry import create, save

QUICK = Options(minutes=0.005, progress=False)


@pytest.fixture(autouse=True)
def miniature(monkeypatch):
    """Few digits whatever data set is asked for, and little annealing."""
    full = load_dataset("digits")
    few = type(full)(full.name, full.train[:120], full.validation[:8], full.test[:30])
    monkeypatch.setattr(energy, "load_dataset", lambda *args, **kwargs: few)
    for name, value in dict(TEMPERATURES=5, CHAINS=6, PARTICLES=4).items():
        monkeypatch.setattr(energy, name, value)
    return few


@pytest.mark.parametrize(
    ("name", "metrics", "figures"),
    [
        (
            "capsule-rbm/mnist",
            "reconstruction_error log_likelihood_ais log_likelihood_raise probe_switches "
            "switches_on",
            "samples reconstructions fields spectra",
        ),
        (
            "capsule-rbm/mean-field",
            "log_likelihood_ais_exact log_likelihood_raise_exact log_likelihood_ais_mean_field "
            "log_likelihood_raise_mean_field mean_field_gap_exact mean_field_gap_mean_field",
            "",
        ),
        (
            "capsule-helmholtz/mnist",
            "reconstruction_error elbo iwae_4 probe_switches",
            "samples reconstructions spectra",
        ),
        (
            "capsule-helmholtz/objectives",
            "elbo_wake_sleep iwae_200_wake_sleep elbo_reweighted iwae_200_reweighted elbo_elbo "
            "iwae_200_elbo",
            "objectives",
        ),
    ],
)
def test_experiment_gives_what_it_promises(name, metrics, figures, tmp_path):
    _, path = reproduce(name, QUICK, folder=tmp_path)
    record = read_record(name, tmp_path)
    assert set(record["metrics"]) == set(metrics.split())
    drawn = {file.stem for file in path.parent.glob("*.png")}
    assert drawn == {f"{path.stem}_{figure}" for figure in figures.split()}
    assert experiments.find_experiment(name).data == "mnist"


def test_a_given_run_is_measured_without_training(tmp_path):
    torch.manual_seed(0)
    entry = create("capsule-rbm", capsules=3, units=2)
    save(entry, tmp_path / "run", data="digits", seed=0)
    options = Options(run=str(tmp_path / "run"), progress=False)
    result, _ = reproduce("capsule-rbm/mnist", options, folder=tmp_path)
    state = result.entry.model.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in entry.model.state_dict().items())


def test_log_likelihoods_are_about_the_exact_value(miniature, monkeypatch):
    """On a machine whose log Z can be summed; AIS and its reverse err by their standard errors."""
    monkeypatch.setattr(energy, "TEMPERATURES", 300)
    monkeypatch.setattr(energy, "CHAINS", 30)
    torch.manual_seed(0)
    model = RBM(784, 6)
    model.set_base_rates(miniature.train.images)
    free_energy = model.free_energy(miniature.test.images).detach().numpy()
    exact = -free_energy.mean() - log_partition(model).value
    for value, error, count in energy.log_likelihoods(model, miniature, seed=0).values():
        assert abs(value - exact) < 0.3 and count == 30
        assert error >= 0.99 * np.std(free_energy, ddof=1) / 30**0.5
