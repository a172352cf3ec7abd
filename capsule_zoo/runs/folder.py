"""Run folders, which `capsule-zoo train` writes and the other commands read and extend.

A folder holds

    config.json               how to make the entry and the run again
    checkpoint.safetensors    for `--resume`
    model.safetensors         the trained weights, with guide.safetensors next to them
    history.csv               one row a step, added to at every checkpoint
    events.out.tfevents.*     the history for TensorBoard, with `--log tensorboard`
    metrics.json              results of training, evaluation and comparison
    *.png                     the entry's figures

The first two and history.csv are written when training saves its first checkpoint, the others after
training has ended. Nothing is written earlier, so a refused command leaves a folder as it was.
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pyro
from pandas import DataFrame
from torch import Tensor

from capsule_zoo.data import Dataset, Split, load_dataset
from capsule_zoo.data.datasets import full_name, load_pictures, load_tests
from capsule_zoo.data.own_pictures import read_whole_pictures, sides_of
from capsule_zoo.data.progress import announce, announce_plan, write_line
from capsule_zoo.data.splits import labels_of
from capsule_zoo.entry import draw_figure
from capsule_zoo.figures.generic import samples
from capsule_zoo.inference import CheckpointError, Checks, Inputs, NonFiniteLoss, Run, fit
from capsule_zoo.inference.evaluation.classification import error_rate, predicts_labels
from capsule_zoo.inference.training.checkpoint import save_checkpoint
from capsule_zoo.inference.training.progress import history_of
from capsule_zoo.inference.training.settings import combine_settings
from capsule_zoo.inference.training.stages import fit_stages, needed_steps
from capsule_zoo.inference.training.workers import is_first_process, usable_device
from capsule_zoo.models.checks import check_known, check_one_of, check_seed
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.models.networks.classifier import Classifier
from capsule_zoo.records import plain, save_figure, write_json
from capsule_zoo.registry import (
    Entry,
    Registered,
    create,
    find_registration,
    load,
    made_by,
    pair_of,
    read_recipe,
    rebuild,
    recipe_path,
    save_entry,
)
from capsule_zoo.runs.recipe import Recipe, length_of, make_objective
from capsule_zoo.settings import as_tuple, fits

CHECKPOINT = "checkpoint.safetensors"
GRAY_ONLY = ("part-whole", "shape-codes", "stacked-capsule-autoencoder")
MAY_CHANGE = ("limits", "lr")  # fields of a recipe that may change when a run is resumed
MEASURED = ("metrics.json", "compare.csv", "compare.png")
TRAINED = ("model.safetensors", "guide.safetensors", "history.csv")


def resume_recipe(folder: Path, name: str, overrides: dict[str, Any]) -> Recipe:
    """Return the recipe with which an interrupted run of entry `name` can be resumed.

    If the data of the run are files that have moved, `overrides` may name the new paths.

    Raises:
        ValueError: the folder holds a run of another entry or a damaged config.json, or `overrides`
            changes a setting that must not change.
    """
    saved = Recipe.read(read_recipe(folder))
    if saved.entry != name:
        raise ValueError(f"{folder} holds a run of {saved.entry!r}, not of {name!r}")
    settings = {**saved.settings, **overrides.get("settings", {})}
    asked = replace(saved, **{**overrides, "settings": settings})
    if "settings" in overrides and asked.guide == saved.guide:
        with use_seed(0):
            entry = create(name, **settings).use_guide(saved.guide or "")
            asked = replace(asked, pair=pair_of(entry.model, entry.guide))
    of_files = saved.data.startswith(("folder:", "constellations:"))
    moved = of_files and not Path(saved.data.partition(":")[2]).exists()
    for option, (saved_value, value) in saved.differences(asked).items():
        if option not in MAY_CHANGE and not (moved and option == "data"):
            raise ValueError(
                f"the run in {folder} has {option}={_setting_text(saved_value)}, and a run that "
                "goes on keeps "
                f"its settings, all but lr and the limits; leave {option}={_setting_text(value)} "
                "out, or train into another folder"
            )
    return asked


def train(
    name: str,
    folder: str | Path,
    overrides: dict[str, Any],
    *,
    data_root: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    progress: bool = True,
    log: str | None = None,
) -> tuple[Entry, Run]:
    """Train an entry and write its run folder.

    Under `torchrun` the first process alone checks the folder and writes into it.

    Args:
        name: one of `list_models()`.
        folder: where to write, from the first checkpoint on.
        overrides: fields of `Recipe` that differ from the defaults; on resuming, limits and lr that
            differ from the run's own.
        resume: continue from the folder's checkpoint.
        overwrite: replace an existing run in the folder at the new run's first checkpoint.
        log: "tensorboard" to write the history for TensorBoard as well.

    Raises:
        ValueError: the folder is in use, or a setting is not allowed; the folder is as it was.
        NonFiniteLoss: see `fit`.
    """
    folder = Path(folder)
    _check_folder(folder, resume, overwrite)
    usable_device(device)
    if "data" in overrides:
        overrides = {**overrides, "data": full_name(overrides["data"])}
    overrides = {
        **overrides,
        "settings": {k: _full(v) for k, v in overrides.get("settings", {}).items()},
    }
    make_writer = None if log is None else _tensorboard(log)
    made = find_registration(name)
    if resume:
        recipe = resume_recipe(folder, name, overrides)
    else:
        recipe = Recipe(name, **{"data": made.data, **overrides})
    refuse_among_pictures(folder, recipe.data)
    check_seed(recipe.seed)
    entry, data = _begin(recipe, made, data_root)
    arguments = recipe.for_fit(entry.training, device)
    if not recipe.limits:
        arguments = with_needed_steps(arguments, entry, data)
    recipe = replace(recipe, **made_by(entry), batch_size=arguments["batch_size"])
    named = predicts_labels(entry.model, entry.guide) and data.class_names
    config = recipe.config() | ({"class_names": named} if named else {})
    files = RunFolder(folder, entry, config, resume, make_writer)
    figures = f"; then it draws {', '.join(entry.figures)}" if entry.figures else ""
    title = f"training {name} on {len(data.train):,} images of {data.name}, {length_of(arguments)}"
    try:
        with announce_plan(f"{title}{figures}" if progress and is_first_process() else None):
            run = fit_entry(
                entry, data, write_line, files, **arguments, checks=Checks(progress=progress)
            )
    except NotImplementedError as error:
        if recipe.objective is None:
            raise
        raise ValueError(f"objective {recipe.objective} does not serve {name}") from error
    if run.steps == 0 and run.stopped != "interrupted":
        raise ValueError(f"training ended before its first step: {run.stopped}; give it more")
    if is_first_process():
        files.finish(run)
        if run.stopped != "interrupted" and predicts_labels(entry.model, entry.guide):
            _note_error_rate(entry, data.validation, folder)
        for figure in entry.figures:
            draw(entry, figure, lambda: data.test.images, folder)
    return entry, run


def with_needed_steps(arguments: dict[str, Any], entry: Entry, data: Dataset) -> dict[str, Any]:
    """Return arguments of `fit` with enough epochs for the steps of the stages."""
    needed = needed_steps(entry.stages(entry)) if entry.stages is not None else 0
    per_epoch = math.ceil(len(data.train) / arguments["batch_size"])
    if arguments.get("epochs", math.inf) * per_epoch >= needed:
        return arguments
    return {**arguments, "epochs": None, "steps": needed}


def _note_error_rate(entry: Entry, validation: Split, folder: Path) -> None:
    """Add the error rate on validation images, if any, to the metrics of a run."""
    if len(validation):
        rate = error_rate(entry.model, entry.guide, validation)
        for name, value in {"": rate.value, "_se": rate.se}.items():
            note(folder, f"validation_error_rate{name}", value)


def fit_entry(
    entry: Entry, data: Any, say: Callable[[str], None], files: "RunFolder | None", **arguments: Any
) -> Run:
    """Train an entry as a whole or, where it has stages, one stage after the other.

    Args:
        data: what `fit` takes; for stages a `Dataset`.
        files: the folder that gets checkpoints and whose run, if any, goes on; None to save none.
    """
    if files is not None:
        resume = files.checkpoint if files.has_checkpoint else None
        checks = Checks(checkpoint=files.save_checkpoint, resume=resume)
        arguments = combine_settings(arguments, {"checks": checks})
    stages = entry.stages(entry) if entry.stages is not None else ()
    try:
        if stages:
            return fit_stages(stages, data, say=say, **arguments)
        return fit(entry.model, entry.guide, data, **{"objective": entry.objective, **arguments})
    except NonFiniteLoss as error:
        last_checkpoint = files.checkpoint if files is not None and files.has_checkpoint else None
        raise NonFiniteLoss(error.step, error.site, last_checkpoint, error.restored) from error


def _full(value: Any) -> Any:
    """Return a setting with an absolute path if it is a run folder, for any working folder."""
    path = isinstance(value, str) and "/" in value and recipe_path(value)
    return str(Path(value).resolve()) if path else value


def _tensorboard(log: str) -> Callable[..., Any]:
    """Return a function that makes a writer of TensorBoard's events.

    Raises:
        ValueError: `log` is another word, or TensorBoard is not installed.
    """
    check_one_of("log", log, ("tensorboard",))
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "log='tensorboard' needs TensorBoard; install it by pip install tensorboard"
        ) from error
    return SummaryWriter


class RunFolder:
    """The folder of a run, into which nothing is written before the first checkpoint.

    Args:
        folder: its path.
        entry: the trained entry.
        config: contents of config.json, other than what rebuilds the entry.
        has_checkpoint: True if the folder already holds this run; by default, if it has a
            checkpoint.
        make_writer: makes a writer of TensorBoard's events, if they are wanted.
    """

    def __init__(
        self,
        folder: Path,
        entry: Entry,
        config: Mapping[str, Any],
        has_checkpoint: bool | None = None,
        make_writer: Callable[..., Any] | None = None,
    ) -> None:
        self.folder = folder
        self.entry = entry
        self.config = config
        self.checkpoint = folder / CHECKPOINT
        self.has_checkpoint = (
            self.checkpoint.is_file() if has_checkpoint is None else has_checkpoint
        )
        self.make_writer = make_writer
        self.writer: Any = None
        self.logged = 0  # rows that stand in history.csv

    def save_checkpoint(self, tree: dict) -> None:
        """Write a checkpoint; with the first one, write config.json and replace an older run."""
        save_checkpoint(self.checkpoint, tree)
        if not self.has_checkpoint:
            write_json(self.folder / "config.json", {**made_by(self.entry), **self.config})
            figures = [f"{figure}.png" for figure in self.entry.figures]
            for stale in (*TRAINED, *MEASURED, *figures):
                (self.folder / stale).unlink(missing_ok=True)
            for stale_events in self.folder.glob("events.out.tfevents.*"):
                stale_events.unlink()
            self.has_checkpoint = True
        self._log(history_of(tree["progress"]))

    def _log(self, history: DataFrame) -> None:
        """Add the new steps to history.csv; the first call replaces the history and the events."""
        new, path = history.iloc[self.logged :], self.folder / "history.csv"
        new.to_csv(path, mode="a" if self.logged else "w", header=not self.logged, index=False)
        self.logged = len(history)
        if self.make_writer is None:
            return
        if self.writer is None:
            self.writer = self.make_writer(self.folder, purge_step=1)  # hides events of old files
        for name in ("loss", "held_out", "gradient_norm", "lr"):
            for step, value in new.set_index("step")[name].dropna().items():
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self, run: Run) -> None:
        """Write the trained weights, the history and the metrics."""
        if self.writer is not None:
            self.writer.close()
        save_entry(self.entry, self.folder, **self.config)
        run.save(self.folder)


def _begin(recipe: Recipe, made: Registered, data_root: Path | None) -> tuple[Entry, Dataset]:
    """Return an untrained entry, and data resized to its images.

    Raises:
        ValueError: no recipe says how the run was trained, or a setting does not fit the entry.
    """
    arguments = made.with_preset(recipe.settings).arguments
    if recipe.experiment:
        raise ValueError(
            f"an experiment trained this run of {made.name}, in its own way; go on with it by that "
            "experiment: capsule-zoo reproduce"
        )
    for option, value in (("size", recipe.size), ("transform", recipe.transform)):
        if value is not None and "image_shape" not in arguments:
            raise ValueError(
                f"{made.name} observes points, which have no pixels: {option}={value} says "
                f"nothing to it; leave --{option} out"
            )
    shape = as_tuple(recipe.settings.get("image_shape"))
    if shape is not None and not fits(shape, tuple[int, int, int]):
        raise ValueError(
            f"image_shape must be [channels, height, width], not {_setting_text(shape)}"
        )
    trained = _make_untrained(recipe) if recipe.pair else None
    data = load_dataset(recipe.data, data_root, **_size_of_data(recipe, shape, trained))
    if shape is not None:
        data = data.with_channels(shape[0])
    if made.name in GRAY_ONLY and data.image_shape[0] > 1:
        warnings.warn(
            f"the images of {data.name!r} are in color, of which {made.name} draws blurs: make the "
            "pictures gray, or train scenes, which reads objects of one color each",
            stacklevel=2,
        )
    shapes: dict[str, Any] = {"image_shape": data.image_shape} if "image_shape" in arguments else {}
    if "classes" in arguments and data.num_classes > 1:
        shapes["classes"] = data.num_classes
    if made.name == "scenes":
        shapes |= data.settings
    elif data.settings:
        raise ValueError(
            f"{recipe.data} is read as tiles of whole pictures, for the entry scenes; give "
            f"{made.name} a folder of pictures of one size"
        )
    entry = trained or _make_untrained(recipe, {**shapes, **recipe.settings})
    if recipe.objective is not None:
        entry.objective = make_objective(recipe.objective)
    if entry.training.get("inputs", Inputs()).labels:
        check_classes(data)
    return entry, data


def _make_untrained(recipe: Recipe, settings: Mapping[str, Any] | None = None) -> Entry:
    """Return the untrained entry of a recipe: of its pair, or with settings."""
    made = find_registration(recipe.entry)
    pyro.set_rng_seed(recipe.seed)
    try:
        if settings is None:
            return rebuild(recipe.config())
        entry = made.create(dict(settings))
        return entry.use_guide(recipe.guide or entry.default_guide)
    except (RuntimeError, TypeError, ArithmeticError) as error:
        raise ValueError(
            f"{made.name} cannot be made with {_setting_text(recipe.settings)}: {error}"
        ) from error


def _size_of_data(
    recipe: Recipe, shape: tuple[int, int, int] | None, trained: Entry | None
) -> dict[str, Any]:
    """Return size and leveling with which the data of a recipe are read.

    The size of whole pictures is the width of an object, and not that of the model's images. A run
    that goes on has its leveling already.
    """
    if full_name(recipe.data).startswith("tiles:"):
        leveling = getattr(trained.model, "leveling", None) if trained else None
        return {"size": recipe.size, "leveling": leveling}
    return {"size": recipe.size or (None if shape is None else shape[1:])}


def check_classes(data: Dataset) -> None:
    """Raise ValueError unless a data set has labels of at least two classes."""
    labels_of(replace(data.train, name=data.name))
    if data.num_classes < 2:
        raise ValueError(
            f"the pictures of {data.name!r} are all of one class, and a classifier tells two or "
            "more apart; add a folder for each class, PATH/CLASS/PICTURE"
        )


def _check_folder(folder: Path, resume: bool, overwrite: bool) -> None:
    """Raise ValueError unless a run can be written into the folder or resumed there."""
    if resume and overwrite:
        raise ValueError("choose one of --resume and --overwrite")
    holds_run = (folder / "config.json").is_file()
    holds_checkpoint = (folder / CHECKPOINT).is_file()
    if resume and not holds_run:
        raise ValueError(f"{folder} holds no run; leave --resume out")
    if resume and not holds_checkpoint:
        raise ValueError(
            f"{folder} has no checkpoint to go on from; replace its run by --overwrite, or choose "
            "another folder"
        )
    if not is_first_process():
        return
    if resume or not is_in_use(folder):
        refuse_unwritable(folder)
        return
    if not (holds_run or holds_checkpoint):
        raise ValueError(f"{folder} is in use by something else than a run; choose another folder")
    if not overwrite:
        raise ValueError(
            f"{folder} is in use; go on with its run by --resume, replace it by --overwrite, "
            "or choose another folder"
        )


def refuse_unwritable(folder: Path) -> None:
    """Raise ValueError unless files can be written in the folder, which need not exist."""
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        TemporaryFile(dir=place).close()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error}; choose another folder") from error


def refuse_among_pictures(folder: Path, data: str) -> None:
    """Refuse an output folder inside the picture folder of a data set."""
    kind, _, path = full_name(data).partition(":")
    is_read = kind in ("folder", "tiles") and Path(path).is_dir()
    sides = sides_of(Path(path)) if is_read else ()
    if any(side is not None and folder.resolve().is_relative_to(side) for side in sides):
        raise ValueError(
            f"{folder} lies among the pictures of {path}, and its pictures would be read as "
            "theirs; choose a folder elsewhere by --out, or call this from there"
        )


def is_in_use(folder: Path) -> bool:
    """Return True if `folder` is a file or a folder that is not empty."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def open_run(
    source: str, data: str | None = None, data_root: Path | None = None, only_tests: bool = False
) -> tuple[Entry, Dataset, Path]:
    """Open a run: return its entry, data resized to its images, and the folder for results.

    Args:
        source: a run folder, or the name of trained weights, whose folder is then `runs/<name>`.
        data: a data set's name; by default the one that the entry was trained on.
        only_tests: True if training images are not needed; see `load_tests`.

    Raises:
        ValueError: neither a run nor trained weights, absent data, or a damaged file; or data of a
            class that a classifier was not trained on.
    """
    entry, folder, name, size = _open_pair(source, data, resize=True)
    return entry, _load_data(entry, source, name, size, data_root, only_tests), folder


def _load_data(
    entry: Entry,
    source: str,
    name: str,
    size: tuple[int, int] | None,
    data_root: Path | None,
    only_tests: bool,
) -> Dataset:
    """Load the data set of a run, as `_open_pair` names it, for the entry; see `open_run`."""
    leveling = getattr(entry.model, "leveling", None)
    if leveling is not None:
        kind, _, path = full_name(name).partition(":")
        if kind not in ("tiles", "folder"):
            raise ValueError(
                f"{source} reads whole pictures, and {name!r} holds none; give --data a picture or "
                "a folder of pictures"
            )
        name, size = f"tiles:{path}", None
    load_data = load_tests if only_tests else load_dataset
    dataset = load_data(name, data_root, size=size, leveling=leveling)
    if entry.observes_images:
        dataset = dataset.with_channels(entry.model.image_shape[0])
    trained = read_recipe(source).get("class_names")
    return dataset.match_classes(trained) if trained else dataset


def draw_of_run(
    source: str, name: str, data: str | None = None, data_root: Path | None = None
) -> Path:
    """Draw a figure of a run or of trained weights; data are loaded only if it shows images.

    Args:
        source, data, data_root: see `open_run`.

    Raises:
        ValueError: see `open_run` and `draw`.
    """
    entry, folder, of_run, size = _open_pair(source, data, resize=True)

    def load_images() -> Tensor:
        return _load_data(entry, source, of_run, size, data_root, only_tests=True).test.images

    return draw(entry, name, load_images, folder)


def open_pictures(
    source: str,
    data: str | None,
    data_root: Path | None,
    resize: bool,
    held_out: bool,
    out: Path | None,
) -> tuple[Entry, Split | list[Tensor], list[str], Path]:
    """Open a run for pictures: return its entry, test images or own pictures, files and `out`.

    Own pictures keep their sizes, in a list, if the run was trained on tiles of whole pictures.

    Args:
        out: the folder to write into; by default `objects` in the folder of the run.
        held_out: only the test images also of own pictures, and no names of files.
        source, data: see `open_run`.
        resize: resize the images to those that the entry was trained on.
    """
    entry, folder, name, size = _open_pair(source, data, resize)
    out = out or folder / "objects"
    refuse_unwritable(out)
    refuse_among_pictures(out, name)
    if (whole := whole_pictures_of(source, entry, data)) is not None:
        images, files = whole
        if held_out and len(images) < 5:
            raise ValueError(
                f"held_out asks for every fifth of five or more pictures, and {name} has "
                f"{len(images)}, which all trained; leave --held-out out"
            )
        step = 5 if held_out else 1
        return entry, images[::step], files[::step], out
    pictures = None if held_out else load_pictures(name, size)
    split, files = pictures or (load_tests(name, data_root, size=size).test, [])
    if files and size is not None:
        announce(
            f"pictures of other sizes are resized to {size[0]}x{size[1]} pixels, in which boxes "
            "and masks are measured; with a number of slots they keep their sizes"
        )
    if entry.observes_images:
        split = split.with_channels(entry.model.image_shape[0])
    return entry, split, files, out


def whole_pictures_of(
    source: str, entry: Entry, data: str | None
) -> tuple[list[Tensor], list[str]] | None:
    """Return the pictures and their names if a run reads whole pictures, and the data are such.

    Args:
        source, data: see `open_run`; `entry` is that of the source.

    Raises:
        ValueError: one whole picture for a run that was not trained on such pictures.
    """
    name = read_recipe(source).get("data", Recipe.data) if data is None else data
    kind, _, path = full_name(name).partition(":")
    is_of_whole = getattr(entry.model, "leveling", None) is not None
    if kind == "tiles" and not is_of_whole:
        raise ValueError(
            f"{source} was not trained on whole pictures, and does not know how large objects are "
            f"in {path}; train on it, with capsule-zoo train scenes --data {path}, or give a "
            "folder of pictures like the training pictures"
        )
    if not is_of_whole or kind not in ("tiles", "folder"):
        return None
    return read_whole_pictures(Path(path))


def _open_pair(
    source: str, data: str | None, resize: bool
) -> tuple[Entry, Path, str, tuple[int, int] | None]:
    """Open a run: return its entry, the folder for results, the name and the size of its data."""
    entry, folder = load(source), Path(source)
    if not (folder / "config.json").is_file():  # trained weights
        folder = Path("runs") / folder.name
    read_metrics(folder)
    name = read_recipe(source).get("data", Recipe.data) if data is None else data
    images = entry.observes_images
    if images and name.partition(":")[0] == "constellations":
        raise ValueError(
            f"{source} reads images, and {name} holds scenes of points; give --data of images, or "
            "a run of constellations"
        )
    size = entry.model.image_shape[1:] if resize and images else None
    return entry, folder, name, size


def draw(entry: Entry, name: str, load_images: Callable[[], Tensor], folder: Path) -> Path:
    """Draw one of an entry's figures into a folder; models of images have `samples`.

    Args:
        load_images: returns test images, for figures that show images.

    Raises:
        ValueError: the entry has no such figure; the message names its figures.
    """
    draws_images = entry.observes_images and not isinstance(entry.model, Classifier)
    figures = entry.figures or ({"samples": samples} if draws_images else {})
    if not figures:
        raise ValueError(f"{entry.name or 'this pair'} has no figures, and so none called {name!r}")
    check_known("figure", name, figures)
    announce(f"drawing {name}")
    path = folder / f"{name}.png"
    save_figure(draw_figure(figures[name], entry, load_images), path)
    return path


def read_metrics(folder: Path) -> dict[str, Any]:
    """Read a folder's `metrics.json`; an empty dict if there is no file.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / "metrics.json"
    if not path.is_file():
        return {}
    try:
        metrics = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); remove it") from error
    if not isinstance(metrics, dict):
        raise CheckpointError(f"{path} holds a {type(metrics).__name__}, not metrics; remove it")
    return metrics


def note(folder: Path, key: str, results: Any) -> None:
    """Add results to the folder's `metrics.json`; other results stay."""
    write_json(folder / "metrics.json", plain({**read_metrics(folder), key: results}))


def _setting_text(value: Any) -> str:
    """Return a setting as text that `--set` reads."""
    return json.dumps(plain(value))
