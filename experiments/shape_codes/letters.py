"""Shape codes of a few hundred letters, trained as one's own pictures are, briefly and longer."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, experiment, train
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    count_used_classes,
    mean_and_error,
    means_of,
    pictures,
    single,
)
from capsule_zoo.experiments.shape_codes.digits import measure_codes
from capsule_zoo.inference import Checks, linear_probe, mean_images, train_classifier
from capsule_zoo.inference.evaluation.sample_quality import FeatureClassifier
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import load

DATA = "font-letters"
EPOCHS = 100  # of the classifier that judges draws, on 324 letters
CLEAR = 0.9  # probability of the class of a draw that can be read


@experiment("shape-codes/letters", data=DATA, minutes=20)
def letters(
    options: Options, *, steps: tuple[int, ...] = (1000, 4000), seeds: int = 3, samples: int = 300
) -> Result:
    """Train on 324 letters as `capsule-zoo train shape-codes` does, and draw new ones (20 minutes).

    Draws of the prior are judged by a convolutional classifier of the same 324 letters:
    `confidence` is the mean probability of the class that it names, `clear` the fraction of draws
    with a probability above .9, and `classes` the number of classes that are drawn. Real letters of
    a font family that nothing was trained on are judged in the same way. `probe` is a linear
    classifier on the objects' beliefs, codes and poses, `probe_parts` one on parts and
    `probe_pixels` one on pixels; all are tested on that font family, and so is `classes_found`,
    where each kind of object is named by its commonest class. `core_minutes` is the processor time
    of a training.

    Args:
        steps: updates of all stages, with a row for each number; they shrink with minutes.
        seeds: number of seeds.
        samples: number of draws of the prior.
    """
    study = Study({f"{number}_steps": options.shortened(number) for number in steps}, seeds)
    untimed, data = replace(options, minutes=None), load_dataset(DATA)
    rows = means_of(study.run(learn_letters, untimed, samples=samples))
    rows["real_letters"] = judge_letters(train_judge(data), data.test.images)
    longest = load(study.folders(untimed)[f"{max(steps)}_steps"])
    images, labels = zip(
        *((s.images.flatten(1).numpy(), s.labels) for s in (data.train, data.test)), strict=True
    )
    pixels = linear_probe(images[0], labels[0], images[1], labels[1])
    metrics: Metrics = {"letters": Table(by_quantity(rows)), "probe_pixels": pixels}
    return Result(metrics, pictures(longest, data.test.images), entry=longest)


def learn_letters(job: Job[int], *, samples: int) -> Numbers:
    """Train for the job's number of steps; return measures of codes and draws."""
    data, options = load_dataset(DATA), job.options
    entry = begun("shape-codes", data, options)
    how: dict[str, Any] = dict(steps=job.variant, checks=Checks(clock="processor"))
    run = train(entry, data, options, in_stages=True, **how)
    codes = measure_codes(entry, data)
    return {
        **judge_letters(train_judge(data), mean_images(entry.model, samples, seed=options.seed)),
        **{name: codes[name] for name in ("probe", "probe_parts", "classes_found", "kinds_in_use")},
        "core_minutes": single(run.seconds / 60),
    }


def train_judge(data: Dataset) -> FeatureClassifier:
    """Return a classifier of the training letters, the same on every call."""
    return train_classifier(data.train, data.num_classes, epochs=EPOCHS)


def judge_letters(judge: FeatureClassifier, images: Tensor) -> Numbers:
    """Return how surely a classifier reads images (N, 1, H, W), and the number of their classes."""
    answers = judge.read(images)
    return {
        "confidence": mean_and_error(answers.confidence),
        "clear": mean_and_error(torch.from_numpy(answers.confidence > CLEAR).double()),
        "classes": count_used_classes(answers.classes),
    }
