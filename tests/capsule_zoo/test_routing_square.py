"""The square of routings: what it measures, and that a reading shares the weights it reads."""

import pytest
import torch
from miniature import few_digits, names_in_record

from capsule_zoo.experiments import Options
from capsule_zoo.experiments.zoo import routing_square
from capsule_zoo.experiments.zoo.equal_network import reader_of
from capsule_zoo.experiments.zoo.routing_square import (
    measures,
    reading,
    shared_couplings,
    tightened,
)
from capsule_zoo.guides import Belief, DynamicRouting, EMRouting, SelfRouting, Votes
from capsule_zoo.registry import create, small_sizes

QUICK = Options(progress=False, processes=1)
ENTRIES = ("capsule-network", "matrix-capsules")


@pytest.fixture(autouse=True)
def few(monkeypatch, unpainted):
    digits = few_digits(24, 12, size=17)
    monkeypatch.setattr(routing_square, "load_dataset", lambda *_, **__: digits)
    return digits


def entry_of(name, few, routing):
    torch.manual_seed(0)
    sizes = {k: v for k, v in small_sizes(name).items() if k != "classes"}
    return create(name, **{**sizes, "image_shape": few.image_shape}, routing=routing)


@pytest.mark.parametrize(
    "name", ["capsule-network/routing-square", "matrix-capsules/routing-square"]
)
def test_every_routing_reads_every_training(name, tmp_path):
    sizes = small_sizes(name.partition("/")[0])
    small = {k: v for k, v in sizes.items() if k not in ("image_shape", "classes")}
    names = ("dynamic", "self")
    how = dict(routings=names, seeds=1, steps=2, images=12, votes=6, tightened=1, sizes=small)
    found, figures = names_in_record(name, QUICK, tmp_path, **how)
    pairs = {f"{trained}_{read}" for trained in names for read in names}
    square = {
        f"{q}_{p}" for q in ("error", "calibration", "free_energy", "agreement") for p in pairs
    }
    other = {"tightened_dynamic_self", "tightened_self_dynamic"}
    assert found == square | other | {f"seconds_per_update_{n}" for n in names}
    assert figures == {""}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_routing_agrees_with_itself_and_differs_from_others(name, few):
    entry = entry_of(name, few, EMRouting(3))
    own = measures(entry, reading(entry, EMRouting(3)), few.test, 6)
    other = measures(entry, reading(entry, DynamicRouting(3)), few.test, 6)
    assert own["agreement"][0] == pytest.approx(1, abs=1e-5)
    assert other["agreement"][0] < 0.999
    assert own["free_energy"][0] < other["free_energy"][0]


@pytest.mark.parametrize("name", ENTRIES)
def test_tightening_moves_the_votes_of_a_copy_alone(name, few, monkeypatch):
    entry = entry_of(name, few, EMRouting(2))
    before = {k: v.clone() for k, v in reader_of(entry).state_dict().items()}
    seen = {}
    monkeypatch.setattr(
        routing_square,
        "error_rate",
        lambda model, guide, _: [seen.update(each.named_parameters()) for each in (guide, model)],
    )
    tightened(entry, SelfRouting(), few, few.test, QUICK, 2, "self")
    for key, value in reader_of(entry).state_dict().items():
        assert torch.equal(value, before[key])
    moved = {k for k, v in seen.items() if k in before and not torch.equal(v, before[k])}
    moved |= {k for k in seen if "connections" in k}
    kinds = {key.rpartition(".")[2] for key in moved}
    assert kinds == {"transform", "connections"}


def test_couplings_in_common():
    votes = Votes.dense(torch.zeros(1, 2, 2, 3), torch.tensor([[1.0, 0.5]]))
    first = torch.tensor([[1.0, 0.5], [0.0, 0.5]])[None, None]  # (1, 1, parents, children)
    second = torch.tensor([[0.0, 0.5], [1.0, 0.5]])[None, None]
    beliefs = [Belief(each, *(torch.zeros(1),) * 3) for each in (first, second)]
    assert shared_couplings(votes, *beliefs).item() == pytest.approx(0.5 / 1.5)
