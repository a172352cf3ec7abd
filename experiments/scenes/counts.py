"""How many digits a scene has: by training time, with more digits, in three readings, beside AIR.

A public program of AIR, addtt/attend-infer-repeat-pytorch, counts .983 of scenes of 0 to 2 digits
right. With 3 digits AIR fails unless its form is changed (Eslami et al. 2016, section 3.1).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, experiment, train
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    calibration_error,
    mean_and_error,
    ratio,
    single,
    with_worst,
)
from capsule_zoo.experiments.scenes.air import TutorialAir
from capsule_zoo.guides import Peeling
from capsule_zoo.guides.scenes.proposals import Found
from capsule_zoo.inference import (
    Check,
    Checks,
    FoundObjects,
    Pace,
    evaluate,
    find_objects,
    summarize,
)
from capsule_zoo.inference.evaluation.objects import foreground_ari
from capsule_zoo.models.common.modes import in_eval_mode, seeded
from capsule_zoo.models.common.spaces import tiled
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry, load
from capsule_zoo.zoo.scenes.entry import on_canvas
from capsule_zoo.zoo.scenes.figures import (
    counts_against_time,
    counts_by_number,
    counts_reliability,
    found_objects,
)

DATA = "multi-mnist:train=60000"
APART = "multi-mnist:canvas=60,most=3,train=60000"
OVERLAPPING = "multi-mnist:canvas=60,most=3,overlap=1,train=60000"
SHARPER = 0.2  # deviation of a pixel; at .3 one object for two digits costs too few nats
BESIDE_AIR = "multi-mnist:train=30000"
MARKS = (1, 2, 3, 5, 8, 12, 20, 30, 60)  # minutes
WEIGHTS = "scenes-mnist"
PUBLISHED = 0.983  # of the counts; the public program
EARLY = 300.0  # seconds of the first of the two measurements
DOUBTS = (1e-8, 1e-6, 1e-4, 1e-2)  # probabilities between bins of doubt
SEEN = 2  # most digits of a scene that was trained on
MORE = (3, 4, 5)  # digits
LARGE = (80, 80, 7)  # height, width and slots of scenes of more digits
PLACES = 0.1  # temperature of the places of attention
INKS = (0.5, 0.3, 0.1)  # brightness above which a pixel is in the mask of a true digit
NEAR = 2  # pixels about the strokes of a digit that belong to them too


@dataclass(frozen=True)
class Settings:
    """The settings of the experiment.

    Args:
        seeds: number of seeds.
        length: minutes of training of each seed, of the processor.
        every: updates between two measurements.
        draws: draws of the guide that are combined for a count.
        tested: test scenes whose objects are counted.
        bounds: test scenes whose log p is bounded.
        more: test scenes of every larger number of digits.
        sizes: sizes of the entry that replace the zoo's own.
    """

    seeds: int = 5
    length: float = 12.0
    every: int = 1500
    draws: int = 10
    tested: int = 2000
    bounds: int = 500
    more: int = 500
    sizes: Any = None


@experiment("scenes/counts", data="multi-mnist", minutes=60)
def counts(options: Options, chosen: Settings) -> Result:
    """Count digits after minutes of training, and more digits than were seen (60 core-minutes).

    The guide learns with attention at one place, where most is unexplained, and counts at places
    that it draws.
    `count_accuracy_5_minutes` is the last measurement within five minutes of a run; there is none
    where a seed was not measured by then. `count_accuracy_30_minutes` is the one at the end of the
    run, which is shorter than 30 minutes. `..._worst` are those of the worst seed. `elbo` and
    `iwae_100` are in nats an image.
    """
    outcomes = Study({"scenes": chosen}, chosen.seeds).run(one_seed, options)["scenes"]
    numbers = [outcome["numbers"] for outcome in outcomes]
    found: dict[str, Any] = with_worst(numbers, "count_accuracy_*")
    right = {n: found.pop(n) for n in list(found) if n.startswith("count_accuracy_")}
    found["count_accuracy"] = {n.removeprefix("count_accuracy_"): v for n, v in right.items()}
    curves = [shares_of(outcome["curve"]) for outcome in outcomes]
    return Result(found, {"": counts_against_time(curves, PUBLISHED)})


def last_within(
    curve: Sequence[tuple[float, int, Number]], seconds: float = math.inf
) -> Number | None:
    """Return the last measurement of a curve within some seconds; None if there is none."""
    return next((number for passed, _, number in reversed(curve) if passed <= seconds), None)


def shares_of(curve: Sequence[tuple[float, int, Number]]) -> list[tuple[float, int, float]]:
    """Return a curve without the errors of its shares."""
    return [(seconds, updates, number[0]) for seconds, updates, number in curve]


def one_seed(job: Job[Settings]) -> dict[str, Any]:
    """Train and measure one seed."""
    settings, options = job.variant, job.options
    data = load_dataset(DATA, options.data_root)
    entry = begun("scenes", data, options, **{"counts": "learned", **(settings.sizes or {})})
    test = data.test[: settings.tested]
    curve: list[tuple[float, int, Number]] = []
    how: dict[str, Any] = dict(draws=settings.draws, temperature=PLACES)

    def note(check: Check) -> None:
        curve.append((check.seconds, check.step, accuracy(entry, test, **how)))

    checks = Checks(every=settings.every, callbacks=[note], clock="processor")
    train(entry, data, options, options.minutes or settings.length, checks=checks)
    seen = summarize(
        evaluate(entry.model, entry.guide, test.images[: settings.bounds], num_particles=100)
    )
    number = int(seen["num_images"])
    accuracies = {"5_minutes": last_within(curve, EARLY), "30_minutes": last_within(curve)}
    numbers: dict[str, Number] = {
        **{f"count_accuracy_{n}": value for n, value in accuracies.items() if value is not None},
        "elbo": (seen["elbo"], seen["elbo_se"], number),
        "iwae_100": (seen["iwae"], seen["iwae_se"], number),
        "steps": single(curve[-1][1]),
        "seconds": single(curve[-1][0]),
    }
    wide = on_canvas(entry, *LARGE)
    for digits in MORE:
        scenes = with_digits(digits, settings.more, options)
        numbers[f"count_accuracy_{digits}_digits"] = accuracy(wide, scenes, **how)
    return {"numbers": numbers, "curve": curve}


def accuracy(entry: Entry, scenes: Split, **how: Any) -> Number:
    """Return the share of the scenes whose number of objects, by `find_objects`, is right."""
    found = find_objects(entry.model, entry.guide, scenes.images, **how)
    return mean_and_error(right_counts(found, scenes))


def right_counts(found: FoundObjects, scenes: Split) -> Tensor:
    """Return 1 for every scene whose number of objects is right, and 0 for the others, (N,)."""
    return (found.counts == scenes.objects.counts).float()


def with_digits(number: int, test: int, options: Options) -> Split:
    """Return scenes of exactly this many digits on 80x80 pixels."""
    name = f"multi-mnist:canvas=80,least={number},most={number},train=20,test={test}"
    return load_dataset(name, options.data_root).test


def ways(entry: Entry) -> dict[str, Entry]:
    """Return the entry with each way of reading; the parameters are shared."""
    guide = entry.guide_of(Peeling)
    again, drawn = guide.sharing_parameters(sweeps=2), guide.sharing_parameters(temperature=PLACES)
    return {
        "peeling": entry,
        "two_sweeps": replace(entry, guide=again),
        "drawn_places": replace(entry, guide=drawn),
    }


@experiment("scenes/reading", data="multi-mnist", of_runs=True)
def reading(options: Options, *, scenes: int = 2000, more: int = 500, draws: int = 10) -> Result:
    """Count the digits of test scenes in three ways, and tell whose the pixels are (24 minutes).

    The model is that of --run, or of the weights `scenes-mnist`. `count_accuracy_one_draw` is of
    one sample of the guide's presences. `count_confidence` is the mean probability of the most
    likely number, and `count_calibration` the mean distance between this probability and the share
    of scenes in which the number is right, within ten bins of probability. `ari_...` compares the
    pixels of what is found at drawn places with three true masks; see `pixel_agreement`.

    Args:
        scenes: test scenes of 0 to 2 digits.
        more: test scenes of 3, 4 and 5 digits, each, on 80x80 pixels with seven slots.
        draws: draws of the guide that are combined.
    """
    entry = load(options.run or WEIGHTS)
    sets = {"": (entry, load_dataset("multi-mnist:train=20", options.data_root).test[:scenes])}
    for number in MORE:
        sets[f"_{number}_digits"] = on_canvas(entry, *LARGE), with_digits(number, more, options)
    found: dict[str, Any] = {}
    answers: dict[str, list[Tensor]] = {}
    for suffix, (pair, test) in sets.items():
        for name, way in ways(pair).items():
            options.say(f"Counting by {name}{suffix.replace('_', ' ')}")
            read = find_objects(way.model, way.guide, test.images, draws=draws)
            right, chances = right_counts(read, test), read.count_probabilities
            highest, numbers = chances.amax(1), {"count_accuracy": mean_and_error(right)}
            numbers["count_confidence"] = mean_and_error(highest)
            apart = calibration_error(highest, right)
            numbers["count_calibration"] = single(apart, len(right))
            if not suffix:
                drawn = drawn_counts(way, test) == test.objects.counts
                numbers["count_accuracy_one_draw"] = mean_and_error(drawn.float())
                if name == "drawn_places":
                    found["true pixels above"] = Table(pixel_agreement(read, options))
            for quantity, value in numbers.items():
                found.setdefault(quantity + suffix, {})[name] = value
            doubt = chances.scatter(1, read.counts[:, None], 0).sum(1)
            own = torch.stack([test.objects.counts.float(), doubt, right])
            answers.setdefault(name, []).append(own)
    together = {name: torch.cat(own, 1) for name, own in answers.items()}
    for name, shares in by_number(together).items():
        for number in range(SEEN + 1):
            if f"{number}" in shares:
                found.setdefault(f"count_accuracy_{number}_digits", {})[name] = shares[f"{number}"]
    return Result(found, figures_of(together))


@torch.no_grad()
def drawn_counts(entry: Entry, scenes: Split) -> Tensor:
    """Sample the presences of scenes once from the guide, and return their numbers (N,)."""
    with seeded(0), in_eval_mode(entry.guide):
        drawn = [entry.guide(images) for images in scenes.images.split(100)]
    return torch.cat(drawn).sum(-1)


def pixel_agreement(found: FoundObjects, options: Options) -> dict[str, Numbers]:
    """Return how well objects of `multi-mnist` scenes agree with true masks of three sizes.

    The scenes are the first ones of the test set. `ari_with_ground` is the foreground ARI of
    `FoundObjects.numbers`, for which the ground is an answer, and `ari_objects_alone` that of
    `owners`, for which it is none. `given_to_ground` is the share of the pixels of true digits that
    `numbers` gives to the ground.
    """
    rows: dict[str, Numbers] = {}
    for ink in INKS:
        data = load_dataset(f"multi-mnist:train=20,ink={ink}", options.data_root)
        known = data.test[: len(found.numbers)].objects
        row = rows[f"ink_{100 * ink:.0f}"] = {}
        for quantity, owners in (("with_ground", found.numbers), ("objects_alone", found.owners)):
            index = foreground_ari(owners, known)
            row[f"ari_{quantity}"] = mean_and_error(index[~index.isnan()])
        true = known.numbers > 0
        lost = true & (found.numbers == 0)
        row["given_to_ground"] = ratio(lost.sum((1, 2)).double(), true.sum((1, 2)).double())
    return by_quantity(rows)


def by_number(answers: Mapping[str, Tensor]) -> dict[str, Numbers]:
    """Return the share of right counts for every true number, by way to read.

    Args:
        answers: by way, for each scene the true number, the probability of all numbers but the
            most likely one, and 1 if that one is right, (3, N).
    """
    return {
        name: {f"{n:.0f}": mean_and_error(right[true == n]) for n in true.unique().tolist()}
        for name, (true, _, right) in answers.items()
    }


def by_doubt(doubt: Tensor, wrong: Tensor) -> Numbers:
    """Return the share of wrong counts by the mean doubt of each bin that holds scenes.

    Most scenes leave no doubt, so that bins are of two decades. An error is that of the share with
    one right and one wrong count more, so that it is above zero where all are right.

    Args:
        doubt: probability of all numbers but the most likely one, (N,).
        wrong: 1 where that one is wrong, (N,).
    """
    found: Numbers = {}
    index = torch.bucketize(doubt, doubt.new_tensor(DOUBTS))
    for number in index.unique():
        own, mean = wrong[index == number], doubt[index == number].mean().clamp_min(1e-9).item()
        share = (own.sum().item() + 1) / (len(own) + 2)
        error = (share * (1 - share) / (len(own) + 3)) ** 0.5
        found[f"{mean:.3g}"] = own.mean().item(), error, len(own)
    return found


def figures_of(answers: Mapping[str, Tensor]) -> dict[str, Figure]:
    """Draw the counts by true number, and their reliability; see `by_number`."""
    kinds: dict[str, dict[str, Numbers]] = {}
    for name, (true, doubt, right) in answers.items():
        for kind, here in (("0 to 2 digits", true <= SEEN), ("3 to 5 digits", true > SEEN)):
            kinds.setdefault(kind, {})[name] = by_doubt(doubt[here], 1 - right[here])
    shares = counts_by_number(by_number(answers), SEEN)
    return {"by_number": shares, "reliability": counts_reliability(kinds)}


@experiment("scenes/overlap", data="multi-mnist", minutes=200)
def overlap(
    options: Options,
    *,
    seeds: int = 5,
    apart: float = 20.0,
    length: float = 10.0,
    draws: int = 50,
    sizes: Any = None,
) -> Result:
    """Count 0 to 3 digits that may hide each other, in three ways (200 core-minutes).

    Objects are first learned from scenes in which digits stand apart, because two digits that lie
    on each other are else learned as one object. Then pixels deviate by .2, before by .3.
    `..._worst` is that of the worst seed, and `preferred_wrong` the share of the wrong counts that
    the model itself prefers to the true ones.

    Args:
        seeds: number of seeds.
        apart: minutes of training on scenes in which digits stand apart, of the processor.
        length: minutes of training on scenes in which they may hide each other, of the processor.
        draws: draws of the guide that are combined.
        sizes: sizes of the entry that replace ours.
    """
    study = Study({"overlap": (apart, length)}, seeds)
    outcomes = study.run(one_overlap, options, draws=draws, sizes=sizes)["overlap"]
    by_way = {way: [outcome[way] for outcome in outcomes] for way in outcomes[0]}
    rows = {way: with_worst(found, "count_accuracy") for way, found in by_way.items()}
    first = load(study.folders(options)["overlap"])
    test = load_dataset(OVERLAPPING, options.data_root).test
    return Result(by_quantity(rows), {"": found_objects(first, test.images)})


@torch.no_grad()
def preferred_wrong(
    entry: Entry, scenes: Split, draws: int, found: FoundObjects | None = None
) -> Number:
    """Return the share of wrongly counted scenes in which the model prefers the wrong number.

    It prefers it if log p(image, wrong number), found by the guide, exceeds log p(image, true
    number), found from the true places. Both are of so many draws; see `log_evidence_of_truth`.
    What is left are scenes that the guide alone gets wrong. The share is 0 if no count is wrong.

    Args:
        entry: scenes with `Peeling` as their guide.
        scenes: scenes with their objects, no more than the model has slots.
        draws: draws of the guide that are combined.
        found: what the guide found in these scenes; by default they are read here, which takes
            nearly all of the time.
    """
    found = found or find_objects(entry.model, entry.guide, scenes.images, draws=draws)
    wrong = right_counts(found, scenes) == 0
    if not wrong.any():
        return single(0.0)
    told = (found.log_evidence + found.count_probabilities.amax(1).log())[wrong]
    given = log_evidence_of_truth(entry, scenes[wrong], draws)
    return mean_and_error((told > given).float())


@torch.no_grad()
def log_evidence_of_truth(entry: Entry, scenes: Split, draws: int, seed: int = 0) -> Tensor:
    """Estimate log p(image, true number) of scenes from the true places, (N,), in nats.

    For each digit the guide looks at a picture of its ink alone: the pixels that it shows, and
    those within `NEAR` of them that no other digit shows. As in every count, one choice of slots
    stands for all that are equal.

    Args:
        entry, scenes, draws: see `preferred_wrong`.
    """
    guide, known, logs = entry.guide_of(Peeling), scenes.objects, []
    most, slots = known.classes.shape[1], entry.model.slots
    alone = guide.on_model(entry.model.with_slots(1))
    near = F.max_pool2d(known.masks.float(), 2 * NEAR + 1, stride=1, padding=NEAR)
    near = near * ((known.numbers == 0)[:, None] | known.masks)
    with seeded(seed):
        for images, masks, classes in zip(
            *(x.split(20) for x in (scenes.images, near, known.classes)), strict=True
        ):
            inks = [tiled(images * masks[:, slot, None], draws) for slot in range(most)]
            proposals = [alone.found(ink).proposals[0] for ink in inks]
            proposals += proposals[-1:] * (slots - most)
            copies = tiled(images, draws)
            on = tiled(F.pad((classes >= 0).to(images), (0, slots - most)), draws)[:, None]
            weight = guide.log_weights(copies, Found(proposals, guide.backdrop(copies)), on)
            logs.append(weight.unflatten(0, (draws, len(images))).logsumexp(0)[:, 0])
    return torch.cat(logs) - math.log(draws)


def one_overlap(
    job: Job[tuple[float, float]], *, draws: int, sizes: Any
) -> dict[str, dict[str, Number]]:
    """Train on digits that stand apart, then on those that may not, and count by every way."""
    (apart, length), options, busy = job.variant, job.options, Checks(clock="processor")
    own = {"slots": 4, "counts": "learned", **(sizes or {})}
    alone = load_dataset(APART, options.data_root)
    before = begun("scenes", alone, options, **own)
    train(before, alone, options, apart, name="apart", checks=busy)
    data = load_dataset(OVERLAPPING, options.data_root)
    entry = begun("scenes", data, options, **{"sigma_image": SHARPER, **own})
    for part in ("model", "guide", "objective"):
        getattr(entry, part).load_state_dict(getattr(before, part).state_dict())
    train(entry, data, options, length, checks=busy)
    test, found = data.test, {}
    sets = {"": test.labels >= 0, **{f"_{n}_digits": test.labels == n for n in range(4)}}
    for name, way in ways(entry).items():
        read = find_objects(way.model, way.guide, test.images, draws=draws)
        right = right_counts(read, test)
        numbers = {suffix: mean_and_error(right[chosen]) for suffix, chosen in sets.items()}
        found[name] = {f"count_accuracy{suffix}": number for suffix, number in numbers.items()}
        found[name]["preferred_wrong"] = preferred_wrong(way, test, draws, read)
    return found


class Curve(list[tuple[float, int, Number]]):
    """Measurements (processor seconds, updates, share of right counts); measuring takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = time.process_time()

    def note(self, updates: int, measure: Callable[[], Number]) -> float:
        """Measure after a number of updates, and return the minutes that they took."""
        seconds = time.process_time() - self.begun
        self.append((seconds, updates, measure()))
        self.begun = time.process_time() - seconds
        return seconds / 60


@experiment("scenes/beside-air", data="multi-mnist", minutes=17)
def beside_air(
    options: Options, *, ours: float = 5.0, air: float = 12.0, every: int = 200, tested: int = 1000
) -> Result:
    """Train scenes and AIR, as Pyro's tutorial has it, and count digits meanwhile (17 minutes).

    Seconds are of the processor. One draw of each guide counts the digits of a scene.

    Args:
        ours, air: minutes of the processor for each.
        every: updates between two measurements.
        tested: test scenes whose digits are counted.
    """
    study = Study({"scenes": (ours, every, tested), "air": (air, every, tested)})
    curves = {name: curve for name, (curve,) in study.run(curve_of, options).items()}
    found: dict[str, Any] = {}
    for name, curve in curves.items():
        for mark in MARKS:
            last = last_within(curve, 60 * mark)
            if last is not None and curve[-1][0] > 54 * mark:
                found.setdefault(f"count_accuracy_{mark}_minutes", {})[name] = last
        found.setdefault("updates", {})[name] = single(curve[-1][1])
        found.setdefault("seconds", {})[name] = single(curve[-1][0])
    lines = [shares_of(curve) for curve in curves.values()]
    return Result(found, {"": counts_against_time(lines, PUBLISHED, list(curves))})


def curve_of(job: Job[tuple[float, int, int]]) -> Curve:
    """Train one of the two, and return its measurements."""
    (minutes, every, tested), options, curve = job.variant, job.options, Curve()
    data = load_dataset(BESIDE_AIR, options.data_root)
    test = data.test[:tested]
    if job.name == "scenes":
        entry = begun("scenes", data, options, counts="learned")
        counts = partial(accuracy, entry, test, draws=1)
        checks = Checks(every=every, callbacks=[lambda c: curve.note(c.step, counts) >= minutes])
        how: dict[str, Any] = dict(steps=10**6, pace=Pace("constant"), checks=checks)
        train(entry, data.train, replace(options, runs=None), **how)  # the curve would be lost
        return curve
    pyro.set_rng_seed(options.seed)
    network, images = TutorialAir(data.image_shape[-1]), data.train.images

    @torch.no_grad()
    def counted() -> Number:
        with seeded(0):
            found = torch.cat([network.guide(some) for some in test.images.split(100)])
        return mean_and_error((found == test.objects.counts).float())

    svi, updates, passed = network.svi(), 0, 0.0
    while passed < minutes:
        for _ in range(every):
            svi.step(images[torch.randint(len(images), (64,))])
        updates += every
        passed = curve.note(updates, counted)
    return curve
