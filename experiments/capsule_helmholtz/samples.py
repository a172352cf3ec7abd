"""Samples of a Helmholtz machine: Gibbs chains compared with ancestral draws (Li and Zhu 2019).

The machine is directed, so that ancestral draws are exact. A Gibbs chain alternates recognition of
all layers and generation from the top one. Its draws are those of the machine only if recognition
equals the posterior; otherwise they may look better or worse. The paper shows both by eye.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import by_quantity, mean_and_error
from capsule_zoo.experiments.part_whole.prior import accuracy, as_table, looks
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.inference.evaluation.ancestral import draw_images, infer, mean_images
from capsule_zoo.inference.evaluation.sample_quality import train_classifier
from capsule_zoo.models.common.modes import seeded
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, load

WEIGHTS = "capsule-helmholtz-mnist"
RARE = 0.001  # share of the digits with less ink than a blank image, and with more than a full one


@experiment("capsule-helmholtz/samples", data="mnist", of_runs=True)
def samples(
    options: Options, *, images: int = 5000, sweeps: tuple[int, ...] = (1, 10, 100), epochs: int = 3
) -> Result:
    """Compare Gibbs chains with ancestral draws by a classifier's features (some 10 minutes).

    It measures the published machine or the given run. All samples are mean images. A chain starts
    at an ancestral draw or at a training digit. The Frechet distances are those to test digits, as
    in `part-whole/prior`. A sample is blank if it has less ink than all but a thousandth of the
    digits, and full if it has more.

    Args:
        images: number of images in every Frechet distance, at most half of the test images.
        sweeps: numbers of Gibbs sweeps after which chains are compared, in rising order.
        epochs: epochs of the classifier whose features are compared.
    """
    data = load_dataset("mnist", root=options.data_root)
    entry = load(options.run or WEIGHTS)
    number, seed = min(images, len(data.test) // 2), options.seed
    digits = data.train.images[:number]
    rows = {"train": digits, "ancestral": mean_images(entry.model, number, seed=seed)}
    starts = {
        "gibbs": draw_images(entry.model, number, seed=seed),
        "from_digits": digits.bernoulli(generator=torch.Generator().manual_seed(seed)),
    }
    for name, start in starts.items():
        options.say(f"Running {number} chains: {name}")
        found = chains(entry, start, sweeps, seed)
        rows |= {f"{name}_{count}": drawn for count, drawn in found.items()}
    options.say("Training a classifier on the digits, for its features")
    classifier = train_classifier(data.train, data.num_classes, epochs=epochs, seed=seed)
    real = classifier.read(data.test.images[:number])
    seen = {
        name: {**looks(classifier.read(drawn), real), **extremes(drawn, data.train.images)}
        for name, drawn in rows.items()
    }
    metrics: Metrics = {
        "classifier_accuracy": accuracy(classifier, data),
        "draws": Table(by_quantity(seen)),
    }
    shown = {name: drawn[:12] for name, drawn in rows.items()}
    figure = image_rows(shown, "Digits, ancestral draws, and Gibbs chains by their sweeps")
    return Result(metrics, {"": figure}, as_table(seen), entry)


@torch.no_grad()
def chains(entry: Entry, images: Tensor, sweeps: Sequence[int], seed: int) -> dict[int, Tensor]:
    """Return the mean images (N, C, H, W) of the last draw of Gibbs chains, by number of sweeps.

    Args:
        images: where the chains start, (N, C, H, W).
        sweeps: in rising order, from 1 on.
    """
    found, done = {}, 0
    with seeded(seed):
        for count in sweeps:
            steps = count - 1 - done
            images = torch.cat([entry.guide.gibbs(x, steps) for x in images.split(500)])
            done = count - 1
            upward, downward = seed + 2 * count, seed + 2 * count + 1  # seeds that differ
            top = infer(entry.guide, images, list(entry.model.top_sites), upward)
            found[count] = mean_images(entry.model, len(images), top, downward)
    return found


def extremes(drawn: Tensor, digits: Tensor) -> Numbers:
    """Return the shares of images that have less ink, and more, than digits (N, C, H, W) have."""
    low, high = digits.flatten(1).mean(1).quantile(torch.tensor([RARE, 1 - RARE]).to(digits))
    ink = drawn.flatten(1).mean(1)
    return {
        "blank": mean_and_error((ink < low).double()),
        "full": mean_and_error((ink > high).double()),
    }
