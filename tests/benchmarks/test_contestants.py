"""Contestants of every benchmark compute the same, each of them runs, and a difference is seen."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytestmark = [  # of the compiler, about what it does itself
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MATRIX = dict(features=4, capsules=(2, 3, 2))
CONTESTANTS: dict[str, tuple[set[str], dict[str, Any]]] = {
    # contestants that a benchmark has, whatever is installed, and constants with which it is small
    "capsule_network": (
        {"paper", "textbook", "small", "cnn"},
        dict(BATCH={"paper": 1, "small": 2}),
    ),
    "compiled": (
        {"eager", "compiled"},
        dict(IMAGES=2, PARTS=3, CHILDREN=5, CLASSES=2, BACKEND="aot_eager"),
    ),
    "constellations": ({"ransac", "exact", "loop"}, dict(SCENES=6)),
    "generative_capsnet": (
        {"continuous", "digit_capsules", "autoencoder", "splat", "splat_direct"},
        dict(BATCH=2),
    ),
    "part_whole_step": ({"zoo", "plain_torch", "prototype"}, dict(BATCH=2)),
    "rbm": ({"zoo", "zoo_capsules", "scikit_learn", "floor"}, {}),
    "recurrent_capsules": ({"zoo", "draw", "plain_torch"}, dict(BATCH=2)),
    "render": ({"zoo", "affine_grid"}, dict(IMAGES=3)),
    "routing": (
        {"small", "textbook", "full"},
        dict(BATCH={"small": 1, "full": 1}, PRESETS={"small": MATRIX, "full": MATRIX}),
    ),
    "scene_step": ({"zoo", "plain_torch", "air", "large"}, dict(BATCH=2)),
    "stacked_capsule_step": ({"zoo", "stacked_layers"}, dict(BATCH=2)),
}


@pytest.fixture
def small(load_benchmark) -> Callable[[str], ModuleType]:
    """Return a function that imports a benchmark and makes it small."""

    def load(name: str) -> ModuleType:
        benchmark = load_benchmark(name)
        benchmark.keep_memory = lambda: True  # of the whole process
        vars(benchmark).update(CONTESTANTS[name][1])
        for _, sizes in vars(benchmark).get("VARIANTS", {}).values():
            sizes |= dict(steps=3, units=8)
        return benchmark

    return load


def test_every_benchmark_with_contestants_is_here():
    made = {path.stem for path in BENCHMARKS.glob("*.py") if "\ndef make(" in path.read_text()}
    assert made == CONTESTANTS.keys()


@pytest.mark.long
@pytest.mark.parametrize("name", CONTESTANTS)
def test_all_agree_and_all_contestants_run(small, name):
    benchmark = small(name)
    benchmark.check()
    contestants = benchmark.make()
    assert CONTESTANTS[name][0] <= contestants.keys()
    timed = {contestant for contestant, run in contestants.items() if isinstance(run(), float)}
    assert timed <= {"backward"}  # which has to time itself


# Contestants that compute something else are told apart


def test_without_routing_the_textbook_disagrees(small):
    benchmark = small("capsule_network")
    benchmark.ITERATIONS = 1
    with pytest.raises(AssertionError):
        benchmark.check()


def test_another_prior_of_sizes_is_seen(small):
    benchmark = small("scene_step")

    class Differing(benchmark.ByHand):
        def __call__(self, images):
            self.model.size_spread *= 1.01
            return super().__call__(images)

    benchmark.ByHand = Differing
    with pytest.raises(AssertionError):
        benchmark.check()


def test_another_standard_deviation_of_pixels_is_seen(small):
    benchmark = small("stacked_capsule_step")
    prepare = benchmark.prepare

    def differing(*arguments):
        entry, stacked, images = prepare(*arguments)
        stacked.sigma_image *= 1.01
        return entry, stacked, images

    benchmark.prepare = differing
    with pytest.raises(AssertionError):
        benchmark.check()


# Distributions of single benchmarks


def test_the_convolutional_network_is_of_the_small_guides_size(small):
    benchmark = small("capsule_network")
    size = benchmark.create("cnn", **benchmark.CNN).model.num_parameters
    assert size == pytest.approx(benchmark.network("small").guide.num_parameters, rel=0.05)


def test_the_autoencoder_is_of_equal_size(small):
    """Its number of parameters is within a tenth of the continuous capsules' number."""
    benchmark, sizes = small("generative_capsnet"), {}
    for name in ("continuous", "autoencoder"):
        kind, options = benchmark.ENTRIES[name]
        entry = benchmark.create(
            kind, image_shape=(1, benchmark.CANVAS, benchmark.CANVAS), **options
        )
        sizes[name] = entry.model.num_parameters
    assert sizes["autoencoder"] == pytest.approx(sizes["continuous"], rel=0.1)


def test_the_cheapest_cover_is_the_best_of_all(small):
    benchmark = small("constellations")
    tables = [
        {frozenset({0, 1}): 1.0, frozenset({2, 3}): 2.0},
        {frozenset({0, 1}): 0.5, frozenset({2, 3}): 5.0, frozenset({1, 2}): 0.0},
    ]
    assert benchmark.cheapest(tables) == (2.5, (frozenset({2, 3}), frozenset({0, 1})))
    assert benchmark.cheapest([{frozenset({0}): 1.0}] * 2)[0] == np.inf
