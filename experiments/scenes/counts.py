"""The number of digits in a scene: by training time, with more digits, and by three guides.

A public program of AIR, addtt/attend-infer-repeat-pytorch, counts .983 of scenes of 0 to 2 digits
right. With 3 digits AIR fails unless its form is changed (Eslami et al. 2016, section 3.1).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import (
    calibration_error,
    group_by_quantity,
    held_out_bounds,
    mean_and_error,
    ratio,
    single,
    with_worst,
)
from capsule_zoo.guides import Peeling
from capsule_zoo.inference import Check, Checks
from capsule_zoo.inference.objects import FoundObjects, find_objects, foreground_ari
from capsule_zoo.models.common.modes import eval_mode, use_seed
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry, load
from capsule_zoo.zoo.scenes.entry import pair_with_canvas
from capsule_zoo.zoo.scenes.figures import counts_against_time, counts_by_number, counts_reliability

DATA = "multi-mnist:train=60000"
WEIGHTS = "scenes-mnist"
PUBLISHED = 0.983  # fraction of right counts of the public program
EARLY = 300.0  # seconds of training at the first of the two measurements
DOUBTS = (1e-8, 1e-6, 1e-4, 1e-2)  # probabilities between bins of doubt
MAX_TRAINED_DIGITS = 2  # largest number of digits in a training scene
MORE = (3, 4, 5)  # numbers of digits beyond training
LARGE = (80, 80, 7)  # height, width and slots of scenes of more digits
PLACES = 0.1  # temperature of the sampled positions of attention
INKS = (0.5, 0.3, 0.1)  # brightness above which a pixel is in the mask of a true digit


DRAWS = 10  # samples of the guide that are combined for a count
TEST_SCENES = 2000  # test scenes whose objects are counted
BOUND_SCENES = 500  # test scenes whose log p is bounded
MORE_SCENES = 500  # test scenes of every larger number of digits
SIZES: dict[str, Any] = dict(counts="learned")  # arguments of the entry


@experiment("scenes/counts", data="multi-mnist", minutes=60)
def counts(options: Options, *, seeds: int = 5, length: float = 12.0, every: int = 1500) -> Result:
    """Count digits after minutes of training, and more digits than were seen (60 core-minutes).

    The guide learns with attention at one position, where most is unexplained, and counts with
    sampled positions of attention. `count_accuracy_5_minutes` is the last measurement within five
    minutes of a run; it is absent if a seed was not measured by then. `count_accuracy_30_minutes`
    is the measurement at the end of the run, which is shorter than 30 minutes. `..._worst` are of
    the worst seed. `elbo` and `iwae_100` are in nats per image.

    Args:
        seeds: number of seeds.
        length: training time of each seed, in minutes of the processor.
        every: updates between two measurements.
    """
    outcomes = Study({"scenes": length}, seeds).run(one_seed, options, every=every)["scenes"]
    numbers = with_worst([outcome["numbers"] for outcome in outcomes], "count_accuracy_*")
    accuracies = {n: numbers.pop(n) for n in list(numbers) if n.startswith("count_accuracy_")}
    accuracies = {n.removeprefix("count_accuracy_"): v for n, v in accuracies.items()}
    curves = [[(at, step, n[0]) for at, step, n in outcome["curve"]] for outcome in outcomes]
    figures = {"": counts_against_time(curves, PUBLISHED)}
    return Result({**numbers, "count_accuracy": accuracies}, figures)


def last_within(
    curve: Sequence[tuple[float, int, Number]], seconds: float = math.inf
) -> Number | None:
    """Return a curve's last measurement within some seconds; None if there is none."""
    return next((number for passed, _, number in reversed(curve) if passed <= seconds), None)


def one_seed(job: Job[float], *, every: int = 1500) -> dict[str, Any]:
    """Train one seed for the minutes of its job, and measure its counts and bounds."""
    length, options = job.variant, job.options
    data = load_dataset(DATA, options.data_root)
    entry = create_untrained("scenes", data, options, **SIZES)
    test = data.test[:TEST_SCENES]
    curve: list[tuple[float, int, Number]] = []

    def note(check: Check) -> None:
        curve.append((check.seconds, check.step, accuracy(entry, test)))

    checks = Checks(every=every, callbacks=[note], clock="processor")
    train(entry, data, options, options.minutes or length, checks=checks)
    accuracies = {"5_minutes": last_within(curve, EARLY), "30_minutes": last_within(curve)}
    bounds = held_out_bounds(entry, test[:BOUND_SCENES], 100, 0)
    numbers: dict[str, Number] = {
        **{f"count_accuracy_{n}": value for n, value in accuracies.items() if value is not None},
        **{name: bounds[name] for name in ("elbo", "iwae_100")},
        "steps": single(curve[-1][1]),
        "seconds": single(curve[-1][0]),
    }
    wide = pair_with_canvas(entry, *LARGE)
    for digits in MORE:
        scenes = load_with_digits(digits, options)
        numbers[f"count_accuracy_{digits}_digits"] = accuracy(wide, scenes)
    return {"numbers": numbers, "curve": curve}


def accuracy(entry: Entry, scenes: Split) -> Number:
    """Return the fraction of scenes with the right number of objects by `find_objects`."""
    arguments: dict[str, Any] = dict(draws=DRAWS, temperature=PLACES)
    objects = find_objects(entry.model, entry.guide, scenes.images, **arguments)
    return mean_and_error(right_counts(objects, scenes))


def right_counts(detections: FoundObjects, scenes: Split) -> Tensor:
    """Return 1 for every scene with the right number of objects, and 0 for others, (N,)."""
    return (detections.counts == scenes.objects.counts).float()


def load_with_digits(number: int, options: Options) -> Split:
    """Load scenes of exactly `number` digits on 80x80 pixels."""
    name = f"multi-mnist:canvas=80,least={number},most={number},train=20,test={MORE_SCENES}"
    return load_dataset(name, options.data_root).test


def ways(entry: Entry) -> dict[str, Entry]:
    """Return the entry with each inference method; all use its parameters."""
    guide = entry.guide_of(Peeling)
    again, drawn = guide.sharing_parameters(sweeps=2), guide.sharing_parameters(temperature=PLACES)
    return {
        "peeling": entry,
        "two_sweeps": replace(entry, guide=again),
        "drawn_places": replace(entry, guide=drawn),
    }


@experiment("scenes/reading", data="multi-mnist", of_runs=True)
def reading(options: Options) -> Result:
    """Count the digits of test scenes by three methods, and segment pixels (24 minutes).

    The model is of --run, or of the weights `scenes-mnist`. `count_accuracy_one_draw` is of
    one sample of the guide's presences. `count_confidence` is the mean probability of the most
    likely number, and `count_calibration` the mean distance between this probability and the
    fraction of scenes in which the number is right, within ten bins of probability. `ari_...`
    compares the pixels of objects that are found at sampled positions with three true masks; see
    `pixel_agreement`.
    """
    entry = load(options.run or WEIGHTS)
    sets = {"": (entry, load_dataset("multi-mnist:train=20", options.data_root).test[:TEST_SCENES])}
    wide = pair_with_canvas(entry, *LARGE)
    for digits in MORE:
        sets[f"_{digits}_digits"] = wide, load_with_digits(digits, options)
    metrics: dict[str, Any] = {}
    answers: dict[str, list[Tensor]] = {}
    for suffix, (pair, test) in sets.items():
        for name, way in ways(pair).items():
            options.say(f"Counting by {name}{suffix.replace('_', ' ')}")
            objects = find_objects(way.model, way.guide, test.images, draws=DRAWS)
            right, chances = right_counts(objects, test), objects.count_probabilities
            highest, numbers = chances.amax(1), {"count_accuracy": mean_and_error(right)}
            numbers["count_confidence"] = mean_and_error(highest)
            numbers["count_calibration"] = single(calibration_error(highest, right), len(right))
            if not suffix:
                drawn = drawn_counts(way, test) == test.objects.counts
                numbers["count_accuracy_one_draw"] = mean_and_error(drawn.float())
                if name == "drawn_places":
                    metrics["true pixels above"] = Table(pixel_agreement(objects, options))
            for quantity, value in numbers.items():
                metrics.setdefault(quantity + suffix, {})[name] = value
            doubt = chances.scatter(1, objects.counts[:, None], 0).sum(1)
            answer = torch.stack([test.objects.counts.float(), doubt, right])
            answers.setdefault(name, []).append(answer)
    together = {name: torch.cat(rows, 1) for name, rows in answers.items()}
    for number, fractions in group_by_quantity(accuracy_by_number(together)).items():
        if int(number) <= MAX_TRAINED_DIGITS:
            metrics[f"count_accuracy_{number}_digits"] = fractions
    return Result(metrics, figures_of(together))


@torch.no_grad()
def drawn_counts(entry: Entry, scenes: Split) -> Tensor:
    """Sample the presences of scenes once from the guide, and return the counts (N,)."""
    with use_seed(0), eval_mode(entry.guide):
        drawn = [entry.guide(images) for images in scenes.images.split(100)]
    return torch.cat(drawn).sum(-1)


def pixel_agreement(objects: FoundObjects, options: Options) -> dict[str, Numbers]:
    """Return the agreement of `multi-mnist` objects with true masks of three sizes.

    The scenes are the first ones of the test set. `ari_with_ground` is the foreground ARI of
    `FoundObjects.numbers`, where a pixel may belong to the ground. `ari_objects_alone` is the
    foreground ARI of `owners`, where it may not. `given_to_ground` is the fraction of the pixels of
    true digits that `numbers` assigns to the ground.
    """
    rows: dict[str, Numbers] = {}
    for ink in INKS:
        data = load_dataset(f"multi-mnist:train=20,ink={ink}", options.data_root)
        truth = data.test[: len(objects.numbers)].objects
        row = rows[f"ink_{100 * ink:.0f}"] = {}
        of_pixels = {"ari_with_ground": objects.numbers, "ari_objects_alone": objects.owners}
        for quantity, owners in of_pixels.items():
            index = foreground_ari(owners, truth)
            row[quantity] = mean_and_error(index[~index.isnan()])
        true = truth.numbers > 0
        lost = true & (objects.numbers == 0)
        row["given_to_ground"] = ratio(lost.sum((1, 2)).double(), true.sum((1, 2)).double())
    return group_by_quantity(rows)


def accuracy_by_number(answers: Mapping[str, Tensor]) -> dict[str, Numbers]:
    """Return the fraction of right counts for every true number, by inference method.

    Args:
        answers: by method, for each scene the true number, the probability of all numbers except
            the most likely one, and 1 if the most likely one is right, (3, N).
    """
    return {
        name: {f"{n:.0f}": mean_and_error(right[true == n]) for n in true.unique().tolist()}
        for name, (true, _, right) in answers.items()
    }


def bin_by_doubt(doubt: Tensor, wrong: Tensor) -> Numbers:
    """Return the fraction of wrong counts by the mean doubt of each bin that holds scenes.

    Most scenes leave no doubt, so that a bin spans two decades. A standard error is of the fraction
    with one right and one wrong count more, so that it is above zero where all are right.

    Args:
        doubt: probability of all numbers except the most likely one, (N,).
        wrong: 1 where the most likely number is wrong, (N,).
    """
    rows: Numbers = {}
    index = torch.bucketize(doubt, doubt.new_tensor(DOUBTS))
    for number in index.unique():
        inside, mean = wrong[index == number], doubt[index == number].mean().clamp_min(1e-9).item()
        fraction = (inside.sum().item() + 1) / (len(inside) + 2)
        error = (fraction * (1 - fraction) / (len(inside) + 3)) ** 0.5
        rows[f"{mean:.3g}"] = inside.mean().item(), error, len(inside)
    return rows


def figures_of(answers: Mapping[str, Tensor]) -> dict[str, Figure]:
    """Plot the counts by true number, and their reliability; see `accuracy_by_number`."""
    kinds: dict[str, dict[str, Numbers]] = {}
    for name, (true, doubt, right) in answers.items():
        trained = true <= MAX_TRAINED_DIGITS
        for kind, here in {"0 to 2 digits": trained, "3 to 5 digits": ~trained}.items():
            kinds.setdefault(kind, {})[name] = bin_by_doubt(doubt[here], 1 - right[here])
    fractions = counts_by_number(accuracy_by_number(answers), MAX_TRAINED_DIGITS)
    return {"by_number": fractions, "reliability": counts_reliability(kinds)}
