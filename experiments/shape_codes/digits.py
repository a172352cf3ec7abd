"""Shape codes on scikit-learn's digits, from images on: all levels in one short run."""

from dataclasses import replace
from typing import Any

from torch import nn

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import by_quantity, held_out_bounds, looks, pictures
from capsule_zoo.experiments.part_whole.classification import JITTER, learn_digits, tighten
from capsule_zoo.experiments.shape_codes.objects import ObjectSettings, classes_found, read_objects
from capsule_zoo.guides import ShapeCodesGuide
from capsule_zoo.inference import Inputs, compare, linear_probe, mean_images, train_classifier
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry
from capsule_zoo.zoo.shape_codes.entry import part_sets

STEPS, TIGHTENING = 4800, 400
ENTRY: tuple[str, dict[str, Any]] = ("shape-codes", dict(kinds=20, parts=12, codes=8))


@experiment("shape-codes/digits", data="digits", minutes=3)
def digits(
    options: Options,
    *,
    steps: int = STEPS,
    tightening: int = TIGHTENING,
    images: int = 48,
    particles: int = 50,
    samples: int = 300,
) -> Result:
    """Learn scikit-learn's digits level by level, draw new ones, and compare guides (5 minutes).

    Args:
        steps: updates of all stages, unless minutes are given; then all other steps shrink too.
        tightening: updates of the guide with normal poses.
        images: number of held-out digits on which guides are compared.
        particles: number of draws of the IWAE bound.
        samples: number of samples of the prior, which are compared with as many test digits.
    """
    data = load_dataset("digits")
    entry = learn_digits(data, options, *ENTRY, in_stages=True, **options.limit(steps))
    normal = tighten(
        entry, data, options, steps=options.shortened(tightening), inputs=Inputs(JITTER)
    )
    few = data.test[:images]
    options.say(f"Comparing guides on {len(few)} held-out digits")
    routing = replace(entry, guide=normal.guide).use_guide("routing").guide_of(ShapeCodesGuide)
    guides: dict[str, nn.Module] = {
        "network": normal.guide,
        "routing": routing.with_poses("normal"),
        "points": entry.guide,
    }
    pairs = {name: (entry.model, guide) for name, guide in guides.items()}
    table = compare(pairs, few, num_particles=particles, seed=options.seed)
    found = found_in(entry, data)
    read = {name: found.pop(name) for name in ("probe", "probe_parts")}
    seen = sampled(entry, data, samples, options.seed)
    metrics: Metrics = {
        **held_out_bounds(normal, data.test, particles, options.seed),
        **read,
        "classes": Table(by_quantity({"kinds": found}), "{quantity}"),
        "samples": Table(by_quantity({"prior": seen}), "{quantity}"),
    }
    shown = {**pictures(entry, data.test.images), "guides": table.draw()}
    return Result(metrics, shown, table, normal)


def found_in(entry: Entry, data: Dataset) -> Numbers:
    """Measure the classes that kinds find, and linear probes on objects and on parts."""
    splits = data.train, data.test
    sets = [part_sets(entry.guide.with_scope("parts"), split).images for split in splits]
    reading = ObjectSettings()
    read = [read_objects(entry.guide, each, reading.temperature) for each in sets]
    labels = [split.labels for split in splits]
    codes = [each.features() for each in read]
    parts = [each.flatten(1).numpy() for each in sets]
    return {
        **classes_found([each.belief for each in read], labels),
        "probe": linear_probe(codes[0], labels[0], codes[1], labels[1], reading.penalty),
        "probe_parts": linear_probe(parts[0], labels[0], parts[1], labels[1]),
    }


def sampled(entry: Entry, data: Dataset, number: int, seed: int) -> Numbers:
    """Compare samples of the prior with test digits, in the features of a classifier."""
    classifier = train_classifier(data.train, data.num_classes, epochs=10, seed=seed)
    real = classifier.read(data.test.images[:number])
    drawn = mean_images(entry.model, len(real.features), seed=seed)
    return looks(classifier.read(drawn), real)
