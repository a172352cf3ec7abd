"""Comparison of all guides to one trained model, and the nats that guides of each family lose.

`shape-codes/guides` compares all guides that fit a trained model on common held-out images: the
guides of its entry, tuned with the model frozen, and general guides, fitted to the images.
`zoo/gaps` bounds log p(image) of trained models from both sides by annealing, and measures the nats
that each guide loses.

Models of binary pixels are measured on images binarized once, with seed 0. The models are the
published ones where there are any; other models are trained first.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from capsule_zoo.data import Binarize, Dataset, load_dataset
from capsule_zoo.discovery import list_weights
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import (
    group_by_quantity,
    measures_of_rows,
    numbers_of_columns,
    snake_case,
)
from capsule_zoo.experiments.training import use_device
from capsule_zoo.figures.curves import plain_numbers
from capsule_zoo.figures.grids import panels
from capsule_zoo.guides import SceneGuide
from capsule_zoo.inference import Inputs
from capsule_zoo.records import Number, Numbers, Table, metric_title
from capsule_zoo.registry import Entry
from capsule_zoo.runs.annealing import guide_losses
from capsule_zoo.runs.folder import open_run
from capsule_zoo.runs.measurements import compare_run, draws_binary_pixels, guides_of, scoring_data

CONTINUOUS = "generative-capsnet:continuous"  # an entry and its preset
LOSING = "low_rank", "free_form", "semi_amortized", "corrected", "gauss_newton", "mixture"
NEWTON = LOSING[-2:]
ANNEALED = (
    *("vae", "conditional-autoencoder", "generative-capsnet", CONTINUOUS),
    *("capsule-helmholtz", "recurrent-capsules", "shape-codes", "part-whole", "draw", "scenes"),
)
IMAGES = 100  # number of annealed test images of an entry
SLOW: dict[str, int] = {  # fewer images of entries with slow guides
    **{CONTINUOUS: 8, "recurrent-capsules": 8, "draw": 8},
    **{"shape-codes": 8, "part-whole": 8, "conditional-autoencoder": 16, "scenes": 16},
}
SIMULATED = 16  # largest number of images sampled from each model
TRAINING = 1500  # updates of an entry without published weights
ANNEALING = dict(
    chains=4,
    temperatures=100,
    leapfrogs=5,
    refinement=100,
    modes=4,
    particles=1000,
    group_size=100,
    steps=200,
)
HIDDEN = dict(prior_fraction=0.25, temperatures=400)  # what is hidden is as the prior is
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys((CONTINUOUS, "shape-codes", "part-whole"), HIDDEN),
    "scenes": HIDDEN | dict(temperatures=2000, climbing=256),
    "capsule-helmholtz": dict(temperatures=200),
}
OBJECTS = 2  # number of objects in the annealed scenes
LOST = "nats that a guide loses of"  # begins the label of an axis
GAPS = "gap", "gap_median", "gap_largest"
BOUNDS = "lower", "simulated_lower", "simulated_upper", *GAPS, "images_exceeded", "acceptance_rate"


def open_trained(name: str, options: Options, steps: int) -> tuple[Entry, Dataset]:
    """Return a trained entry with the data on which it is measured.

    The entry is the run that the options name, else the entry's published weights, else a new
    entry, trained on MNIST for a number of updates.
    """
    bare, _, preset = name.partition(":")
    published = (
        weights.name
        for weights in list_weights().values()
        if (weights.entry, weights.preset or "") == (bare, preset)
        and weights.data.split(":")[0] in ("mnist", "multi-mnist")
    )
    if source := options.run or next(published, None):
        root = None if options.data_root is None else Path(options.data_root)
        scenes = name == "scenes"  # of which no guide is widened on training scenes
        entry, data, _ = open_run(source, None, root, only_tests=scenes)
        return entry, scoring_data(entry, data)
    data = load_dataset("mnist", root=options.data_root)
    entry = create_untrained(bare, data, options, **({"preset": preset} if preset else {}))
    transform = Binarize() if draws_binary_pixels(entry.model) else None
    train(entry, data, options, name=name, steps=steps, inputs=Inputs(transform))
    return entry, scoring_data(entry, data)


def with_objects(entry: Entry, data: Dataset, number: int) -> tuple[Entry, Dataset]:
    """Condition an entry of scenes, and select test scenes, on a number of objects."""
    guide = entry.guide_of(SceneGuide).with_objects(number)
    test = data.test[data.test.objects.counts == number]
    return replace(entry, model=guide.model, guide=guide), replace(data, test=test)


@experiment("shape-codes/guides", data="mnist", minutes=30, of_runs=True)
def compare_guides(
    options: Options, *, images: int = 500, particles: int = 100, fitting: int = 200
) -> Result:
    """Compare all guides to one model of shape codes on new digits.

    Gauss-Newton distributions, of which one takes more than a second, are left to `zoo/gaps`.

    Args:
        images: number of held-out images.
        particles: number of draws of the IWAE bound.
        fitting: updates of every guide but the entry's own.
    """
    name = "shape-codes"
    entry, data = open_trained(name, options, options.shorten_steps(TRAINING))
    if entry.name != name:
        raise ValueError(
            f"run holds {entry.name!r}, but this experiment compares guides to {name!r}; give "
            f"a run of {name!r}, or compare by capsule-zoo compare"
        )
    swapped = [guide for guide in guides_of(entry) if guide not in NEWTON]
    options.say(f"Comparing {', '.join(swapped)} on {images} held-out images")
    table = compare_run(
        entry,
        data,
        swapped,
        tune_steps=options.shorten_steps(fitting),
        images=images,
        particles=particles,
        seed=options.seed,
        progress=options.progress,
    )
    seconds = numbers_of_columns(table, {"fit_seconds": "fit_seconds"})
    return Result(measures_of_rows(table) | seconds, {"": table.draw()}, table, entry)


@experiment("zoo/gaps", data="mnist", minutes=60)
def gaps(options: Options) -> Result:
    """Bound log p of trained models from both sides by annealing; measure guides' losses (hours).

    Chains start at the guide with the highest importance-weighted bound: the entry's own, or
    Gauss-Newton distributions at refined points, or a free-form or corrected guide.
    `gap_<entry>` is the largest error of the annealed bounds, on images that the model draws;
    `gap_median_<entry>` and `gap_largest_<entry>` tell whether a few of these images decide it.
    `lost_elbo_<entry>_<guide>` is how far a guide's ELBO lies under the lower bound, on held-out
    digits. `images_exceeded_<entry>` is the number of digits on which the importance-weighted bound
    of some guide lies above the lower one, by more than two standard errors: there it is too low.
    Scenes have two digits each, and their number is given. The entry's own guide is its encoder.
    """
    variants = {}
    for name in ANNEALED:
        images = SLOW.get(name, IMAGES)
        counts = dict(images=images, simulated=min(images, SIMULATED))
        variants[name] = ANNEALING | counts | SETTINGS.get(name, {})
    untimed, steps = replace(options, minutes=None), options.shorten_steps(TRAINING)
    outcomes = Study(variants).run(anneal_entry, untimed, training=steps)
    tables, bounds, titles = {}, {}, {}
    for (result,) in outcomes.values():
        entry, name = result["entry"], snake_case(result["entry"])
        by_guide = group_by_quantity(result["guides"])
        tables[entry] = Table(by_guide, f"{{quantity}}_{name}_{{variant}}")
        bounds[name], titles[entry] = result["bounds"], entry_title(entry, result["bounds"])
    losses = {entry: table.numbers for entry, table in tables.items()}
    figure = plot_losses(losses, titles, f"{LOST} log p(image), annealed (± 2 s.e.)")
    return Result({**group_by_quantity(bounds), **tables}, {"": figure})


def anneal_entry(job: Job[dict[str, Any]], *, training: int) -> dict[str, Any]:
    """Anneal a trained entry: return its name, its annealed bounds, and its guides' numbers."""
    settings = job.variant
    entry, data = open_trained(job.name, job.options, training)
    if isinstance(entry.guide, SceneGuide):
        entry, data = with_objects(entry, data, OBJECTS)
    with use_device(entry, job.options):
        bounds, rows = guide_losses(entry, data, LOSING, seed=job.options.seed, **settings)
    kinds = "elbo", f"iwae_{settings['group_size']}", "iwae"
    quantities = *kinds, *(f"lost_{kind}" for kind in kinds), "ess", "pareto_k", "milliseconds"
    counts = settings["images"], settings["simulated"]
    numbers = {name: numbers_of(row, quantities, *counts) for name, row in rows.items()}
    label = ":".join(filter(None, [entry.name, entry.settings.get("preset")]))
    return {"entry": label, "bounds": numbers_of(bounds, BOUNDS, *counts), "guides": numbers}


def numbers_of(row: dict, names: tuple[str, ...], images: int, simulated: int) -> Numbers:
    """Return the finite numbers of a row, with their standard errors, if any, and counts."""
    numbers: Numbers = {}
    for name in names:
        if np.isfinite(row.get(name, np.nan)):  # pareto_k is infinite without a tail
            error = row.get(f"{name}_se", np.nan)
            count = simulated if name.startswith(("gap", "simulated")) else images
            numbers[name] = row[name], error if np.isfinite(error) else None, count
    return numbers


def entry_title(entry: str, bounds: Numbers) -> str:
    """Return an entry's title: its name, its gap, and on how many images a guide exceeds it."""
    kinds = [name for name in GAPS if name in bounds]
    gaps = [f"{metric_title(name)} {bounds[name][0]:.2f}" for name in kinds]
    exceeded, _, images = bounds.get("images_exceeded", (0, None, 0))
    too_low = f"; lower is too low on {exceeded} of {images}" if exceeded else ""
    return f"{': '.join(filter(None, [metric_title(snake_case(entry)), ', '.join(gaps)]))}{too_low}"


def plot_losses(
    losses: Mapping[str, Mapping[str, Mapping[str, Number]]],
    titles: Mapping[str, str],
    label: str,
    *,
    linear: float = 1.0,
    largest: float = np.inf,
) -> Figure:
    """Plot the nats that each guide loses by ELBO and by IWAE, a panel for each model.

    Args:
        losses: `lost_elbo` and `lost_iwae` of each guide, by model.
        titles: title of each panel, by model.
        label: label of the horizontal axis.
        linear: nats up to which the horizontal axis is linear; it is logarithmic beyond.
        largest: nats at which larger losses are drawn.
    """
    figure, grid = panels(2, -(-len(losses) // 2), (4.5, 1.8), (0, 0.8), sharex=True)
    columns = grid.T.flatten()
    for axes in columns[len(losses) :]:
        axes.set_axis_off()
    for axes, (model, by_quantity) in zip(columns, losses.items(), strict=False):
        for quantity in ("lost_elbo", "lost_iwae"):
            by_guide = by_quantity[quantity]
            height = range(len(by_guide))[::-1]
            spread = [2 * (error or 0) for _, error, _ in by_guide.values()]
            values = [min(value, largest) for value, _, _ in by_guide.values()]
            name = quantity.removeprefix("lost_").upper()
            axes.errorbar(values, height, xerr=spread, fmt="o", capsize=3, label=name)
            axes.set_yticks(height, [guide.replace("_", " ") for guide in by_guide])
        axes.set_xscale("symlog", linthresh=linear)
        plain_numbers(axes.xaxis)
        axes.tick_params(labelbottom=True)
        axes.axvline(0, color="0.8", zorder=0)
        axes.set_title(fill(titles[model], 26), loc="left", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    handles = columns[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, loc="outside upper center", ncols=2)
    figure.supxlabel(label, fontsize=10)
    return figure
