"""Part-whole capsules whose parts choose their type, trained on rotated images.

The paper (Smith et al. 2020) attributes the loss of accuracy on upright images, after training on
rotated ones, to parts that are affine copies of each other: when the image rotates, another part
explains a stroke. Its remedy is left open. With types (see `models.part_whole`) parts of one
template are exchangeable, and it does not matter which part explains a stroke.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from capsule_zoo.data import load_dataset, transforms
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import (
    group_by_quantity,
    mean_and_error,
    means_of,
    single,
)
from capsule_zoo.experiments.part_whole.augment import BATCH_SIZE, plot_parts, rotate_split
from capsule_zoo.experiments.stacked_capsule_autoencoder.clusters import measure
from capsule_zoo.inference import Inputs
from capsule_zoo.records import Number, Numbers
from capsule_zoo.registry import load
from capsule_zoo.zoo.part_whole.figures import learned_templates


@dataclass(frozen=True)
class Settings:
    """Settings of the experiment.

    Args:
        degrees: largest rotations of training images, one for each model.
        seeds: number of seeds for each model.
        steps: updates of each model in a full run.
        types: number of types that a part chooses from.
        instances: number of parts that share a template.
        probed: number of training images that probes and clusters are fitted on.
        tested: number of test images.
        sizes: further arguments of the entry that replace the zoo's defaults.
    """

    degrees: tuple[int, ...] = (0, 180)
    seeds: int = 3
    steps: int = 3000
    types: int = 16
    instances: int = 16
    probed: int = 10_000
    tested: int = 10_000
    sizes: Mapping[str, Any] | None = None


@experiment("part-whole/types", data="mnist", minutes=60)
def train_with_types(options: Options, settings: Settings) -> Result:
    """Train parts with types on rotated digits, and probe upright ones (60 core-minutes).

    Updates, seeds, images and probes are those of `part-whole/augment`, whose parts are
    individuals. `drop_...` is the accuracy on upright images that the widest rotations cost.
    Probes of `rotated_...` are fitted and tested on images rotated as in training.
    """
    timed, steps = replace(options, minutes=None), options.shorten_steps(settings.steps)
    study = Study({str(degrees): degrees for degrees in settings.degrees}, settings.seeds)
    outcomes = study.run(learn, timed, steps=steps, settings=settings)
    widest = load(study.folders(timed)[str(max(settings.degrees))])
    data = load_dataset("mnist", root=options.data_root)
    figures = {"parts": plot_parts(widest, data), "templates": learned_templates(widest.model)}
    drops = find_drops(outcomes[str(min(settings.degrees))], outcomes[str(max(settings.degrees))])
    return Result({**group_by_quantity(means_of(outcomes)), **drops}, figures, None, widest)


def find_drops(before: Sequence[Numbers], after: Sequence[Numbers]) -> Numbers:
    """Return the mean drop of each accuracy between two lists of runs of the same seeds."""
    return {
        name.replace("probe", "drop"): mean_and_error(
            [a[name][0] - b[name][0] for a, b in zip(before, after, strict=True)]
        )
        for name in before[0]
        if name.startswith("probe")
    }


def learn(job: Job[int], *, steps: int, settings: Settings) -> Numbers:
    """Train a model on images rotated by up to the job's degrees, and measure it."""
    degrees, options = job.variant, job.options
    data = load_dataset("mnist", root=options.data_root)
    sizes = {"types": settings.types, "painting.instances": settings.instances}
    entry = create_untrained("part-whole", data, options, **sizes, **(settings.sizes or {}))
    inputs = Inputs(transforms.Rotate(degrees))
    train(entry, data, options, inputs=inputs, steps=steps, batch_size=BATCH_SIZE)
    numbers: dict[str, Number] = {**measure(entry, data, settings.probed, settings.tested)}
    if degrees:
        train_split = rotate_split(data.train[: settings.probed], degrees)
        rotated = replace(data, train=train_split, test=rotate_split(data.test, degrees))
        rows = measure(entry, rotated, settings.probed, settings.tested)
        numbers |= {f"rotated_{quantity}": number for quantity, number in rows.items()}
    return {**numbers, "steps": single(steps)}
