"""Training of entries in experiments, with the entry's own settings and the options."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyro
from torch import Tensor

from capsule_zoo.data import Dataset, Split
from capsule_zoo.experiments.options import Options
from capsule_zoo.inference import Checks, Inputs, Run
from capsule_zoo.inference.training.settings import combine_settings
from capsule_zoo.registry import Entry, create, load
from capsule_zoo.runs.folder import CHECKPOINT, RunFolder, fit_entry
from capsule_zoo.runs.recipe import BATCH_SIZE, LIMITS, Recipe, length_of, words_of


def create_untrained(name: str, data: Dataset | Split, options: Options, **settings: Any) -> Entry:
    """Return an untrained entry for these images, drawn from the seed of the options."""
    pyro.set_rng_seed(options.seed)
    return create(
        name, **{"image_shape": tuple(training_splits(data)[0].images.shape[1:]), **settings}
    )


def training_splits(data: Dataset | Split) -> list[Split]:
    """Return the training split and, for a data set, the validation split."""
    return [data.train, data.validation] if isinstance(data, Dataset) else [data]


def train(
    entry: Entry,
    data: Dataset | Split,
    options: Options,
    minutes: float | None = None,
    *,
    name: str = "",
    after: str | None = None,
    start: Callable[[Entry, Tensor], object] | None = None,
    in_stages: bool = False,
    **settings: Any,
) -> Run:
    """Fit an entry and leave it on the CPU.

    The run has a run folder in `options.runs`. If it was interrupted, it goes on from there; if it
    had ended, the entry gets the saved weights, and torch's generator the state that it had at the
    end of the run.

    Args:
        minutes: limit of the run, if `settings` give no other.
        name: name of the run's folder; by default the run is written into `options.runs` itself.
        after: name of a run that this one continues, with a later limit.
        start: a function of the entry and the training images that initializes parameters, unless
            the run is resumed; by default the data's mean initializes energy models.
        in_stages: whether an entry is trained in its stages, if it has any.
        settings: arguments of `fit` that replace the entry's.

    Raises:
        KeyboardInterrupt: the user interrupted the run, which is saved.
    """
    places, files = checkpoints(options, name, after), None
    if places.resume is None and start is not None:
        start(entry, training_splits(data)[0].images)
    elif places.resume is None and hasattr(entry.model, "set_base_rates"):
        entry.model.set_base_rates(training_splits(data)[0].images)
    pair = entry if in_stages else replace(entry, stages=None)
    shared = {"minutes": minutes, "seed": options.seed, "inputs": Inputs(device=options.device)}
    arguments = combine_settings(shared, entry.training, settings)
    limits = {limit: arguments[limit] for limit in LIMITS if arguments.get(limit) is not None}
    size = f"{entry.model.num_parameters:,} numbers"
    options.say(f"Training {name or entry.name}, {size}, {length_of(arguments)}")
    if options.runs is not None:
        made = places.resume and Path(places.resume).with_name("config.json")  # from its start
        saved_config = json.loads(made.read_text()) if made and made.is_file() else None
        config = saved_config or config_of(pair, data, arguments, limits)
        config |= {"limits": limits} if "limits" in config else {}
        files = RunFolder(options.runs / name, entry, config)
    run = fit_entry(
        pair, data, options.say, files, **combine_settings(arguments, {"checks": places})
    )
    entry.model.cpu()
    entry.guide.cpu()
    if run.stopped == "interrupted":
        raise KeyboardInterrupt
    if files is not None:
        files.finish(run)
    return run


def config_of(entry: Entry, data: Dataset | Split, arguments: dict, limits: dict) -> dict[str, Any]:
    """Return the fields of a new run's `config.json` other than model and guide."""
    rate, name = arguments.get("lr"), training_splits(data)[0].name.rpartition("/")[0]
    return {
        "data": name or Recipe.data,
        "seed": arguments["seed"],
        "transform": words_of(arguments["inputs"].transform),
        "batch_size": arguments.get("batch_size", BATCH_SIZE),
        "lr": None if rate == entry.training.get("lr") else rate,
        "limits": limits,
        "experiment": True,
    }


def checkpoints(options: Options, name: str, after: str | None = None) -> Checks:
    """Return the paths where `fit` saves a run and from where it resumes, if it saves."""
    quiet = Checks(progress=options.progress)
    if options.runs is None:
        if after is not None:
            raise ValueError(f"{name} continues {after}; give options.runs, where runs are saved")
        return quiet
    places = [
        options.runs / run_name / CHECKPOINT for run_name in (name, after) if run_name is not None
    ]
    return replace(quiet, checkpoint=places[0], resume=next(filter(Path.is_file, places), None))


def load_run(run: str, name: str) -> Entry:
    """Load a trained entry; raise ValueError unless it is an entry `name`."""
    entry = load(run)
    if entry.name != name:
        raise ValueError(f"run must be of {name!r}, but {run} is of {entry.name!r}")
    return entry


def load_or_train(
    name: str,
    data: Dataset,
    options: Options,
    sizes: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Entry:
    """Load the entry of `options.run` if given; else create entry `name` and train it in stages.

    Args:
        sizes: arguments of the entry.
        settings: arguments of `train` that replace the entry's; by default the limit is the
            options' budget.
    """
    if options.run:
        return load_run(options.run, name)
    entry = create(name, image_shape=data.image_shape, **(sizes or {}))
    arguments = {"minutes": options.budget, "in_stages": True, **settings}
    train(entry, data, options, name="trained", **arguments)
    return entry


@contextmanager
def use_device(entry: Entry, options: Options) -> Iterator[None]:
    """Move an entry to the options' device inside the context, and back to the CPU afterwards."""
    for part in (entry.model, entry.guide):
        part.to(options.device)
    yield
    for part in (entry.model, entry.guide):
        part.cpu()
