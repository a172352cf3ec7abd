"""Shape codes on published parts: prior samples, classes without labels, and rotated digits."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyro
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import (
    group_by_quantity,
    looks,
    mean_and_error,
    ratio,
    single,
)
from capsule_zoo.figures.grids import COLUMNS, image_rows
from capsule_zoo.guides.parts.rotations import rotate_images
from capsule_zoo.guides.parts.shape_codes import ShapeCodesGuide
from capsule_zoo.inference import Checks, fit, infer, mean_images
from capsule_zoo.inference.evaluation.ancestral import image_log_likelihood
from capsule_zoo.inference.probes import fit_probe, linear_probe
from capsule_zoo.inference.sample_quality import train_classifier
from capsule_zoo.models.parts.part_sets import from_part_sets
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, load
from capsule_zoo.zoo.shape_codes.entry import (
    ON_PART_SETS,
    create_from_parts,
    parse_dataset,
    part_sets,
    start_objects,
)

T = TypeVar("T", bound=tuple[Tensor, ...])
REDRAWS, PROBED = 10, 10_000
ROTATIONS = 24
TEMPERATURE = 100.0  # temperature of the belief in the features of the probes; see `Object`
PENALTY = 0.1  # inverse strength of the regularization of probes on objects
OBJECT = ["object_kind", "object_pose", "object_code"]
REPEATED = ("cluster_accuracy", "cluster_accuracy_sampled", "frechet", "probe", "probe_all")
KINDS = (10, 64)  # numbers of kinds that are tried; of the last, all measures are computed
STEPS = 200  # updates after the initialization from factor analyzers
IMAGES = 5000  # number of images in every Frechet distance
HELD_OUT_IMAGES = 1000  # number of images on which the loss of redrawn parts is measured


@experiment("shape-codes/objects", data="mnist", minutes=30)
def objects(options: Options, *, seeds: int = 3) -> Result:
    """Train objects with shape codes on frozen, published parts of MNIST (30 minutes).

    For each number of kinds: prior samples compared with digits in the features of a classifier,
    and the classes found without labels (each kind counts as its commonest training class). For
    64 kinds also: the loss when parts are redrawn from their object, linear probes, and digits
    rotated by any angle and encoded at the rotation at which the objects explain the parts best.
    `..._over_seeds` is the mean over several initializations of the objects, `..._worst` the worst.

    Args:
        seeds: number of initializations of the objects for measures over seeds.
    """
    data = load_dataset("mnist", root=options.data_root)
    classifier = train_classifier(data.train, data.num_classes, epochs=3, seed=options.seed)
    real = classifier.read(data.test.images[:IMAGES])
    options.say("Parsing all images")
    published = create_on_published_parts(KINDS[-1], options.seed).guide
    sets = parse_dataset(data, options.seed, guide=published, tested=None)

    def learn(kinds: int, seed: int) -> tuple[Entry, list[Object], Tensor, Numbers]:
        """Train objects; return them, what they infer, samples, and measures of the kinds."""
        entry = create_on_published_parts(kinds, seed)
        train_objects(entry, sets, replace(options, seed=seed))
        splits = sets.train, sets.test
        inferred = [read_objects(entry.guide, s.images, TEMPERATURE) for s in splits]
        samples = mean_images(entry.model, IMAGES, seed=seed)
        classes = measure_clusters([o.belief for o in inferred], [s.labels for s in splits])
        return entry, inferred, samples, classes | looks(classifier.read(samples), real)

    rows: dict[str, Tensor] = {"digits": data.test.images[:COLUMNS]}
    by_kinds: dict[str, Numbers] = {}
    for kinds in KINDS:
        main, inferred, samples, by_kinds[str(kinds)] = learn(kinds, options.seed)
        rows[f"{kinds} kinds"] = samples[:COLUMNS]
    numbers = measure_main(main, data, sets, inferred, options.seed)
    outcomes = [by_kinds[str(KINDS[-1])] | numbers]
    for seed in range(options.seed + 1, options.seed + seeds):
        _, inferred, _, classes = learn(KINDS[-1], seed)
        features = [item.features() for item in inferred]
        outcomes.append(classes | probes(features, sets, "probe", PENALTY))
    starts = Table(mean_and_worst(outcomes), "{variant}_{quantity}")
    metrics: Metrics = {**group_by_quantity(by_kinds), **numbers, "starts of the objects": starts}
    figures = {"": image_rows(rows, "Digits, and samples of the prior of shape codes")}
    return Result(metrics, figures, None, main)


def mean_and_worst(seeds: Sequence[Numbers]) -> dict[str, Numbers]:
    """Return mean (`over_seeds`) and worst value of each metric over seeds."""
    means, worst = dict[str, Any](), dict[str, Any]()
    for name in REPEATED:
        values = [numbers[name][0] for numbers in seeds]
        means[name] = mean_and_error(values)
        worst[name] = max(values) if name == "frechet" else min(values), None, len(values)
    return {"over_seeds": means, "worst": worst}


def measure_main(
    entry: Entry, data: Dataset, sets: Dataset, inferred: "list[Object]", seed: int
) -> Numbers:
    """Measure the objects' loss of explained parts, linear probes, and rotated digits.

    Args:
        entry: the trained entry.
        data, sets: images, and the part sets inferred from them.
        inferred: objects that the guide infers from training and test sets.
    """
    parts = [split.images.flatten(1).numpy() for split in (sets.train, sets.test)]
    features = [item.features() for item in inferred]
    probe = fit_probe(features[0][:PROBED], sets.train.labels[:PROBED], PENALTY)
    return {
        **lost(entry, data.test.images[:HELD_OUT_IMAGES], seed),
        **probes(features, sets, "probe", PENALTY),
        **probes(parts, sets, "probe_parts"),
        **rotated_digits(entry, probe, data.test),
    }


def create_on_published_parts(
    kinds: int, seed: int, weights: str = "shape-codes-mnist", sigma_min: float = 0.025
) -> Entry:
    """Return an untrained entry with the parts of published weights."""
    source = load(weights)
    pyro.set_rng_seed(seed)
    return create_from_parts(source, kinds=kinds, codes=16, sigma_min=sigma_min, sigma_top=0.005)


def train_objects(entry: Entry, sets: Dataset, options: Options) -> None:
    """Train the objects of an entry on part sets."""
    options.say(f"Training objects of {entry.model.kinds} kinds")
    pair = entry.model.with_scope("objects"), entry.guide.with_scope("objects")
    start_objects(entry.guide, sets.train, options.seed)
    arguments = ON_PART_SETS | dict(batch_size=256, steps=options.shorten_steps(STEPS))
    checks = Checks(progress=options.progress)
    fit(*pair, sets, seed=options.seed, checks=checks, **arguments)


class Object(NamedTuple):
    """The objects that a guide infers from N part sets.

    A part set has about a hundred numbers, so that q(k) is nearly always certain of one kind, and
    information beyond the likeliest kind is lost. The features therefore weigh kinds by a tempered
    belief, softmax_k(log q(k) / T). At T = 7 P the weights follow the geometric mean density of a
    number of the part set.

    Attributes:
        belief: q(k), (N, K).
        tempered: belief at the temperature T, (N, K).
        pose: mean of the kinds' central poses, weighted by the tempered belief, (N, 6).
        codes: central code of every kind, times the tempered belief in the kind, (N, K, d).
        explained: estimate of log p(parts), (N,), in nats.
    """

    belief: Tensor
    tempered: Tensor
    pose: Tensor
    codes: Tensor
    explained: Tensor

    def features(self) -> np.ndarray:
        """Return the tempered belief, the codes and the pose as columns of one matrix.

        The codes of different kinds have different meanings, so each kind has its own columns.
        """
        return torch.cat([self.tempered, self.codes.flatten(1), self.pose], dim=-1).numpy()


class Kinds(NamedTuple):
    """The object of every kind that a guide infers from N part sets.

    Attributes:
        logits: log q(k) up to a constant, an estimate of log p(parts, k), (N, K).
        pose: central pose if the object is of kind k, (N, K, 6).
        code: central code if the object is of kind k, (N, K, d).
    """

    logits: Tensor
    pose: Tensor
    code: Tensor

    def weigh_kinds(self, temperature: float = 1.0) -> Object:
        """Return the objects with kinds weighted by their belief at a temperature."""
        tempered = (self.logits / temperature).softmax(-1)
        codes = tempered[..., None] * self.code
        pose = (tempered[..., None] * self.pose).sum(-2)
        explained = self.logits.logsumexp(-1)
        return Object(self.logits.softmax(-1), tempered, pose, codes, explained)


@torch.no_grad()
def read_kinds(guide: ShapeCodesGuide, sets: Tensor) -> Kinds:
    """Infer an object of every kind from part sets (N, 1, P, 7)."""
    guide, results = guide.with_scope("objects"), []
    for batch in sets.split(500):
        parts = from_part_sets(batch)
        proposals = guide.propose(parts)
        results.append(Kinds(guide.kind_logits(parts, proposals), proposals.pose, proposals.code))
    return Kinds(*(torch.cat(parts) for parts in zip(*results, strict=True)))


def read_objects(guide: ShapeCodesGuide, sets: Tensor, temperature: float = 1.0) -> Object:
    """Infer the objects of part sets (N, 1, P, 7), with features at a temperature of the belief."""
    return read_kinds(guide, sets).weigh_kinds(temperature)


def best_of(readings: Iterable[T], score: Callable[[T], Tensor]) -> tuple[T, Tensor]:
    """Return the reading with the highest score for every image, or every image and kind.

    The first reading is changed in place.

    Returns:
        The best readings, and their indices in the shape of a score.
    """
    best: T | None = None
    numbers = torch.zeros(())
    for number, reading in enumerate(readings):
        if best is None:
            best, numbers = reading, torch.zeros_like(score(reading))
        better = score(reading) > score(best)
        numbers[better] = number
        for values, new in zip(best, reading, strict=True):
            values[better] = new[better]
    if best is None:
        raise ValueError("views is empty; give the part sets of at least one rotation")
    return best, numbers


def encode_at_each_rotation(
    guide: ShapeCodesGuide, views: Iterable[Tensor], temperature: float = 1.0
) -> Object:
    """Infer the objects of images, each kind at the rotation at which it explains parts best.

    Kinds that were fitted to rotated images have their own upright directions, so that kinds can be
    compared only if each chooses its rotation.

    Args:
        views: part sets (N, 1, P, 7) of the images, at each of their rotations.
        temperature: temperature T of the belief in the features.
    """
    kinds, _ = best_of((read_kinds(guide, sets) for sets in views), lambda view: view.logits)
    return kinds.weigh_kinds(temperature)


def sets_at_rotations(guide: ShapeCodesGuide, split: Split, rotations: int) -> Iterator[Tensor]:
    """Yield the part sets (N, 1, P, 7) of images at `rotations` angles, evenly over the circle."""
    reader = guide.with_scope("parts")
    for rotation in range(rotations):
        angle = split.images.new_full((len(split),), 2 * math.pi * rotation / rotations)
        yield part_sets(reader, replace(split, images=rotate_images(split.images, angle))).images


def encode_at_best_rotation(
    guide: ShapeCodesGuide, split: Split, rotations: int, temperature: float = 1.0
) -> tuple[Object, Tensor]:
    """Infer the objects of images at the rotation at which the objects explain the parts best.

    Returns:
        The objects, and the index of every image's rotation, (N,).
    """
    sets = sets_at_rotations(guide, split, rotations)
    views = (read_objects(guide, view, temperature) for view in sets)
    return best_of(views, lambda view: view.explained)


def count_classes(belief: Tensor, labels: Tensor) -> Tensor:
    """Count the images of each class by likeliest kind, (K, C), from (N, K) and classes (N,)."""
    count = torch.zeros(belief.shape[1], int(labels.max()) + 1)
    return count.index_put_((belief.argmax(-1), labels), torch.ones(len(belief)), accumulate=True)


def measure_clusters(beliefs: Sequence[Tensor], labels: Sequence[Tensor]) -> Numbers:
    """Measure how well kinds match the classes, unknown in training, and how many are used.

    A kind counts as its commonest class among training images, for the likeliest kind
    (`cluster_accuracy`) and for a sampled kind (`..._sampled`). If there are as many kinds as
    classes, kinds are also matched with classes one to one (`..._one_to_one`).

    Args:
        beliefs: q(k) of training and test images, (N, K) each.
        labels: their classes, (N,) each.
    """
    belief, tested = beliefs
    train_labels, truth = labels
    count = count_classes(belief, train_labels)
    kinds, classes = count.shape
    commonest = count.argmax(1)
    drawn = torch.multinomial(tested, 1, generator=torch.Generator().manual_seed(0))[:, 0]
    answers = {
        "cluster_accuracy": commonest[tested.argmax(-1)],
        "cluster_accuracy_sampled": commonest[drawn],
    }
    if kinds == classes:
        _, assignment = linear_sum_assignment(-count.numpy())  # the class of every kind
        answers["cluster_accuracy_one_to_one"] = torch.from_numpy(assignment)[tested.argmax(-1)]
    fraction = belief.mean(0)
    perplexity = torch.special.entr(fraction).sum().exp().item()
    return {
        **{name: mean_and_error((answer == truth).double()) for name, answer in answers.items()},
        "kinds_in_use": single((fraction > 0.1 / kinds).sum().item(), len(belief)),
        "kinds_perplexity": single(perplexity, len(belief)),
    }


def lost(entry: Entry, images: Tensor, seed: int) -> Numbers:
    """Return the fraction of the parts' explanation that is lost if an object redraws its parts."""
    drawn = infer(entry.guide, images, seed=seed)
    objects = {name: drawn[name] for name in OBJECT}
    empty = {**drawn, "part_presence": torch.zeros_like(drawn["part_presence"])}
    inferred = image_log_likelihood(entry.model, images, drawn)
    background = image_log_likelihood(entry.model, images, empty)
    again = [image_log_likelihood(entry.model, images, objects, seed + i) for i in range(REDRAWS)]
    redrawn = torch.stack(again).mean(0)
    return {"fraction_lost": ratio(inferred - redrawn, inferred - background)}


def probes(
    features: Sequence[np.ndarray], sets: Dataset, name: str, penalty: float = 1.0
) -> Numbers:
    """Fit linear probes on 10,000 and on all training images; return their test accuracies."""
    (train, test), labels = features, sets.train.labels
    return {
        name + ending: linear_probe(train[:n], labels[:n], test, sets.test.labels, penalty)
        for ending, n in {"": PROBED, "_all": len(train)}.items()
    }


def rotated_digits(entry: Entry, probe: Any, test: Split) -> Numbers:
    """Classify digits rotated by any angle with a probe that was fitted on upright ones.

    Each digit is parsed at 24 rotations, and encoded where its parts are explained best.
    """
    degrees = 360 * torch.rand(len(test), generator=torch.Generator().manual_seed(4))
    images = transforms.warp_images(test.images, transforms.motion(degrees)).clamp(0, 1)
    split = replace(test, images=images)
    objects, rotation = encode_at_best_rotation(entry.guide, split, ROTATIONS, TEMPERATURE)
    right = probe.predict(objects.features()) == test.labels.numpy()
    after = degrees + 360 * rotation / ROTATIONS
    away = (after + 180) % 360 - 180  # from upright
    return {
        "rotated_aligned": mean_and_error(right.astype(float)),
        "rotation_within_20": mean_and_error((away.abs() <= 20).double()),
    }
