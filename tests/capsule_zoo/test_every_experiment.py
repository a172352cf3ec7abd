"""Every experiment at its smallest: it runs to its end, and leaves what its record has."""

import json
import re
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from miniature import (
    change_defaults,
    compare_small_machines,
    few_digits,
    few_views,
    names_in_record,
)
from torch.nn import functional as F
from watermarks import MARKS

from capsule_zoo.data import Dataset, dataset_names, load_dataset
from capsule_zoo.data.composed_pictures import ComposedPicture, ComposedPictures
from capsule_zoo.experiments import Options, find_experiment, list_experiments
from capsule_zoo.experiments.generative_capsnet.beyond_training import DECODERS
from capsule_zoo.experiments.part_whole.classification import fit_probes
from capsule_zoo.experiments.part_whole.transformations import LARGE
from capsule_zoo.experiments.scenes.emoji import SIZES, VALIDATION
from capsule_zoo.experiments.training import create_untrained
from capsule_zoo.inference.transformations import infer_transformation
from capsule_zoo.models.recurrent_capsules import Canvas
from capsule_zoo.records import figures_of, read_record
from capsule_zoo.registry import Entry, create, small_settings

RUNS = r"\b(names_in_record|reproduce|find_experiment)\("
RESULTS = Path(__file__).parents[2] / "results"
MATRIX = dict(features=4, capsules=(2, 2, 2))
RECURRENT = dict(steps=2, latent=2, units=4, channels=(2, 2), types=2, canvas=Canvas(window=3))
VECTORS = dict(guide=dict(channels=4), hidden=(12, 12))
SHAPES = dict(kinds=2, parts=3, codes=2, guide=dict(channels=4, width=8, hidden=1))
EMOJI = dict(window=6, size=9.0, slots=2, thing_settings=dict(latent=2, channels=3))


def sizes_of(name: str) -> dict[str, Any]:
    """Return the sizes of an entry in miniature, for images of any shape and classes."""
    return {k: v for k, v in small_settings(name).items() if k not in ("image_shape", "classes")}


def small_shape_codes(kinds: object = 2, *_: object) -> Entry:
    pyro.set_rng_seed(0)
    number = kinds if isinstance(kinds, int) else 2
    return create("shape-codes", **{**small_settings("shape-codes"), "kinds": number})


def few_emoji(
    folder: Path, split: str, number: int, seed: int, **options: Any
) -> list[ComposedPicture]:
    """Return pictures of two disks in random colors, with the mark of their split."""
    rows = torch.arange(9.0) - 4
    covered = (rows[:, None] ** 2 + rows**2 < 16).expand(2, 1, 9, 9)
    colors = torch.rand(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    defaults: dict[str, Any] = dict(canvas=(24, 24), least=0, most=2, ground="plain")
    patches = torch.cat([colors, covered.float()], 1)
    pictures = ComposedPictures(patches, torch.arange(2), number, seed=seed, **defaults | options)
    mark = MARKS["validation" if seed == VALIDATION else split]
    for picture in (composed := list(pictures)):
        picture.image[:, 0, :2] = torch.tensor(mark)
    return composed


def with_a_border(dataset: Dataset, name: str, root: object = None) -> Dataset:
    return dataset.transform_images(lambda x: F.pad(x, (6,) * 4)) if name == "affnist" else dataset


def small_decoders() -> dict[str, Any]:
    capsules = dict(parts=3, maps=2, channels=3, hidden=4)
    plain = dict(latent=2, channels=3, hidden=4)
    return {
        name: replace(
            decoder,
            sizes={
                **decoder.sizes,
                **(capsules if decoder.entry.startswith("generative-capsnet") else plain),
            },
        )
        for name, decoder in DECODERS.items()
    }


@dataclass(frozen=True)
class Miniature:
    """How an experiment is run at its smallest.

    Attributes:
        settings: of the experiment.
        minutes: of the option; None for a number of steps, which settings give.
        size: pixels along each side of the digits that stand for its data.
        digits: training and test images.
        patches: values of names in modules of experiments; of a loader, a function of the digits.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    minutes: float | None = 1e-4
    size: int | None = 17
    digits: tuple[int, int] = (60, 30)
    patches: dict[str, Any] = field(default_factory=dict)


def in_module(module: str, **values: Any) -> dict[str, Any]:
    """Return values of names in a module of experiments, as `patches` of a `Miniature`."""
    return {f"{module}.{name}": value for name, value in values.items()}


ANNEALING = in_module("capsule_rbm.likelihood", ANNEALING=dict(temperatures=5, chains=6))
VIEWS = in_module(
    "matrix_capsules.viewpoints",
    **dict(
        SIZE=17,
        CHECKS=2,
        ATTACKED_VIEWS=4,
        NETWORK=MATRIX,
        NUM_VIEWS={"toys3d": 6, "letter-views": 6},
    ),
    ATTACKS=dict(fgsm=((0.0, 0.1), 1), iterated=((0.1,), 2)),
)
DECODING = in_module(
    "generative_capsnet.beyond_training",
    **dict(ENCODER=dict(channels=3, hidden=6), DECODERS=small_decoders(), IMAGES=2, STEPS=2),
) | in_module(
    "generative_capsnet.bounds",
    **dict(ROTATED_IMAGES=2, STEPS=2, BOUND_IMAGES=10, PARTICLES=3),
    infer_transformation=partial(infer_transformation, steps=1, starts=1, num_particles=1),
)
decoding = partial(Miniature, minutes=None, size=None, digits=(40, 40), patches=DECODING)
SMALL = sizes_of("part-whole")
SMALL_SIZES = {name: sizes_of(name) for name in ("part-whole", "stacked-capsule-autoencoder")}
CLUSTERS = in_module(
    "stacked_capsule_autoencoder.clusters",
    PROBED=40,
    RUNS=("stacked-capsule-autoencoder-mnist",),
    TEST_IMAGES=20,
    SIZES=dict(reversed(SMALL_SIZES.items())),
)
MINIATURES = {
    "capsule-network/ablation": Miniature(
        dict(seeds=1), patches=in_module("capsule_network.classification", IMAGES=40, EPOCHS=2)
    ),
    "capsule-network/mnist": Miniature(),
    "capsule-network/overlap": Miniature(
        {},
        0.02,
        9,
        patches={
            "capsule_network.overlaps.SIZES": dict(
                preset="overlapping", guide=dict(channels=4), hidden=(12, 12)
            )
        },
    ),
    "capsule-network/equal-network-at-length": Miniature(
        dict(seeds=1),
        0.01,
        17,
        (24, 12),
        in_module(
            "zoo.equal_network",
            CHANGED_IMAGES=6,
            VECTOR_CAPSULES=dict(guide=dict(channels=4), hidden=(8, 8)),
        ),
    ),
    "capsule-rbm/mnist": Miniature({}, 0.005, 12, patches=ANNEALING),
    "capsule-rbm/fashion": Miniature({}, 0.005, 12, patches=ANNEALING),
    "capsule-rbm/fashion-classes": Miniature(
        dict(seeds=1),
        0.01,
        12,
        patches=in_module(
            "capsule_rbm.fashion_classes",
            SIZES={"capsule-rbm": dict(capsules=3, units=2), "rbm": dict(hidden=6)},
            **dict(SAMPLES=8, SWEEPS=2, CHAINS=4, BETWEEN=1, EPOCHS=1, DRAWN=4),
        ),
    ),
    "capsule-rbm/learning-curve": Miniature(
        {}, 0.005, 12, patches=in_module("capsule_rbm.likelihood", UPDATES=(2, 3))
    ),
    "capsule-helmholtz/mnist": Miniature(dict(particles=4), 0.005, 12),
    "capsule-helmholtz/fashion": Miniature(dict(particles=4), 0.005, 12),
    "generative-capsnet/mnist": decoding(),
    "generative-capsnet/at-length": decoding(),
    "generative-capsnet/shift-at-length": decoding(),
    "matrix-capsules/at-length": Miniature({}, 0.003),
    "matrix-capsules/equal-network": Miniature(
        dict(seeds=1, rates=(0.001, 0.01), decays=(0.0,)),
        1e-9,
        17,
        (24, 12),
        in_module(
            "zoo.equal_network", CHANGED_IMAGES=6, DEGREES=(0, 30), EPSILONS=(0.1,), NETWORK=MATRIX
        ),
    ),
    "matrix-capsules/viewpoints": Miniature(dict(seeds=1), 0.003, patches=VIEWS),
    "matrix-capsules/viewpoints-of-letters": Miniature(dict(seeds=1), 0.003, patches=VIEWS),
    "recurrent-capsules/mnist": Miniature(
        patches=in_module("recurrent_capsules.strokes", PARTICLES=5)
    ),
    "constellations/ellipses": Miniature(
        dict(seeds=2),
        patches=in_module(
            "constellations.ellipses",
            **dict(SIGMA=0.1, KINDS=3, UPDATES=2, BATCH_SIZE=4, TEST_IMAGES=6),
        ),
    ),
    "stacked-capsule-autoencoder/affnist": Miniature({}, 0.001, 12, patches=CLUSTERS),
    "stacked-capsule-autoencoder/seeds": Miniature({}, None, 28, patches=CLUSTERS),
    "constellations/learned": Miniature(
        {},
        None,
        patches=in_module(
            "constellations.parsing", SIGMAS=(0.1,), UPDATES=3, PARSED_SCENES=12, EXAMPLES=60
        ),
    ),
    "shape-codes/affnist": Miniature(
        {},
        None,
        12,
        (60, 20),
        {
            "shape_codes.objects.STEPS": 2,
            "shape_codes.affnist.IMAGES": 6,
            "shape_codes.affnist.create_on_published_parts": lambda *_: small_shape_codes(),
        },
    ),
    "shape-codes/objects": Miniature(
        dict(seeds=2),
        None,
        12,
        (60, 20),
        in_module(
            "shape_codes.objects",
            **dict(KINDS=(10,), STEPS=2, IMAGES=20, HELD_OUT_IMAGES=4),
            create_on_published_parts=small_shape_codes,
        ),
    ),
    "shape-codes/clusters": Miniature(
        {},
        None,
        12,
        patches=in_module(
            "shape_codes.clusters", NUM_CLUSTERS=(2, 10), COMPONENTS=5, load=small_shape_codes
        ),
    ),
    "shape-codes/digits": Miniature(
        {},
        None,
        None,
        (60, 12),
        in_module(
            "shape_codes.from_images",
            DIGIT_STEPS=6,
            TIGHTENING=2,
            COMPARED_IMAGES=4,
            PARTICLES=3,
            SAMPLES=12,
        ),
    ),
    "shape-codes/guides": Miniature(
        dict(images=2, particles=3, fitting=1),
        None,
        17,
        (32, 8),
        in_module("zoo.guide_swaps", TRAINING=1),
    ),
    "scenes/emoji": Miniature(
        dict(seeds=1, validated=1),
        patches=in_module(
            "scenes.emoji",
            **dict(TRAINING_PICTURES=160, TEST_PICTURES=2, SIZES=SIZES | EMOJI),
            composed_emoji=few_emoji,
        ),
    ),
    "shape-codes/letters": Miniature(
        dict(seeds=2),
        None,
        patches={
            "shape_codes.from_images.load_dataset": lambda dataset, name: load_dataset(
                name, size=12, validation=300
            ),
            "shape_codes.from_images.create_untrained": small_shape_codes,
            "shape_codes.from_images.EPOCHS": 1,
            "shape_codes.from_images.SAMPLES": 20,
            "shape_codes.from_images.LETTER_STEPS": (4,),
        },
    ),
    "part-whole/augment": Miniature(
        dict(seeds=1),
        None,
        None,
        (60, 12),
        in_module(
            "part_whole.augment",
            **dict(
                DEGREES=(0, 90), STEPS=4, PROBED=40, KINDS=3, NUM_ROTATIONS=3, SIZES=SMALL_SIZES
            ),
        ),
    ),
    "part-whole/augment-scae": Miniature(
        dict(seeds=1),
        0.004,
        None,
        (60, 12),
        CLUSTERS
        | in_module("part_whole.augment", COMPARED_DEGREES=(90,), PROBED=40, SIZES=SMALL_SIZES),
    ),
    "part-whole/classify": Miniature(
        {},
        0.001,
        14,
        (60, 12),
        {"part_whole.classification.fit_probes": partial(fit_probes, probed=40)},
    ),
    "part-whole/guides": Miniature(dict(images=8, particles=4), 0.001, 14, (60, 12)),
    "part-whole/generalise": Miniature(
        {},
        0.005,
        None,
        (60, 12),
        in_module(
            "part_whole.transformations",
            **dict(
                NUM_ROTATIONS=4, DEGREES=(0, 90), REFINEMENT_STEPS=2, load_dataset=with_a_border
            ),
            LARGE=LARGE | SMALL | dict(guide=LARGE["guide"] | SMALL["guide"]),
        ),
    ),
}


def in_miniature(monkeypatch: pytest.MonkeyPatch, small: Miniature) -> None:
    """Let every experiment see few digits, whatever data it asks for, and tiny presets."""
    dataset = few_digits(*small.digits, size=small.size)
    list_experiments()
    for name, module in list(sys.modules.items()):
        if name.startswith("capsule_zoo.experiments."):
            if hasattr(module, "load_dataset"):
                monkeypatch.setattr(module, "load_dataset", lambda *_, **__: dataset)
            if hasattr(module, "binary_mnist"):
                monkeypatch.setattr(module, "binary_mnist", lambda *_: dataset.binarize())
    patches: dict[str, Any] = {
        "matrix_capsules.viewpoints.load_views": lambda _: (few_views(), few_views()),
        "zoo.guide_swaps.list_weights": dict,
        "zoo.guide_swaps.create_untrained": lambda name, *a: create_untrained(
            name, *a, **sizes_of(name)
        ),
        "shape_codes.from_images.SIZES": SHAPES,
    }
    for place, value in {**patches, **small.patches}.items():
        value = (
            partial(value, dataset) if place in small.patches and "load_dataset" in place else value
        )
        monkeypatch.setattr(f"capsule_zoo.experiments.{place}", value)
    change_defaults(monkeypatch, "recurrent-capsules", **RECURRENT)
    change_defaults(monkeypatch, "matrix-capsules", **MATRIX)
    compare_small_machines(monkeypatch)


def without_numbers(names: set[str]) -> set[str]:
    """Return names in which every number is N: settings choose how many of a kind there are."""
    return {re.sub(r"(?<=_)\d+(_\d+)*(?=_|$)", "N", name) for name in names}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Number of distinct clusters")  # of what trains for moments
@pytest.mark.parametrize("name", MINIATURES)
def test_an_experiment_leaves_what_its_record_has(name, monkeypatch, unpainted, tmp_path):
    """Records may lack names that are newer, and few draws have no tail whose shape is fitted."""
    small = MINIATURES[name]
    in_miniature(monkeypatch, small)
    options = Options(minutes=small.minutes, progress=False, processes=1)
    names, figures = names_in_record(name, options, tmp_path, **small.settings)
    if not (RESULTS / f"{name}.json").exists():
        return
    record, stem = read_record(name, RESULTS), name.rpartition("/")[2]
    drawn = {path.stem.removeprefix(stem).lstrip("_") for path in figures_of(name, RESULTS)}
    recorded = {metric for metric in record["metrics"] if not metric.startswith("pareto_k")}
    assert without_numbers(recorded) <= without_numbers(names)
    assert without_numbers(figures) == without_numbers(drawn)
    assert record["data"] == find_experiment(name).data


def test_every_experiment_is_run_here_or_beside_its_distributions():
    """A file that runs experiments writes their names in full."""
    texts = (path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    beside = " ".join(text for text in texts if re.search(RUNS, text))
    names = [name for name in list_experiments() if name not in MINIATURES]
    assert [name for name in names if f'"{name}"' not in beside] == []


@pytest.mark.parametrize("name", list_experiments())
def test_every_experiment_describes_itself_and_its_settings(name):
    experiment = find_experiment(name)
    assert experiment.summary and experiment.data in dataset_names()
    experiment.check(experiment.fill_settings({}))
    json.dumps(experiment.fill_settings({}))
    assert [s.name for s in experiment.settings.values() if not s.description] == []


@pytest.mark.parametrize("name", [n for n in list_experiments() if not find_experiment(n).of_runs])
def test_a_run_is_refused_where_it_would_not_be_measured(name):
    with pytest.raises(ValueError, match="leave --run out"):
        find_experiment(name)(Options(run="part-whole-mnist", progress=False))
