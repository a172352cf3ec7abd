"""Part-whole capsules whose parts choose their type, trained on rotated images.

The paper (Smith et al. 2020) attributes the loss of accuracy on upright images, after training on
rotated ones, to parts that are affine copies of each other: when the image rotates, another part
explains a stroke. Its remedy is left open. With types (see `models.part_whole`) parts of one
template are exchangeable, and it does not matter which part explains a stroke.
"""

from dataclasses import dataclass, replace
from functools import partial

from capsule_zoo.data import Dataset, load_dataset, transforms
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import group_by_quantity, means_of, single
from capsule_zoo.experiments.part_whole.augment import (
    BATCH_SIZE,
    RotatedTraining,
    measure_rotations,
    plot_parts,
)
from capsule_zoo.experiments.part_whole.transformations import count_choosing_parts
from capsule_zoo.experiments.stacked_capsule_autoencoder.clusters import measure
from capsule_zoo.inference import Inputs
from capsule_zoo.inference.probes import linear_probe
from capsule_zoo.records import Numbers
from capsule_zoo.registry import Entry, load
from capsule_zoo.zoo.part_whole.figures import learned_templates


@dataclass(frozen=True)
class Settings(RotatedTraining):
    """Settings of the experiment on types; see `RotatedTraining`.

    Args:
        types: number of types that a part chooses from.
        instances: numbers of parts that share a template, one for each model.
        tested: number of test images.
    """

    degrees: tuple[int, ...] = (0, 180)
    types: int = 16
    instances: tuple[int, ...] = (4,)
    tested: int = 10_000


@experiment("part-whole/types", data="mnist", minutes=75)
def train_with_types(options: Options, settings: Settings) -> Result:
    """Train parts with types on rotated digits, and probe upright ones (75 core-minutes).

    Updates, seeds, images and probes are those of `part-whole/augment`, whose parts are
    individuals. `probe_choices` is a probe on the expected number of parts of each object and
    type. Probes of `rotated_...` are fitted and tested on images rotated as in training.
    """
    timed, steps = replace(options, minutes=None), options.shorten_steps(settings.steps)
    variants = {
        f"{instances}_parts_{degrees}": (instances, degrees)
        for instances in settings.instances
        for degrees in settings.degrees
    }
    study = Study(variants, settings.seeds)
    outcomes = study.run(learn, timed, steps=steps, settings=settings)
    widest = load([*study.folders(timed).values()][-1])
    data = load_dataset("mnist", root=options.data_root)
    figures = {"parts": plot_parts(widest, data), "templates": learned_templates(widest.model)}
    return Result({**group_by_quantity(means_of(outcomes))}, figures, None, widest)


def learn(job: Job[tuple[int, int]], *, steps: int, settings: Settings) -> Numbers:
    """Train a model on images rotated by up to the job's degrees, and measure it."""
    (instances, degrees), options = job.variant, job.options
    data = load_dataset("mnist", root=options.data_root)
    sizes = {"types": settings.types, "painting.instances": instances}
    entry = create_untrained("part-whole", data, options, **sizes, **(settings.sizes or {}))
    inputs = Inputs(transforms.Rotate(degrees))
    train(entry, data, options, inputs=inputs, steps=steps, batch_size=BATCH_SIZE)
    subset = replace(data, train=data.train[: settings.probed], test=data.test[: settings.tested])
    numbers = measure_rotations(partial(probe_all, entry), subset, degrees)
    return {**numbers, "steps": single(steps)}


def probe_all(entry: Entry, data: Dataset) -> Numbers:
    """Measure linear probes, clusters and reconstructions, and a probe on objects and types."""
    fitted, tested = (
        count_choosing_parts(entry.guide, split.images, with_types=True)
        for split in (data.train, data.test)
    )
    rows = fitted, data.train.labels, tested, data.test.labels
    return {
        **measure(entry, data, len(data.train), len(data.test)),
        "probe_choices": linear_probe(*rows),
    }
