"""Shape codes trained from images, all levels in one short run: scikit-learn's digits, letters."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

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
EPOCHS = 100  # epochs of the classifier that judges samples, on 324 letters
CLEAR = 0.9  # probability of the predicted class above which a sample is clear


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
    arguments: dict[str, Any] = dict(inputs=JITTERED, in_stages=True, **options.limit(steps))
    train(entry, data, options, name="digits", **arguments)
    shorter: dict[str, Any] = dict(steps=options.shorten_steps(tightening), inputs=JITTERED)
    normal = tighten(entry, data, options, **shorter)
    subset = data.test[:images]
    options.say(f"Comparing guides on {len(subset)} held-out digits")
    routing = replace(entry, guide=normal.guide).use_guide("routing").guide_of(ShapeCodesGuide)
    guides: dict[str, nn.Module] = {
        "network": normal.guide,
        "routing": routing.with_poses("normal"),
        "points": entry.guide,
    }
    pairs = {name: (entry.model, guide) for name, guide in guides.items()}
    table = compare(pairs, subset, num_particles=particles, seed=options.seed)
    codes = measure_codes(entry, data)
    probes = {name: codes.pop(name) for name in ("probe", "probe_parts")}
    classifier = train_classifier(data.train, data.num_classes, epochs=10, seed=options.seed)
    real = classifier.read(data.test.images[:samples])
    drawn = mean_images(entry.model, len(real.features), seed=options.seed)
    metrics: Metrics = {
        **held_out_bounds(normal, data.test, particles, options.seed),
        **probes,
        "classes": Table(group_by_quantity({"kinds": codes}), "{quantity}"),
        "samples": Table(
            group_by_quantity({"prior": looks(classifier.read(drawn), real)}), "{quantity}"
        ),
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
def letters(
    options: Options, *, steps: tuple[int, ...] = (1000, 4000), seeds: int = 3, samples: int = 300
) -> Result:
    """Train on 324 letters as `capsule-zoo train shape-codes` does, and draw new ones (20 minutes).

    Samples of the prior are judged by a convolutional classifier of the 324 letters: `confidence`
    is the mean probability of its predicted class, `clear` the fraction of samples with a
    probability above .9, and `classes` the number of classes among the samples. Real letters of a
    font family outside of training are judged too. `probe` is a linear classifier on the objects'
    beliefs, codes and poses, `probe_parts` one on parts and `probe_pixels` one on pixels. All are
    tested on the other font family, and so is `cluster_accuracy`, where each kind of object counts
    as its commonest class. `core_minutes` is the processor time of a training.

    Args:
        steps: updates of all stages, with a row for each number; they shrink with minutes.
        seeds: number of seeds.
        samples: number of samples of the prior.
    """
    study = Study({f"{number}_steps": options.shorten_steps(number) for number in steps}, seeds)
    untimed, data = replace(options, minutes=None), load_dataset(LETTERS)
    rows = means_of(study.run(learn_letters, untimed, samples=samples))
    rows["real_letters"] = judge_letters(train_judge(data), data.test.images)
    longest = load(study.folders(untimed)[f"{max(steps)}_steps"])
    images, labels = zip(
        *((s.images.flatten(1).numpy(), s.labels) for s in (data.train, data.test)), strict=True
    )
    pixels = linear_probe(images[0], labels[0], images[1], labels[1])
    metrics: Metrics = {"letters": Table(group_by_quantity(rows)), "probe_pixels": pixels}
    return Result(metrics, pictures(longest, data.test.images), entry=longest)


def learn_letters(job: Job[int], *, samples: int) -> Numbers:
    """Train for the job's number of steps; return measures of codes and samples."""
    data, options = load_dataset(LETTERS), job.options
    entry = create_untrained("shape-codes", data, options)
    arguments: dict[str, Any] = dict(steps=job.variant, checks=Checks(clock="processor"))
    run = train(entry, data, options, in_stages=True, **arguments)
    codes = measure_codes(entry, data)
    return {
        **judge_letters(train_judge(data), mean_images(entry.model, samples, seed=options.seed)),
        **{
            name: codes[name]
            for name in ("probe", "probe_parts", "cluster_accuracy", "kinds_in_use")
        },
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
