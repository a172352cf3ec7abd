"""A test that training starts for every entry: the updates until it beats a constant answer.

An entry that draws images has started if its reconstructions of held-out images are nearer to them
than the mean of the training images, which is the best constant image. A classifier has started if
it is right more often than not.
"""

from dataclasses import replace

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, experiment, train
from capsule_zoo.experiments.common.findings import mean_and_error, single, snake_case
from capsule_zoo.inference import Check, Checks, Inputs, error_rate, infer, mean_images
from capsule_zoo.models.networks.leading import with_previous
from capsule_zoo.records import Metrics, Numbers
from capsule_zoo.registry import Entry, list_models, small_sizes, takes_images

HALF = 0.5  # the error rate under which a classifier has started


def first_step(job: Job[dict], *, data: str, steps: int, every: int) -> tuple[float, float]:
    """Return the first tested step at which the entry of the job's name has started, and its error.

    An entry that never starts gets one step more than it was trained for, and its last error.

    Args:
        job: its variant are the sizes of the entry.
        data: name of the data set.
        steps: updates at most.
        every: updates between two tests whether it has started.
    """
    options, images = job.options, load_dataset(data, root=job.options.data_root)
    entry = begun(job.name, images, options, **job.variant | {"image_shape": images.image_shape})
    found: list[tuple[float, float]] = []

    def has_started(check: Check) -> bool:
        found.append((float(check.step), relative_error(entry, images)))
        return found[-1][1] < 1

    checks = Checks(every=every, callbacks=[has_started])
    inputs = Inputs(labels=takes_apart(entry))
    train(entry, images.train, options, steps=steps, checks=checks, inputs=inputs)
    step, error = found[-1]
    return (step, error) if error < 1 else (steps + 1.0, error)


def relative_error(entry: Entry, data: Dataset) -> float:
    """Return the error on validation images, relative to the error that it must be under.

    The error of an entry that draws is its squared error, relative to the mean image's. The error
    of a classifier is its error rate, relative to a half. Below 1 training has started.
    """
    if entry.model.supervised:
        return error_rate(entry.model, entry.guide, data.validation).value / HALF
    images, labels = data.validation.images, data.validation.labels
    if takes_apart(entry):
        painted = entry.guide.take_out(with_previous(images), labels)
    else:
        drawn = infer(entry.guide, images)
        painted = mean_images(entry.model, len(images), drawn, images=images)
    constant = data.train.images.mean(0)
    return ((painted - images).square().sum() / (constant - images).square().sum()).item()


def takes_apart(entry: Entry) -> bool:
    """Return True for an entry that draws single images, by their classes, from overlays."""
    return hasattr(entry.guide, "take_out")


@experiment("zoo/starts", data="digits", minutes=60)
def starts(
    options: Options,
    *,
    seeds: int = 5,
    steps: int = 2_000,
    every: int = 25,
    entries: tuple[str, ...] = (),
    small: bool = False,
    data: str = "digits",
) -> Result:
    """Count the updates until every entry of images beats a constant answer, from five seeds.

    `step_<entry>` is the mean over seeds, `latest_<entry>` the largest; `error_<entry>` is the mean
    of the relative errors there. `not_started` counts the runs that never start.

    Args:
        seeds: number of seeds for each entry.
        steps: updates of every run at most, in a full run of an hour.
        every: updates between two tests whether a run has started.
        entries: names of entries; by default all that take images.
        small: whether entries have the sizes at which the tests run them.
        data: name of the data set, which has ten classes.
    """
    limit = options.shortened(steps)
    names = list(entries) or [name for name in list_models() if takes_images(name)]
    sizes = {name: small_sizes(name) if small else {} for name in names}
    for own in sizes.values():
        own.pop("classes", None)  # digits have ten
    options.say(f"Training {len(names)} entries from {seeds} seeds, at most {limit} steps each")
    untimed = replace(options, minutes=None)
    found = Study(sizes, seeds).run(first_step, untimed, data=data, steps=limit, every=every)
    step, latest, error = Numbers(), Numbers(), Numbers()
    for name, outcomes in found.items():
        steps_of, errors_of = zip(*outcomes, strict=True)
        step[snake_case(name)] = mean_and_error(list(steps_of))
        latest[snake_case(name)] = single(max(steps_of), len(steps_of))
        error[snake_case(name)] = mean_and_error(list(errors_of))
    late = [reached > limit for outcomes in found.values() for reached, _ in outcomes]
    never = single(sum(late), len(late))
    metrics: Metrics = {"not_started": never, "step": step, "latest": latest, "error": error}
    return Result(metrics)
