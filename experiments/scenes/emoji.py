"""Counts of emoji of kinds that were never seen, on plain grounds and on photographs.

The pictures are composed: 0 to 3 emoji of 18 pixels, in their own colors, on 48x48 pixels. Four
fifths of the kinds train, and one fifth is counted. The art is fetched by `tools/emoji.py`. No
model is trained on photographs, where objects would learn to paint the ground around their shapes.
"""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsule_zoo.data import Dataset, Split
from capsule_zoo.data.composed_pictures import composed_emoji, photographs
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import (
    group_by_quantity,
    mean_and_error,
    single,
    with_worst,
)
from capsule_zoo.inference import Checks
from capsule_zoo.inference.whole_pictures import read_pictures
from capsule_zoo.records import Number, Table
from capsule_zoo.registry import Entry

GROUNDS = {"plain": ("plain", "color"), "photographs": ("smooth", "picture")}
SIZES: dict[str, Any] = dict(
    counts="poisson",
    rate=0.3,
    texture=True,
    size=24.0,
    window=22,
    slots=3,
    sigma_image=0.15,
    thing_settings=dict(latent=32, channels=16),
)
POWERS = (1.0, 0.5, 0.35)  # powers of the likelihood, of which validation pictures choose one
SWEEPS = (1, 0)  # numbers of sweeps of a reading, of which they choose one too
TRAINING_PICTURES, TEST_PICTURES = 12_000, 250  # of training kinds, and of other kinds
VALIDATION = 1000  # the seed of the validation pictures


@experiment("scenes/emoji", data="digits", minutes=60)
def emoji(
    options: Options,
    *,
    pictures: str = "emoji",
    seeds: int = 3,
    length: float = 10.0,
    validated: int = 100,
) -> Result:
    """Count emoji of new kinds on plain grounds and on photographs (over an hour of one core).

    Models are trained on plain grounds, and those that read photographs on smooth ones; their own
    ground is a color, or a smooth picture. `count_accuracy_...` is the fraction of test pictures
    whose number is right, `..._worst` that of the worst seed, `too_few_...` and `too_many_...` the
    fractions of the others, all with the power of the likelihood and the number of sweeps that are
    best on validation pictures. `count_accuracy_measured_...` is as pictures are read by default:
    with the power that is measured in each, and one sweep. Validation pictures show training kinds,
    on other photographs than test pictures.

    Args:
        pictures: the folder that `python tools/emoji.py FOLDER` writes.
        seeds: number of seeds.
        length: training time of each run, in minutes of the processor.
        validated: pictures of training kinds that choose how test pictures are read.
    """
    study, arguments = Study(GROUNDS, seeds), dict(folder=pictures, validated=validated)
    outcomes = study.run(one_ground, options, length=length, **arguments)
    rows = {name: with_worst(runs, "count_accuracy") for name, runs in outcomes.items()}
    return Result({"": Table(dict(sorted(group_by_quantity(rows).items())))})


def one_ground(
    job: Job[tuple[str, str]], *, length: float, folder: str, validated: int
) -> dict[str, Number]:
    """Train on pictures of training kinds, and count emoji of other kinds on one sort of ground."""
    (trained, ground), options = job.variant, job.options
    images, _ = compose(folder, "train", trained, TRAINING_PICTURES, options.seed)
    held_out = compose(folder, "train", job.name, validated, VALIDATION)
    tested = compose(folder, "test", job.name, TEST_PICTURES, 0)
    data = Dataset("emoji", Split(images), Split(held_out[0]), Split(tested[0]))
    entry = create_untrained("scenes", data, options, ground=ground, **SIZES)
    minutes, checks = options.minutes or length, Checks(clock="processor")
    train(entry, data, options, minutes, batch_size=32, checks=checks)
    right = {
        reading: float((count_errors(entry, *held_out, *reading) == 0).float().mean())
        for reading in itertools.product(POWERS, SWEEPS)
    }
    power, sweeps = max(right, key=right.__getitem__)
    error = count_errors(entry, *tested, power, sweeps)
    measured = count_errors(entry, *tested, None, 1)
    return {
        "count_accuracy": mean_and_error((error == 0).float()),
        "count_accuracy_measured": mean_and_error((measured == 0).float()),
        "too_few": mean_and_error((error < 0).float()),
        "too_many": mean_and_error((error > 0).float()),
        "likelihood_power": single(power),
        "sweeps": single(sweeps),
    }


def compose(folder: str, split: str, ground: str, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pictures (N, 3, H, W) and their numbers of emoji, (N,)."""
    where = photographs(split) if ground == "photographs" else ground
    composed = composed_emoji(Path(folder), split, number, seed=seed, ground=where)
    pictures = [composed[index] for index in range(number)]
    counts = torch.tensor([len(picture.centers) for picture in pictures])
    return torch.stack([picture.image for picture in pictures]), counts


def count_errors(
    entry: Entry, images: Tensor, counts: Tensor, power: float | None, sweeps: int
) -> Tensor:
    """Return how many objects too many are counted on images, (N,)."""
    model, guide = entry.model.eval(), entry.guide.eval()
    results = read_pictures(model, guide, [*images], likelihood_power=power, sweeps=sweeps)
    return torch.tensor([result.count for result in results]) - counts
