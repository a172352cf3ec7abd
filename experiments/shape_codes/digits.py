"""Shape codes on scikit-learn's digits, from images on: all levels in one short run."""

from dataclasses import replace
from typing import Any

from torch import nn

from capsule_zoo.data import Dataset, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment, train
from capsule_zoo.experiments.common.findings import by_quantity, held_out_bounds, looks, pictures
from capsule_zoo.experiments.part_whole.classification import tighten
from capsule_zoo.experiments.shape_codes.objects import ObjectSettings, classes_found, read_objects
from capsule_zoo.guides import ShapeCodesGuide
from capsule_zoo.inference import Inputs, compare, linear_probe, mean_images, train_classifier
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, create
from capsule_zoo.zoo.shape_codes.entry import part_sets

JITTERED = Inputs(transforms.Affine(degrees=10, shear=0.1, scale=(0.9, 1.1), shift=1))
SIZES: dict[str, Any] = dict(kinds=20, parts=12, codes=8)


@experiment("shape-codes/digits", data="digits", minutes=3)
def digits(
    options: Options,
    *,
    steps: int = 4800,
    tightening: int = 400,
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
    entry = create("shape-codes", image_shape=data.image_shape, **SIZES)
    how: dict[str, Any] = dict(inputs=JITTERED, in_stages=True, **options.limit(steps))
    train(entry, data, options, name="digits", **how)
    shorter: dict[str, Any] = dict(steps=options.shortened(tightening), inputs=JITTERED)
    normal = tighten(entry, data, options, **shorter)
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
    codes = measure_codes(entry, data)
    probes = {name: codes.pop(name) for name in ("probe", "probe_parts")}
    classifier = train_classifier(data.train, data.num_classes, epochs=10, seed=options.seed)
    real = classifier.read(data.test.images[:samples])
    drawn = mean_images(entry.model, len(real.features), seed=options.seed)
    metrics: Metrics = {
        **held_out_bounds(normal, data.test, particles, options.seed),
        **probes,
        "classes": Table(by_quantity({"kinds": codes}), "{quantity}"),
        "samples": Table(by_quantity({"prior": looks(classifier.read(drawn), real)}), "{quantity}"),
    }
    figures = {**pictures(entry, data.test.images), "guides": table.draw()}
    return Result(metrics, figures, table, normal)


def measure_codes(entry: Entry, data: Dataset) -> Numbers:
    """Return the classes that kinds find, and linear probes on objects and on parts."""
    splits, reading = (data.train, data.test), ObjectSettings()
    sets = [part_sets(entry.guide.with_scope("parts"), split).images for split in splits]
    objects = [read_objects(entry.guide, each, reading.temperature) for each in sets]
    labels = [split.labels for split in splits]
    codes = [each.features() for each in objects]
    parts = [each.flatten(1).numpy() for each in sets]
    return {
        **classes_found([each.belief for each in objects], labels),
        "probe": linear_probe(codes[0], labels[0], codes[1], labels[1], reading.penalty),
        "probe_parts": linear_probe(parts[0], labels[0], parts[1], labels[1]),
    }
