"""Counts of emoji of kinds that were never seen, on plain grounds and on photographs.

The pictures are composed: 0 to 3 emoji of 18 pixels, in their own colors, on 48x48 pixels. Four
fifths of the kinds train, and one fifth is counted. The art is fetched by `tools/emoji.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsule_zoo.data import Dataset, Split
from capsule_zoo.data.composed_pictures import composed_emoji, photographs
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import mean_and_error, single, with_worst
from capsule_zoo.inference import Checks
from capsule_zoo.inference.whole_pictures import read_pictures
from capsule_zoo.records import Number, Table
from capsule_zoo.registry import Entry

GROUNDS = {"plain": "color", "photographs": "picture"}  # and the ground of the model
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
POWERS = (None, 1.0)  # of the likelihood: measured, or not


@dataclass(frozen=True)
class Settings:
    """Settings of the experiment on emoji.

    Args:
        folder: the folder that `python tools/emoji.py FOLDER` writes.
        seeds: number of seeds.
        length: training time of each run, in minutes of the processor.
        composed: training pictures.
        validated: pictures of training kinds on which the power of the likelihood is chosen.
        tested: pictures of other kinds, whose emoji are counted.
        sizes: settings of the entry that replace the experiment's.
    """

    folder: str = "emoji"
    seeds: int = 3
    length: float = 10.0
    composed: int = 12_000
    validated: int = 200
    tested: int = 500
    sizes: Any = None


@experiment("scenes/emoji", data="digits", minutes=60)
def emoji(options: Options, settings: Settings) -> Result:
    """Count emoji of new kinds on plain grounds and on photographs (over an hour of one core).

    `count_accuracy_...` is the fraction of test pictures whose number is right, `..._worst` that of
    the worst seed, `too_few_...` and `too_many_...` the fractions of the others. Photographs of
    scikit-learn and scikit-image are the grounds: three train, and three others are counted on.
    """
    outcomes = Study(dict.fromkeys(GROUNDS, settings), settings.seeds).run(one_ground, options)
    rows = {name: with_worst(runs, "count_accuracy*") for name, runs in outcomes.items()}
    quantities = {quantity for row in rows.values() for quantity in row}
    table = {q: {name: row[q] for name, row in rows.items()} for q in sorted(quantities)}
    return Result({"": Table(table, "{quantity}_{variant}")}, {})


def one_ground(job: Job[Settings]) -> dict[str, Number]:
    """Train on pictures with one kind of ground, and count emoji of new kinds."""
    settings, options, name = job.variant, job.options, job.name
    images, _ = compose(settings.folder, "train", name, settings.composed, options.seed)
    some = max(1, len(images) // 40)
    parts = (images[2 * some :], images[:some], images[some : 2 * some])
    data = Dataset("emoji", *map(Split, parts))
    sizes = {**SIZES, "ground": GROUNDS[name], **(settings.sizes or {})}
    entry = create_untrained("scenes", data, options, **sizes)
    minutes, checks = options.minutes or settings.length, Checks(clock="processor")
    train(entry, data, options, minutes, batch_size=32, checks=checks)
    validated = compose(settings.folder, "train", name, settings.validated, 1000)
    errors = {power: count_errors(entry, *validated, power) for power in POWERS}
    power = max(POWERS, key=lambda p: float((errors[p] == 0).float().mean()))
    tested = count_errors(entry, *compose(settings.folder, "test", name, settings.tested, 0), power)
    return {
        "count_accuracy": mean_and_error((tested == 0).float()),
        "too_few": mean_and_error((tested < 0).float()),
        "too_many": mean_and_error((tested > 0).float()),
        "likelihood_power_is_measured": single(float(power is None)),
    }


def compose(folder: str, split: str, ground: str, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pictures (N, 3, H, W) and their numbers of emoji, (N,)."""
    where = {"ground": photographs(split)} if ground == "photographs" else {}
    composed = composed_emoji(Path(folder), split, number, seed=seed, **where)
    pictures = [composed[index] for index in range(number)]
    counts = torch.tensor([len(picture.centers) for picture in pictures])
    return torch.stack([picture.image for picture in pictures]), counts


def count_errors(entry: Entry, images: Tensor, counts: Tensor, power: float | None) -> Tensor:
    """Return how many objects too many are counted on images, (N,)."""
    model, guide = entry.model.eval(), entry.guide.eval()
    results = read_pictures(model, guide, [*images], likelihood_power=power)
    return torch.tensor([result.count for result in results]) - counts
