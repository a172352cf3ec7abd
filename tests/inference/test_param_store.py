"""Pyro's parameter store and the zoo's modules hold the same values, whatever a user changes."""

import copy
import itertools
import warnings

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from small_entries import images_for, small_entry

from capsule_zoo.inference import encode, evaluate, summarize
from capsule_zoo.models import base
from capsule_zoo.registry import Entry, create, load, save_entry, small_settings


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Number names from 0, as at the start of a process; call it to start another one."""

    def start() -> None:
        monkeypatch.setattr(base, "_instances", itertools.count())
        pyro.clear_param_store()

    start()
    return start


def svi_of(entry: Entry) -> SVI:
    return SVI(entry.model, entry.guide, pyro.optim.Adam({"lr": 1e-2}), loss=Trace_ELBO())


def trained(entry: Entry, steps: int = 5) -> SVI:
    svi = svi_of(entry)
    for _ in range(steps):
        svi.step(images_for(entry))
    return svi


def parameters(entry: Entry) -> dict[str, torch.Tensor]:
    modules = {"model": entry.model, "guide": entry.guide}
    return {
        f"{role}.{name}": value.detach().clone()
        for role, module in modules.items()
        for name, value in module.named_parameters()
    }


def assert_same(entry: Entry, values: dict[str, torch.Tensor]) -> None:
    now = parameters(entry)
    assert now.keys() == values.keys()
    assert all(torch.equal(now[name], value) for name, value in values.items())


def loss_at(entry: Entry, seed: int = 5) -> float:
    pyro.set_rng_seed(seed)
    return svi_of(entry).evaluate_loss(images_for(entry))


def load_store(folder, entry: Entry, svi: SVI) -> SVI:
    pyro.get_param_store().save(folder / "store.pt")
    pyro.get_param_store().load(folder / "store.pt")
    return svi


def load_optimizer(folder, entry: Entry, svi: SVI) -> SVI:
    svi.optim.save(folder / "optim.pt")
    new = svi_of(entry)
    load_store(folder, entry, svi)
    new.optim.load(folder / "optim.pt")
    return new


def clear_store(folder, entry: Entry, svi: SVI) -> SVI:
    pyro.clear_param_store()
    return svi


@pytest.mark.parametrize("change", [load_store, load_optimizer, clear_store])
def test_training_goes_on_as_if_the_store_had_not_been_changed(change, tmp_path):
    losses = []
    for changes in (False, True):
        entry = small_entry("vae")
        svi = trained(entry)
        if changes:
            svi = change(tmp_path, entry, svi)
        losses.append([svi.step(images_for(entry)) for _ in range(5)])
    assert losses[1] == losses[0]


def by_set_state() -> None:
    state = copy.deepcopy(pyro.get_param_store().get_state())
    for value in state["params"].values():
        value.data += 0.01
    pyro.get_param_store().set_state(state)


def by_assignment() -> None:
    store = pyro.get_param_store()
    for name, value in list(store.items()):
        store[name] = value.detach() + 0.01


def assert_trains(entry: Entry, svi: SVI) -> None:
    """Check that a step moves every parameter, and that the store holds the module's tensors."""
    svi.evaluate_loss(images_for(entry))
    tensors = {id(p) for module in (entry.model, entry.guide) for p in module.parameters()}
    assert {id(p) for p in pyro.get_param_store()._params.values()} == tensors
    before = parameters(entry)
    svi.step(images_for(entry))
    after = parameters(entry)
    assert all(not torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("way", [by_set_state, by_assignment])
def test_values_that_are_set_in_the_store_are_those_of_the_module(way):
    entry = small_entry("vae")
    svi = trained(entry)
    before = parameters(entry)
    way()
    svi.evaluate_loss(images_for(entry))
    assert_same(entry, {name: value + 0.01 for name, value in before.items()})
    assert_trains(entry, svi)


def save_and_load(tmp_path, entry: Entry) -> dict[str, torch.Tensor]:
    """Return the values that a store was saved with, which is loaded after other ones were set."""
    trained(entry)
    values = parameters(entry)
    pyro.get_param_store().save(tmp_path / "store.pt")
    trained(entry)
    pyro.get_param_store().load(tmp_path / "store.pt")
    return values


READERS = {
    "evaluate": lambda entry: summarize(
        evaluate(entry.model, entry.guide, images_for(entry), num_particles=2)
    )["elbo"],
    "encode": lambda entry: encode(entry.model, entry.guide, images_for(entry))["image_code"].sum(),
    "method": lambda entry: (
        entry.model.image_distribution(torch.ones(1, entry.model.latent)).mean.detach().sum()
    ),
    "module": lambda entry: Trace_ELBO()(entry.model, entry.guide)(images_for(entry)).item(),
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_a_module_first_reads_the_values_that_were_loaded(reader, tmp_path):
    entry = small_entry("vae")
    values, read = save_and_load(tmp_path, entry), READERS[reader]
    pyro.set_rng_seed(3)
    value = float(read(entry))
    plain = small_entry("vae", seed=1)
    for role, module in {"model": plain.model, "guide": plain.guide}.items():
        module.load_state_dict({n: values[f"{role}.{n}"] for n in module.state_dict()})
    pyro.set_rng_seed(3)
    assert value == float(read(plain))


def _pickled(pair, path):
    torch.save(pair, path)
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("way", ["deepcopy", "torch", "save"])
def test_copies_and_files_hold_the_values_that_were_loaded(way, tmp_path):
    entry = small_entry("vae")
    values = save_and_load(tmp_path, entry)
    pair = entry.model, entry.guide
    if way == "save":
        save_entry(entry, tmp_path / "run")
        twin = load(tmp_path / "run")
    else:
        twin = small_entry("vae", seed=1)
        copied = copy.deepcopy(pair) if way == "deepcopy" else _pickled(pair, tmp_path / "pair.pt")
        twin.model, twin.guide = copied
    assert_same(twin, values)


def test_what_is_loaded_last_counts(tmp_path):
    entry = small_entry("vae")
    values = save_and_load(tmp_path, entry)
    other = {
        role: getattr(small_entry("vae", seed=1), role).state_dict() for role in ("model", "guide")
    }
    entry.model.load_state_dict(other["model"])
    entry.guide.load_state_dict(other["guide"])
    loss_at(entry)
    assert torch.equal(entry.model.decoder.expand.weight, other["model"]["decoder.expand.weight"])
    pyro.get_param_store().load(tmp_path / "store.pt")
    loss_at(entry)
    assert_same(entry, values)


@pytest.mark.parametrize("called_before", [False, True])
def test_pyro_module_that_updates_a_module_is_followed(called_before, tmp_path, new_process):
    old = small_entry("vae")
    for role in ("model", "guide"):
        pyro.module(role, getattr(old, role))
    trained(old)
    values = parameters(old)
    pyro.get_param_store().save(tmp_path / "store.pt")
    new_process()
    small_entry("vae"), small_entry("vae")  # other numbers
    entry = small_entry("vae", seed=1)
    if called_before:
        trained(entry)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*holds loaded values of")
        pyro.get_param_store().load(tmp_path / "store.pt")
        for role in ("model", "guide"):
            pyro.module(role, getattr(entry, role), update_module_params=True)
        svi = svi_of(entry)
        svi.evaluate_loss(images_for(entry))
        assert_same(entry, values)
        before = parameters(entry)
        svi.step(images_for(entry))
        after = parameters(entry)
    assert all(not torch.equal(after[name], value) for name, value in before.items())


def test_values_of_other_numbers_are_reported(tmp_path, new_process):
    trained(small_entry("vae"))
    pyro.get_param_store().save(tmp_path / "store.pt")
    new_process()
    small_entry("vae")
    entry = small_entry("vae")  # numbers 2 and 3
    pyro.get_param_store().load(tmp_path / "store.pt")
    with pytest.warns(UserWarning, match=r"loaded values of .*_[01], which .*_[23] does not take"):
        trained(entry, steps=1)
    with pytest.warns(UserWarning, match="state_dict"):
        evaluate(small_entry("vae").model, entry.guide, images_for(entry))


def test_two_models_in_one_process_say_nothing(tmp_path):
    first, second = small_entry("vae"), small_entry("vae")
    trained(first)
    trained(second)
    store = pyro.get_param_store()
    store.save(tmp_path / "store.pt")
    store.load(tmp_path / "store.pt")
    trained(first)
    trained(second)
    del first, second
    trained(small_entry("vae"))


def test_values_of_another_shape_are_refused(tmp_path, new_process):
    trained(small_entry("vae"))
    pyro.get_param_store().save(tmp_path / "store.pt")
    new_process()
    sizes = {**small_settings("vae"), "latent": 7}
    entry = create("vae", **sizes)
    pyro.get_param_store().load(tmp_path / "store.pt")
    with pytest.raises(ValueError, match=r"of shape .* but the module's has shape .* state_dict"):
        loss_at(entry)


def test_frozen_parameters_stay_frozen_in_the_store():
    entry = small_entry("vae")
    entry.model.requires_grad_(False)
    before = parameters(entry)
    trained(entry)
    after = parameters(entry)
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert changed == {name for name in before if name.startswith("guide.")}
    assert not any(p.requires_grad for p in entry.model.parameters())


def test_an_autoguide_takes_loaded_values_over_when_it_is_called(tmp_path):
    entry = small_entry("vae")
    model, images = entry.model, images_for(entry)
    old = AutoNormal(model)
    svi = SVI(model, old, pyro.optim.Adam({"lr": 1e-2}), loss=Trace_ELBO())
    for _ in range(5):
        svi.step(images)
    median = old.median()["image_code"]
    pyro.get_param_store().save(tmp_path / "store.pt")
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "store.pt")
    with pytest.warns(UserWarning, match=r"AutoNormal has not run yet .* first to take them over"):
        evaluate(model, AutoNormal(model), images, num_particles=2)
    guide = AutoNormal(model)
    guide(images)
    evaluate(model, guide, images, num_particles=2)
    assert torch.equal(guide.median()["image_code"], median)


class Pair(PyroModule):
    """A user's module that holds a model of the zoo, and draws its images darker."""

    def __init__(self, model):
        super().__init__("Pair")
        self.inside = model

    def forward(self, images):
        return self.inside(images / 2)


def test_a_model_inside_of_another_module_takes_loaded_values_over(tmp_path):
    losses = []
    for loads in (False, True):
        entry = small_entry("vae")
        guide = create("vae", **small_settings("vae")).guide
        svi = SVI(Pair(entry.model), guide, pyro.optim.Adam({"lr": 1e-2}), loss=Trace_ELBO())
        pyro.set_rng_seed(1)
        first_losses = [svi.step(images_for(entry)) for _ in range(5)]
        if loads:
            pyro.get_param_store().save(tmp_path / "store.pt")
            pyro.get_param_store().load(tmp_path / "store.pt")
        losses.append([*first_losses, *(svi.step(images_for(entry)) for _ in range(5))])
        pyro.clear_param_store()
    assert losses[1] == losses[0]
