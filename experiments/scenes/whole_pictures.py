"""Counts of many objects on whole pictures, learned from the pictures without labels.

Two real pictures, each the only training data of its model: coins (`scikit-image`, 24 coins) and
nuclei (`mahotas`, 61 by eye). Composed pictures of 20 to 60 digits on 300x300 pixels: the model is
trained on tiles of pictures of MNIST's training digits, and reads pictures of its test digits.
"""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from capsule_zoo.data import Dataset, Split
from capsule_zoo.data.composed_pictures import composed_digits
from capsule_zoo.data.leveling import fit_leveling
from capsule_zoo.data.sources import data_folder
from capsule_zoo.data.tiles import SETTINGS, TILE, tiles_of_pictures
from capsule_zoo.data.whole_pictures import read_whole_picture
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import (
    group_by_quantity,
    mean_and_error,
    over_seeds,
    single,
)
from capsule_zoo.experiments.scenes.threshold_baselines import score_baselines
from capsule_zoo.figures.grids import panels
from capsule_zoo.inference import Checks
from capsule_zoo.inference.counting import circle_overlaps, interval_coverage, score_centers
from capsule_zoo.inference.objects import foreground_ari
from capsule_zoo.inference.whole_pictures import read_pictures
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry, load
from capsule_zoo.zoo.scenes.figures import outlined_objects

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = ("coins", "nuclei")
DIGITS: dict[str, Any] = dict(  # whole digits, and not their strokes, are the objects
    size_distribution="given", size_spread=0.1, slots=4, thing_settings=dict(latent=20)
)
LEVELED = 50  # pictures on which a leveling is fitted
LENGTH = 5.0  # minutes of the processor for a run on a real picture
TILES = 4000  # training tiles of a real picture
TRAINING_PICTURES = 500  # pictures of digits that train
TEST_PICTURES = 30  # test pictures of 20 to 60 digits
INTERVAL_PICTURES = 200  # test pictures of 5 to 15 digits, whose intervals are checked
LONGER = 4  # times as many tiles of digits, and minutes, as of a real picture
SOURCE = "mnist"  # data set of the digits
NEAR = {"coins": 30.0, "nuclei": 30.0, "digits": 9.0}  # pixels between matched centers, at most


@experiment("scenes/whole-pictures", data="mnist", minutes=60)
def whole_pictures(options: Options, *, seeds: int = 3) -> Result:
    """Count coins, nuclei and digits on whole pictures (over an hour of one core).

    `..._error_worst` is the largest difference from the true number over seeds. Precision, recall
    and overlaps (IoU) are those of the worst seed. `digits_error` is the mean difference relative
    to the true number, `digits_ari` the Rand index of the digits' pixels, `interval_coverage` the
    fraction of 200 pictures whose interval with probability .9 holds the true number, and
    `interval_expected` its mean probability. `seconds` is the time in which a core reads the
    picture of nuclei, and `cost_exponent` how time grows with the area: 1 is linear. The tables
    have the counts of thresholds and of a watershed.

    Args:
        seeds: number of seeds.
    """
    study = Study(dict.fromkeys((*PICTURES, "digits")), seeds)
    outcomes = study.run(one_picture, options)
    real: dict[str, Numbers] = {}
    for name in PICTURES:
        runs = outcomes[name]
        numbers = {"error_worst": single(max(abs(r["error"][0]) for r in runs), len(runs))}
        for quantity in ("precision", "recall", "iou"):
            if quantity in runs[0]:
                least = min(run[quantity][0] for run in runs)
                numbers[quantity] = single(least, len(runs))
        real[name] = numbers | over_seeds([{"count": r["count"]} for r in runs])
    table = Table(group_by_quantity(real), "{variant}_{quantity}")
    metrics: dict[str, Any] = {"real pictures": table}
    metrics["seconds"] = single(max(run["seconds"][0] for run in outcomes["nuclei"]))
    metrics["cost_exponent"] = single(max(run["exponent"][0] for run in outcomes["nuclei"]))
    metrics |= over_seeds(outcomes["digits"])
    folders = study.folders(options)
    figures = {name: draw_picture(load(folders[name]), name) for name in PICTURES}
    return Result({**metrics, **baselines()}, figures)


def one_picture(job: Job) -> dict[str, Number]:
    """Train on one real picture, or on composed pictures, and measure what is read."""
    name = job.name
    if name == "digits":
        return digits(job)
    picture = read_whole_picture(name, 1.0)
    entry = train_on([picture.image], job, LENGTH, TILES)
    began = time.process_time()
    (objects,) = read_pictures(entry.model, entry.guide, [picture.image])
    seconds = time.process_time() - began
    scores = score_centers(objects.centers, picture.centers, NEAR[name])
    numbers = {
        "count": single(objects.count),
        "error": single(objects.count - len(picture.centers)),
        "precision": single(scores.precision, scores.number),
        "recall": single(scores.recall, len(picture.centers)),
        "seconds": single(seconds),
    }
    if not picture.radii.isnan().any():
        overlaps = circle_overlaps(objects.numbers, picture.centers, picture.radii)
        numbers["iou"] = mean_and_error(overlaps)
    if name == "nuclei":
        numbers["exponent"] = single(cost_exponent(entry, picture.image))
    return numbers


def cost_exponent(entry: Entry, image: Tensor) -> float:
    """Return e for which the time of reading grows as the area to the e, from four copies.

    Of each size the faster of two readings counts.
    """
    large = torch.cat([torch.cat([image, image.flip(2)], 2)] * 2, 1)
    times: dict[int, list[float]] = {1: [], 4: []}
    for _ in range(2):
        for area, picture in ((1, image), (4, large)):
            began = time.process_time()
            read_pictures(entry.model, entry.guide, [picture])
            times[area].append(time.process_time() - began)
    return math.log(min(times[4]) / min(times[1]), 4)


def digits(job: Job) -> dict[str, Number]:
    """Train on composed pictures of digits, and measure numbers, pixels and intervals."""
    root, seed = data_folder(job.options.data_root), job.options.seed
    composed = composed_digits(root, "train", TRAINING_PICTURES, of=SOURCE, seed=seed)
    pictures = [composed[k].image for k in range(TRAINING_PICTURES)]
    entry = train_on(pictures, job, LONGER * LENGTH, LONGER * TILES, **DIGITS)
    tests = composed_digits(root, "test", TEST_PICTURES, of=SOURCE)
    truth = [tests[k] for k in range(TEST_PICTURES)]
    results = read_pictures(entry.model, entry.guide, [t.image for t in truth])
    errors = [
        abs(r.count - len(t.centers)) / len(t.centers) for r, t in zip(results, truth, strict=True)
    ]
    aris = [foreground_ari(r.owners[None], t.objects) for r, t in zip(results, truth, strict=True)]
    canvas: dict[str, Any] = dict(canvas=(150, 150), least=5, most=15, seed=1)
    small = composed_digits(root, "test", INTERVAL_PICTURES, of=SOURCE, **canvas)
    truth = [small[k] for k in range(INTERVAL_PICTURES)]
    posteriors = read_pictures(entry.model, entry.guide, [p.image for p in truth])
    true = [len(p.centers) for p in truth]
    coverage = interval_coverage([p.count_probabilities for p in posteriors], true)
    error = math.sqrt(coverage.covered * (1 - coverage.covered) / len(true))  # of a fraction
    right = [float(p.count == n) for p, n in zip(posteriors, true, strict=True)]
    return {
        "digits_error": mean_and_error(errors),
        "digits_ari": mean_and_error(torch.cat(aris)),
        "interval_coverage": (coverage.covered, error, len(true)),
        "interval_expected": single(coverage.expected, len(true)),
        "digits_right": mean_and_error(right),
    }


def train_on(
    pictures: Sequence[Tensor], job: Job, length: float, number: int, **different: Any
) -> Entry:
    """Train the entry `scenes` on tiles of pictures (C, H, W).

    Args:
        length: minutes of the processor, unless the options limit them.
        number: number of tiles.
        different: settings of the entry that differ from `data.tiles`.
    """
    options = job.options
    leveling = fit_leveling(pictures[:LEVELED])
    leveled = [leveling(picture) for picture in pictures]
    tiles = tiles_of_pictures(leveled, TILE, number, seed=options.seed)
    data = Dataset(job.name, Split(tiles[100:]), Split(tiles[:50]), Split(tiles[50:100]))
    sizes = {**SETTINGS, **different, "leveling": leveling}
    entry = create_untrained("scenes", data, options, **sizes)
    minutes, checks = options.minutes or length, Checks(clock="processor")
    train(entry, data, options, minutes, batch_size=24, checks=checks)
    return entry


def baselines() -> dict[str, Numbers]:
    """Return what thresholds and a watershed count on each picture, by origin of their settings."""
    tables: dict[str, Numbers] = {}
    for picture, row, scores in score_baselines():
        for quantity in ("number", "precision", "recall"):
            value = single(getattr(scores.centers, quantity))
            tables.setdefault(f"{picture}_baseline_{quantity}", {})[row] = value
    return tables


def draw_picture(entry: Entry, name: str) -> "Figure":
    """Draw a picture next to its objects, each in a color."""
    picture = read_whole_picture(name, 1.0).image
    (objects,) = read_pictures(entry.model, entry.guide, [picture])
    figure, (axes,) = panels(2, size=(2.5, 0.3 + 2.5 * picture.shape[1] / picture.shape[2]))
    brightest = float(picture.flatten().kthvalue(int(0.995 * picture.numel())).values)
    axes[0].imshow(picture[0], cmap="gray", vmin=0, vmax=brightest)
    axes[1].imshow(outlined_objects(picture, objects.numbers).movedim(0, -1))
    titles = (name, f"{objects.count} objects, each in a color")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title)
        axis.set_axis_off()
    return figure
