"""Time to quality: how soon every entry beats a constant answer, and how soon it is good.

The error of an entry that draws images is the squared error of its reconstructions of held-out
images, divided by the squared error of the mean training image, which is the best constant image.
The error of a classifier is its error rate, divided by a half.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, experiment
from capsule_zoo.experiments.common.curves import Curve, learning_curve, times_of
from capsule_zoo.experiments.common.findings import by_quantity, snake_case
from capsule_zoo.figures.grids import panels
from capsule_zoo.inference import Inputs, error_rate, infer, mean_images
from capsule_zoo.models.networks.leading import with_previous
from capsule_zoo.records import Metrics
from capsule_zoo.registry import Entry, create, list_models, small_sizes, takes_images

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HALF = 0.5  # the error rate under which a classifier has started
STARTED = 1.0
GOOD = {"draws": 0.5, "classifies": 0.1}  # of a classifier, an error rate of .05
COLUMNS = 5


def curve_of(job: Job[dict], *, data: str, every: int) -> Curve:
    """Train the entry of the job's name, and return its errors; see `learning_curve`.

    Args:
        job: its variant are the sizes of the entry.
        data: name of the data set.
        every: updates between two looks at the clock.
    """
    options, images = job.options, load_dataset(data, root=job.options.data_root)
    entry = begun(job.name, images, options, **job.variant | {"image_shape": images.image_shape})
    how: dict[str, Any] = dict(in_stages=True, inputs=Inputs(labels=takes_apart(entry)))
    error = partial(relative_error, entry, images)
    return learning_curve(entry, images, options, error, every=every, **how)


def relative_error(entry: Entry, data: Dataset) -> float:
    """Return the error on validation images, relative to the error that it must be under."""
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


@experiment("zoo/time-to-quality", data="digits", minutes=60)
def time_to_quality(
    options: Options,
    *,
    seeds: int = 3,
    every: int = 5,
    entries: tuple[str, ...] = (),
    small: bool = False,
    data: str = "digits",
) -> Result:
    """Measure when every entry of images beats a constant answer, and when it is good (an hour).

    All runs have equal processor time, on one thread, and are made as `capsule-zoo train ENTRY`
    makes them. `start_seconds` and `start_updates` are those of the first measurement with an error
    below 1, `good_seconds` and `good_updates` of the first one below .5 (entries that draw) or .1
    (classifiers). They are given where all seeds get there; `start_seeds` and `good_seeds` count
    the seeds that do. `error` and `updates` are those of the last measurement.

    Args:
        seeds: number of seeds for each entry.
        every: updates between two looks at the clock.
        entries: names of entries; by default all that take images.
        small: whether entries have the sizes at which the tests run them.
        data: name of the data set, which has ten classes.
    """
    names = list(entries) or [name for name in list_models() if takes_images(name)]
    sizes = {name: small_sizes(name) if small else {} for name in names}
    for own in sizes.values():
        own.pop("classes", None)  # digits have ten
    timed = replace(options, minutes=options.budget)
    curves = Study(sizes, seeds).run(curve_of, timed, data=data, every=every)
    goals = {name: goal_of(name, sizes[name]) for name in names}
    levels = {name: {"start": STARTED, "good": goal} for name, goal in goals.items()}
    rows = {snake_case(name): times_of(curves[name], levels[name]) for name in names}
    metrics: Metrics = by_quantity(rows)
    return Result(metrics, {"": draw(curves, goals)})


def goal_of(name: str, sizes: Mapping[str, object]) -> float:
    """Return the error under which an entry is good."""
    return GOOD["classifies" if create(name, **sizes).model.supervised else "draws"]


def draw(curves: Mapping[str, Sequence[Curve]], goals: Mapping[str, float]) -> "Figure":
    """Draw a panel for each entry, a line for each seed, and dots at 1 and the goal (green)."""
    columns = min(COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = panels(columns, rows, (2.1, 1.8), sharex=True, sharey=True)
    for axis in axes.flat[len(curves) :]:
        axis.axis("off")
    for axis, (name, lines) in zip(axes.flat, curves.items(), strict=False):
        for line in lines:
            seconds, _, errors = zip(*line, strict=True)
            axis.plot(seconds, errors, color="C0", lw=1)
        axis.axhline(STARTED, color="gray", linestyle=":")
        axis.axhline(goals[name], color="C2", linestyle=":")
        axis.set_title(name, fontsize=8)
        axis.set(xscale="log", yscale="log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
    figure.supxlabel("processor seconds of training", fontsize=9)
    figure.supylabel("error, relative to a constant answer", fontsize=9)
    return figure
