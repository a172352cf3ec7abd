"""Every experiment at its smallest: it runs to its end, and leaves what its record has."""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from miniature import (
    change_defaults,
    compare_small_machines,
    few_digits,
    few_views,
    names_in_record,
)

from capsule_zoo.experiments import Options, find_experiment, list_experiments
from capsule_zoo.experiments.matrix_capsules import viewpoints
from capsule_zoo.experiments.shape_codes import from_images
from capsule_zoo.experiments.training import begun
from capsule_zoo.experiments.zoo import guide_swaps
from capsule_zoo.models.recurrent_capsules import Canvas
from capsule_zoo.records import figures_of, read_record
from capsule_zoo.registry import small_settings

RUNS = r"\b(names_in_record|reproduce|find_experiment)\("
RESULTS = Path(__file__).parents[2] / "results"
ANNEALING = dict(temperatures=5, chains=6)
MATRIX = dict(features=4, capsules=(2, 2, 2))
RECURRENT = dict(steps=2, latent=2, units=4, channels=(2, 2), types=2, canvas=Canvas(window=3))
VIEWS = dict(
    **dict(seeds=1, size=17, checks=2, views=6, sizes=MATRIX),
    **dict(attacked=4, epsilons=(0.0, 0.1), iterated=(0.1,), attack_steps=2),
)
SHAPES = dict(kinds=2, parts=3, codes=2, guide=dict(channels=4, width=8, hidden=1))


@dataclass(frozen=True)
class Miniature:
    """How an experiment is run at its smallest.

    Attributes:
        settings: of the experiment.
        minutes: of the option; None for a number of steps, which settings give.
        size: pixels along each side of the digits that stand for its data.
        digits: training and test images.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    minutes: float | None = 1e-4
    size: int | None = 17
    digits: tuple[int, int] = (60, 30)


def sizes_of(name: str) -> dict[str, Any]:
    """Return the sizes of an entry in miniature, for images of any shape and classes."""
    return {k: v for k, v in small_settings(name).items() if k not in ("image_shape", "classes")}


MINIATURES = {
    "capsule-network/ablation": Miniature(dict(seeds=1, images=40, epochs=2)),
    "capsule-network/overlap": Miniature(
        dict(images=20, sizes=dict(guide=dict(channels=4), hidden=(12, 12))), 0.02, 9
    ),
    "capsule-network/equal-network-at-length": Miniature(
        dict(seeds=1, images=6, sizes=dict(guide=dict(channels=4), hidden=(8, 8))),
        0.01,
        17,
        (24, 12),
    ),
    "capsule-rbm/mnist": Miniature(ANNEALING, 0.005, 12),
    "capsule-rbm/fashion": Miniature(ANNEALING, 0.005, 12),
    "capsule-rbm/learning-curve": Miniature(dict(updates=(2, 3)), 0.005, 12),
    "capsule-helmholtz/mnist": Miniature(dict(particles=4), 0.005, 12),
    "capsule-helmholtz/fashion": Miniature(dict(particles=4), 0.005, 12),
    "matrix-capsules/mnist": Miniature({}, 0.003, 17, (40, 12)),
    "matrix-capsules/votes": Miniature({}, 0.003, 17, (40, 12)),
    "matrix-capsules/at-length": Miniature(dict(network=MATRIX), 0.003),
    "matrix-capsules/viewpoints": Miniature(VIEWS, 0.003),
    "recurrent-capsules/mnist": Miniature(dict(particles=5)),
    "constellations/papers": Miniature(dict(scenes=3, sigmas=(0.1,))),
    "stacked-capsule-autoencoder/seeds": Miniature(
        dict(runs=("stacked-capsule-autoencoder-mnist",), probed=40, tested=20), None, 28
    ),
    "shape-codes/guides": Miniature(
        dict(images=2, particles=3, fitting=1, training=1), None, 17, (32, 8)
    ),
    "part-whole/augment": Miniature(
        dict(
            degrees=(0, 90),
            seeds=1,
            kinds=3,
            probed=40,
            turns=3,
            sizes=sizes_of("part-whole"),
            steps=4,
        ),
        None,
        None,
        (60, 12),
    ),
    "shape-codes/digits": Miniature(
        dict(steps=6, tightening=2, images=4, particles=3, samples=12), None, None, (60, 12)
    ),
}


def in_miniature(monkeypatch: pytest.MonkeyPatch, small: Miniature) -> None:
    """Let every experiment see few digits, whatever data it asks for, and tiny presets."""
    few = few_digits(*small.digits, size=small.size)
    list_experiments()
    for name, module in list(sys.modules.items()):
        if name.startswith("capsule_zoo.experiments."):
            for loader in ("load_dataset",):
                if hasattr(module, loader) and not name.endswith(f".{loader}"):
                    monkeypatch.setattr(module, loader, lambda *_, **__: few)
            if hasattr(module, "binary_mnist"):
                monkeypatch.setattr(module, "binary_mnist", lambda *_: few.binarized())
    monkeypatch.setattr(viewpoints, "load_views", lambda _: (few_views(), few_views()))
    monkeypatch.setattr(guide_swaps, "list_weights", dict)
    monkeypatch.setattr(guide_swaps, "begun", lambda name, *a: begun(name, *a, **sizes_of(name)))
    change_defaults(monkeypatch, "recurrent-capsules", **RECURRENT)
    monkeypatch.setattr(from_images, "SIZES", SHAPES)
    compare_small_machines(monkeypatch)


def without_numbers(names: set[str]) -> set[str]:
    """Return names in which every number is N: settings choose how many of a kind there are."""
    return {re.sub(r"(?<=_)\d+(_\d+)*(?=_|$)", "N", name) for name in names}


@pytest.mark.parametrize("name", MINIATURES)
def test_an_experiment_leaves_what_its_record_has(name, monkeypatch, unpainted, tmp_path):
    """Records may lack names that are newer, and few draws have no tail whose shape is fitted."""
    small = MINIATURES[name]
    in_miniature(monkeypatch, small)
    options = Options(minutes=small.minutes, progress=False, processes=1)
    found, figures = names_in_record(name, options, tmp_path, **small.settings)
    record, stem = read_record(name, RESULTS), name.rpartition("/")[2]
    drawn = {path.stem.removeprefix(stem).lstrip("_") for path in figures_of(name, RESULTS)}
    recorded = {each for each in record["metrics"] if not each.startswith("pareto_k")}
    assert without_numbers(recorded) <= without_numbers(found)
    assert without_numbers(figures) == without_numbers(drawn)
    assert record["data"] == find_experiment(name).data


def test_every_experiment_is_run_here_or_beside_its_laws():
    """A file that runs experiments writes their names in full."""
    texts = (path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    beside = " ".join(text for text in texts if re.search(RUNS, text))
    names = [name for name in list_experiments() if name not in MINIATURES]
    assert [name for name in names if f'"{name}"' not in beside] == []
