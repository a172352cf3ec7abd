"""Capsules with one parent each: do they draw better digits? See the outlook of Li and Zhu (2019).

In a Helmholtz machine all capsules of a layer act on every capsule below. With `parents="one"` a
capsule chooses one of them, and the layers form a tree (`models.units.one_parent`). The sum over
choices takes time, so machines are compared after equal time and after equally many updates.
"""

from dataclasses import dataclass, replace
from typing import Any

from capsule_zoo.data import Binarize, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.energy import binary_mnist
from capsule_zoo.experiments.common.findings import (
    Bounded,
    group_by_quantity,
    looks,
    means_of,
    single,
)
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.inference import Checks, Inputs, mean_images
from capsule_zoo.inference.sample_quality import FeatureClassifier, Reading, train_classifier
from capsule_zoo.records import Numbers
from capsule_zoo.registry import load

DRAWN = 12  # samples of each machine in the figure


@dataclass(frozen=True)
class Settings(Bounded):
    """Settings of the comparison of parents; see `Bounded`.

    Args:
        seeds: number of seeds, among which the minutes are divided.
        capsules: number of capsules of every layer, from the top down.
        samples: number of samples, and of test images that they are compared with.
        epochs: passes of the classifier over the training images.
    """

    images: int = 1000
    particles: int = 200
    seeds: int = 1
    capsules: tuple[int, ...] = (40, 40)
    samples: int = 5000
    epochs: int = 3


@experiment("capsule-helmholtz/parents", data="mnist", minutes=40)
def compare_parents(options: Options, settings: Settings) -> Result:
    """Compare machines whose capsules have one parent with the usual ones (40 core-minutes).

    Both machines start at random and have equal time. `..._equal_updates` is of the usual machine
    after as many updates as the other one makes in its time. `frechet` is the distance of samples
    to test images in the features of a classifier.
    """
    timed = replace(options, minutes=options.budget)
    data = load_dataset("mnist", root=options.data_root)
    options.say("Training the classifier")
    judge = train_classifier(data.train, data.num_classes, settings.epochs)
    real = judge.read(data.test.images[: settings.samples])
    measuring: dict[str, Any] = dict(judge=judge, real=real, settings=settings)
    study = Study({"one": "one", "all": "all"}, settings.seeds)
    outcomes = study.run(learn, timed, **measuring)
    updates = int(min(run["updates"][0] for run in outcomes["one"]))
    shorter = Study({"all_equal_updates": "all"}, settings.seeds)
    outcomes |= shorter.run(learn, replace(timed, minutes=None), updates=updates, **measuring)
    rows = {"test images": data.test.images[:DRAWN]}
    for name, folder in study.folders(timed).items():
        rows[f"parents: {name}"] = mean_images(load(folder).model, DRAWN, seed=options.seed)
    figure = image_rows(rows, "Test images, and samples of machines")
    return Result({**group_by_quantity(means_of(outcomes))}, {"": figure})


def learn(
    job: Job[str],
    *,
    judge: FeatureClassifier,
    real: Reading,
    settings: Settings,
    updates: int | None = None,
) -> Numbers:
    """Train a machine, for a time or a number of updates, and measure bounds and samples."""
    options = job.options
    data = binary_mnist(options)
    sizes: dict[str, Any] = dict(capsules=settings.capsules, parents=job.variant)
    entry = create_untrained("capsule-helmholtz", data, options, **sizes)
    length = {"minutes": options.budget} if updates is None else {"steps": updates}
    arguments: dict[str, Any] = dict(inputs=Inputs(Binarize()), checks=Checks(clock="processor"))
    run = train(entry, data, options, **length, **arguments)
    images = mean_images(entry.model, settings.samples, seed=options.seed)
    return {
        "updates": single(run.steps),
        **settings.bounds(entry, data, options.seed),
        **looks(judge.read(images), real),
    }
