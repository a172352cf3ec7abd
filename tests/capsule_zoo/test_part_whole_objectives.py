"""Objectives for discrete presences in miniature: who is trained, and on which presences."""

import pytest
import torch
from miniature import few_digits

from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.part_whole import variants as part_whole_objectives
from capsule_zoo.records import read_record

NAMES = ("relaxed", "importance_weighted", "reweighted", "thermodynamic")
SETTINGS = dict(steps=2, tightening=2, draws=2, intervals=2, images=6, particles=3)


@pytest.fixture
def trainings(monkeypatch, unpainted):
    """Use few digits; return what every training was given, by name, as it runs."""
    few = few_digits(40, 20)
    monkeypatch.setattr(part_whole_objectives, "load_dataset", lambda *args, **kwargs: few)
    given, train = {}, part_whole_objectives.train

    def noted(entry, *args, name, objective, **kwargs):
        guide = entry.guide
        before = [p.clone() for p in (*entry.model.parameters(), *guide.parameters())]
        run = train(entry, *args, name=name, objective=objective, **kwargs)
        after = [p.clone() for p in (*entry.model.parameters(), *guide.parameters())]
        given[name] = (entry.model, guide, type(objective).__name__, before, after)
        return run

    monkeypatch.setattr(part_whole_objectives, "train", noted)
    return given


def test_all_start_at_one_pair_and_only_one_is_relaxed(trainings, tmp_path):
    options = Options(minutes=0.01, progress=False)
    reproduce("part-whole/discrete-objectives", options, folder=tmp_path, **SETTINGS)
    assert tuple(trainings) == NAMES
    started = trainings["relaxed"][3]
    for name, (model, guide, kind, before, after) in trainings.items():
        assert model.relaxed == guide.model.relaxed == (name == "relaxed")
        assert all(torch.equal(a, b) for a, b in zip(before, started, strict=True))
        moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert sum(moved) > 0.8 * len(moved), kind
    found = read_record("part-whole/discrete-objectives", tmp_path)["metrics"]
    rows = ("start", *NAMES)
    wanted = {f"{bound}_{name}" for bound in ("elbo", "iwae_3", "ess") for name in rows}
    wanted |= {f"elbo_difference_{name}" for name in NAMES} | {f"updates_{n}" for n in NAMES}
    assert set(found) == wanted
    values = {name: found[f"elbo_{name}"]["value"] for name in rows}
    assert len(set(values.values())) == len(rows)  # each was trained, on its own copy
