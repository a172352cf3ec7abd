"""How many digits a scene has: by training time, with more digits, in three readings, beside AIR.

A public program of AIR, addtt/attend-infer-repeat-pytorch, counts .983 of scenes of 0 to 2 digits
right. With 3 digits AIR fails unless its form is changed (Eslami et al. 2016, section 3.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, experiment, train
from capsule_zoo.experiments.common.findings import mean_and_error, single, with_worst
from capsule_zoo.inference import Check, Checks, FoundObjects, evaluate, find_objects, summarize
from capsule_zoo.records import Number
from capsule_zoo.registry import Entry
from capsule_zoo.zoo.scenes.entry import on_canvas
from capsule_zoo.zoo.scenes.figures import counts_against_time

DATA = "multi-mnist:train=60000"
PUBLISHED = 0.983  # of the counts; the public program
EARLY = 300.0  # seconds of the first of the two measurements
MORE = (3, 4, 5)  # digits
LARGE = (80, 80, 7)  # height, width and slots of scenes of more digits
PLACES = 0.1  # temperature of the places of attention


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
    `count_accuracy_5_minutes` is the last measurement within five minutes of a run, and
    `count_accuracy_30_minutes` the one at the end of the run, which is shorter than 30 minutes.
    `..._worst` are those of the worst seed. `elbo` and `iwae_100` are in nats an image.
    """
    outcomes = Study({"scenes": chosen}, chosen.seeds).run(one_seed, options)["scenes"]
    numbers = [outcome["numbers"] for outcome in outcomes]
    found: dict[str, Any] = with_worst(numbers, "count_accuracy_*")
    right = {n: found.pop(n) for n in list(found) if n.startswith("count_accuracy_")}
    found["count_accuracy"] = {n.removeprefix("count_accuracy_"): v for n, v in right.items()}
    curves = [shares_of(outcome["curve"]) for outcome in outcomes]
    return Result(found, {"": counts_against_time(curves, PUBLISHED)})


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
    early = [row[2] for row in curve if row[0] <= EARLY]
    seen = summarize(
        evaluate(entry.model, entry.guide, test.images[: settings.bounds], num_particles=100)
    )
    number = int(seen["num_images"])
    numbers: dict[str, Number] = {
        "count_accuracy_5_minutes": early[-1] if early else curve[0][2],
        "count_accuracy_30_minutes": curve[-1][2],
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
