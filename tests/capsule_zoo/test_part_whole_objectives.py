"""Objectives for discrete presences in miniature: who is trained, and on which presences."""

import pytest
import torch
from miniature import few_digits

from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.part_whole import variants as part_whole_objectives
from capsule_zoo.records import read_record

NAMES = ("relaxed", "importance_weighted", "reweighted", "thermodynamic")
SMALL = dict(steps=2, tightening=2, draws=2, intervals=2, images=6, particles=3)
SETTINGS = dict(SMALL, rates=(0.003, 0.03), seeds=2)


@pytest.fixture
def trainings(monkeypatch, unpainted):
    """Use few digits; return what every training was given, as it runs."""
    few = few_digits(40, 20)
    monkeypatch.setattr(part_whole_objectives, "load_dataset", lambda *args, **kwargs: few)
    given, train = [], part_whole_objectives.train

    def noted(entry, data, options, *args, objective, lr, **kwargs):
        guide = entry.guide
        before = [p.clone() for p in (*entry.model.parameters(), *guide.parameters())]
        run = train(entry, data, options, *args, objective=objective, lr=lr, **kwargs)
        after = [p.clone() for p in (*entry.model.parameters(), *guide.parameters())]
        given.append((options, type(objective).__name__, lr, entry.model, guide, before, after))
        return run

    monkeypatch.setattr(part_whole_objectives, "train", noted)
    return given


@pytest.fixture
def bounds(monkeypatch):
    """Return the row, the images and the ELBO of every measurement, as it is made."""
    found, bounds_of = [], part_whole_objectives.Further.bounds_of

    def noted(self, pairs, images, seed):
        numbers = bounds_of(self, pairs, images, seed)
        found.append((list(pairs)[-1], images, numbers["elbo"][0]))
        return numbers

    monkeypatch.setattr(part_whole_objectives.Further, "bounds_of", noted)
    return found


def test_all_start_at_the_pair_of_their_seed_with_the_rate_of_a_search(trainings, bounds, tmp_path):
    options = Options(minutes=0.01, progress=False, processes=1)
    reproduce("part-whole/discrete-objectives", options, folder=tmp_path, **SETTINGS)
    tries, finals = trainings[:8], trainings[8:]
    assert [rate for _, _, rate, *_ in tries] == [0.003, 0.03] * 4
    assert len({kind for _, kind, *_ in tries}) == 4 == len({kind for _, kind, *_ in finals})
    assert [given[0].seed for given in finals] == [0] * 4 + [1] * 4
    starts = {given[0].seed: given[5] for given in finals}
    assert not all(torch.equal(a, b) for a, b in zip(starts[0], starts[1], strict=True))
    for own, kind, _, model, guide, before, after in trainings:
        assert model.relaxed == guide.model.relaxed == (kind == "Trace_ELBO")
        assert all(torch.equal(a, b) for a, b in zip(before, starts[own.seed], strict=True))
        moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert sum(moved) > 0.8 * len(moved), kind

    data = part_whole_objectives.load_dataset("digits")
    assert all(images is data.validation for _, images, _ in bounds[2:10])
    assert all(images is data.test for _, images, _ in [*bounds[:2], *bounds[10:]])
    found = read_record("part-whole/discrete-objectives", tmp_path)["metrics"]
    rows = ("start", *NAMES)
    wanted = {f"{bound}_{name}" for bound in ("elbo", "iwae_3", "ess") for name in rows}
    wanted |= {f"{fact}_{n}" for fact in ("elbo_difference", "updates", "rate") for n in NAMES}
    assert set(found) == wanted
    for name in NAMES:
        low, high = (elbo for row, images, elbo in bounds[2:10] if row == name)
        assert found[f"rate_{name}"]["value"] == (0.003 if low > high else 0.03)
        assert found[f"elbo_{name}"]["n"] == 2
    values = {name: found[f"elbo_{name}"]["value"] for name in rows}
    assert len(set(values.values())) == len(rows)  # each was trained, on its own copy
