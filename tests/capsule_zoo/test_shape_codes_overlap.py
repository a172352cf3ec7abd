"""Two digits in a scene, in miniature."""

import pyro
from miniature import few_digits, names_in_record

from capsule_zoo.experiments import Options
from capsule_zoo.experiments.shape_codes import overlap as experiment
from capsule_zoo.registry import create, small_sizes


def test_pairs_of_digits_are_told_from_their_parts(monkeypatch, tmp_path):
    pyro.set_rng_seed(0)
    entry = create("shape-codes", **small_sizes("shape-codes"))
    few = few_digits(40, 20, size=12)
    monkeypatch.setattr(experiment, "load", lambda name: entry)
    monkeypatch.setattr(experiment, "load_dataset", lambda name, root: few)
    options = Options(progress=False, processes=1)
    found, figures = names_in_record(
        "shape-codes/overlap", options, tmp_path, images=3, starts=1, rounds=1
    )
    assert {"parts_right", "both_classes", "each_class_alone"} <= found and not figures
