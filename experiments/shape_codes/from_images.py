"""Shape codes trained from images, all levels in one short run: scikit-learn's digits, letters."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capsule_zoo.data import Dataset, load_dataset, transforms
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import (
    count_used_classes,
    group_by_quantity,
    held_out_bounds,
    looks,
    mean_and_error,
    means_of,
    pictures,
    single,
)
from capsule_zoo.experiments.part_whole.classification import tighten
from capsule_zoo.experiments.shape_codes.objects import (
    PENALTY,
    TEMPERATURE,
    measure_clusters,
    read_objects,
)
from capsule_zoo.guides import ShapeCodesGuide
from capsule_zoo.inference import Checks, Inputs, compare, mean_images
from capsule_zoo.inference.probes import linear_probe
from capsule_zoo.inference.sample_quality import FeatureClassifier, train_classifier
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, create, load
from capsule_zoo.zoo.shape_codes.entry import part_sets

JITTERED = Inputs(transforms.Affine(degrees=10, shear=0.1, scale=(0.9, 1.1), shift=1))
SIZES: dict[str, Any] = dict(kinds=20, parts=12, codes=8)
LETTERS = "font-letters"
CLUSTERS = "cluster_accuracy", "kinds_in_use"  # measures of the kinds of letters
EPOCHS = 100  # epochs of the classifier that judges samples, on 324 letters
DIGIT_STEPS = 4800  # updates of all stages for digits, unless minutes are given
LETTER_STEPS = (1000, 4000)  # updates of all stages for letters, a row for each number
TIGHTENING = 400  # updates of the guide with normal poses
COMPARED_IMAGES, PARTICLES = 48, 50  # digits on which guides are compared, draws of the bound
SAMPLES = 300  # samples of the prior, and digits with which they are compared
CLEAR = 0.9  # probability of the predicted class above which a sample is clear


@experiment("shape-codes/digits", data="digits", minutes=3)
def digits(options: Options) -> Result:
    """Learn scikit-learn's digits level by level, draw new ones, and compare guides (5 minutes)."""
    data = load_dataset("digits")
    entry = create("shape-codes", image_shape=data.image_shape, **SIZES)
    arguments: dict[str, Any] = dict(inputs=JITTERED, in_stages=True, **options.limit(DIGIT_STEPS))
    train(entry, data, options, name="digits", **arguments)
    tightening = options.shorten_steps(TIGHTENING)
    normal = tighten(entry, data, options, steps=tightening, inputs=JITTERED)
    subset = data.test[:COMPARED_IMAGES]
    options.say(f"Comparing guides on {len(subset)} held-out digits")
    routing = replace(entry, guide=normal.guide).use_guide("routing").guide_of(ShapeCodesGuide)
    table = compare(
        {
            "network": (entry.model, normal.guide),
            "routing": (entry.model, routing.with_poses("normal")),
            "points": (entry.model, entry.guide),
        },
        subset,
        num_particles=PARTICLES,
        seed=options.seed,
    )
    codes = measure_codes(entry, data)
    probes = {name: codes.pop(name) for name in ("probe", "probe_parts")}
    classifier = train_classifier(data.train, data.num_classes, epochs=10, seed=options.seed)
    real = classifier.read(data.test.images[:SAMPLES])
    drawn = mean_images(entry.model, len(real.features), seed=options.seed)
    quality = looks(classifier.read(drawn), real)
    metrics: Metrics = {
        **held_out_bounds(normal, data.test, PARTICLES, options.seed),
        **probes,
        "classes": Table(group_by_quantity({"kinds": codes}), "{quantity}"),
        "samples": Table(group_by_quantity({"prior": quality}), "{quantity}"),
    }
    figures = {**pictures(entry, data.test.images), "guides": table.draw()}
    return Result(metrics, figures, table, normal)


def measure_codes(entry: Entry, data: Dataset) -> Numbers:
    """Measure the classes that kinds find, and linear probes on objects and on parts."""
    splits = data.train, data.test
    sets = [part_sets(entry.guide.with_scope("parts"), split).images for split in splits]
    objects = [read_objects(entry.guide, item, TEMPERATURE) for item in sets]
    labels = [split.labels for split in splits]
    codes = [item.features() for item in objects]
    parts = [item.flatten(1).numpy() for item in sets]
    return {
        **measure_clusters([item.belief for item in objects], labels),
        "probe": linear_probe(codes[0], labels[0], codes[1], labels[1], PENALTY),
        "probe_parts": linear_probe(parts[0], labels[0], parts[1], labels[1]),
    }


@experiment("shape-codes/letters", data=LETTERS, minutes=20)
def letters(options: Options, *, seeds: int = 3) -> Result:
    """Train on 324 letters as `capsule-zoo train shape-codes` does, and draw new ones (20 minutes).

    Samples of the prior are judged by a convolutional classifier of the 324 letters: `confidence`
    is the mean probability of its predicted class, `clear` the fraction of samples with a
    probability above .9, and `classes` the number of classes among the samples. Real letters of a
    font family outside of training are judged too. `probe` is a linear classifier on the objects'
    beliefs, codes and poses, `probe_parts` one on parts and `probe_pixels` one on pixels. All are
    tested on the other font family, and so is `cluster_accuracy`, where each kind of object counts
    as its commonest class. `core_minutes` is the processor time of a training.

    Args:
        seeds: number of seeds.
    """
    study = Study({f"{n}_steps": options.shorten_steps(n) for n in LETTER_STEPS}, seeds)
    untimed, data = replace(options, minutes=None), load_dataset(LETTERS)
    rows = means_of(study.run(learn_letters, untimed))
    rows["real_letters"] = judge_letters(train_judge(data), data.test.images)
    longest = load(study.folders(untimed)[f"{max(LETTER_STEPS)}_steps"])
    images, labels = zip(
        *((s.images.flatten(1).numpy(), s.labels) for s in (data.train, data.test)), strict=True
    )
    pixels = linear_probe(images[0], labels[0], images[1], labels[1])
    metrics: Metrics = {"letters": Table(group_by_quantity(rows)), "probe_pixels": pixels}
    return Result(metrics, pictures(longest, data.test.images), entry=longest)


def learn_letters(job: Job[int]) -> Numbers:
    """Train for the job's number of steps; return measures of codes and samples."""
    data, options = load_dataset(LETTERS), job.options
    entry = create_untrained("shape-codes", data, options)
    arguments: dict[str, Any] = dict(steps=job.variant, checks=Checks(clock="processor"))
    run = train(entry, data, options, in_stages=True, **arguments)
    codes, names = measure_codes(entry, data), ("probe", "probe_parts", *CLUSTERS)
    return {
        **judge_letters(train_judge(data), mean_images(entry.model, SAMPLES, seed=options.seed)),
        **{name: codes[name] for name in names},
        "core_minutes": single(run.seconds / 60),
    }


def train_judge(data: Dataset) -> FeatureClassifier:
    """Train a classifier of the training letters, from a fixed seed."""
    return train_classifier(data.train, data.num_classes, epochs=EPOCHS)


def judge_letters(judge: FeatureClassifier, images: Tensor) -> Numbers:
    """Return a classifier's confidence on images (N, 1, H, W), and the number of their classes."""
    answers = judge.read(images)
    return {
        "confidence": mean_and_error(answers.confidence),
        "clear": mean_and_error(torch.from_numpy(answers.confidence > CLEAR).double()),
        "classes": count_used_classes(answers.classes),
    }
