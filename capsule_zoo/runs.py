"""Run folders: what `capsule-zoo train` writes, and what the other commands read and add to.

A folder holds

    config.json               how to make the entry and the run again
    model.safetensors         the trained weights, and guide.safetensors beside them
    history.csv               one row a step
    metrics.json              what training, evaluation and comparison found
    checkpoint.safetensors    for `--resume`
    *.png                     the entry's figures
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyro
from torch import Tensor

from capsule_zoo.cards import examine
from capsule_zoo.data import Dataset, load_dataset, transforms
from capsule_zoo.inference import Comparison, Run, compare, evaluate, fit, summarize, widen
from capsule_zoo.records import machine, read_record, save_figure, versions, write_json
from capsule_zoo.registry import (
    Entry,
    create,
    load,
    read_recipe,
    recipe,
    save,
    save_weights,
    unknown,
)

if TYPE_CHECKING:
    from torch import nn

LIMITS = ("epochs", "steps", "minutes")
DEFAULTS: dict[str, Any] = {
    "data": "digits",
    "size": None,
    "sizes": {},
    "guide": None,
    "seed": 0,
    "batch_size": 128,
    "lr": None,
    "transform": None,
    "limits": {},
}
TRANSFORMS = {
    "rotate": transforms.Rotate,
    "shift": lambda number: transforms.Shift(int(number) if number.is_integer() else number),
}
WIDEN_IMAGES = 2000


def train(
    name: str,
    folder: Path,
    given: dict[str, Any],
    *,
    data_root: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    progress: bool = True,
) -> tuple[Entry, Run]:
    """Train an entry and write its run folder.

    Args:
        name: one of `list_models()`.
        folder: where to write.
        given: settings that differ from `DEFAULTS`; on resuming, from those of the run.
        resume: go on from the folder's checkpoint.
        overwrite: replace a run that lies in the folder.

    Raises:
        ValueError: the folder is in use, or a setting is not allowed.
    """
    _check_folder(folder, resume, overwrite)
    before = _settings_of(folder, name) if resume else {}
    settings = {**DEFAULTS, **before, **given}
    transform = make_transform(settings["transform"])
    entry, data = _begin(name, settings, data_root)
    config = {key: settings[key] for key in DEFAULTS if key not in ("sizes", "guide")}
    write_json(folder / "config.json", {**recipe(entry), **config})
    checkpoint = folder / "checkpoint.safetensors"
    run = fit(
        entry.model,
        entry.guide,
        data,
        objective=entry.objective,
        transform=transform,
        seed=settings["seed"],
        batch_size=settings["batch_size"],
        checkpoint=checkpoint,
        resume=checkpoint if resume else None,
        device=device,
        progress=progress,
        **_training(entry, settings["lr"], settings["limits"]),
    )
    save(entry, folder, **config)
    run.save(folder)
    for figure in entry.figures:
        draw(entry, figure, data.test.images, folder)
    return entry, run


def _begin(name: str, settings: dict[str, Any], data_root: Path | None) -> tuple[Entry, Dataset]:
    """An untrained entry, and data of the size that it takes, as settings ask for them."""
    shape = settings["sizes"].get("image_shape")
    size = settings["size"] or (None if shape is None else shape[1:])
    data = load_dataset(settings["data"], data_root, size=size)
    pyro.set_rng_seed(settings["seed"])
    entry = create(name, **{"image_shape": data.image_shape, **settings["sizes"]})
    return entry.use_guide(settings["guide"] or entry.default_guide), data


def _check_folder(folder: Path, resume: bool, overwrite: bool) -> None:
    """Raise ValueError where a run would lie on something else."""
    if resume and overwrite:
        raise ValueError("choose one of --resume and --overwrite")
    if in_use(folder) and not (resume or overwrite):
        raise ValueError(
            f"{folder} is in use; go on with its run by --resume, replace it by --overwrite, "
            "or choose another folder"
        )


def in_use(folder: Path) -> bool:
    """Whether something lies there that a run would lie on."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def make_transform(words: str | None) -> Any:
    """The transform called `rotate=DEGREES` or `shift=PIXELS`, or None.

    Raises:
        ValueError: there is no such transform, or its number is not one.
    """
    if words is None:
        return None
    name, _, number = words.partition("=")
    if name not in TRANSFORMS:
        raise ValueError(unknown("transform", name, list(TRANSFORMS)))
    try:
        return TRANSFORMS[name](float(number))
    except ValueError as error:
        raise ValueError(f"transform {words!r} is not of the form {name}=20: {error}") from error


def open_run(
    source: str, data: str | None = None, data_root: Path | None = None
) -> tuple[Entry, Dataset, Path]:
    """A trained entry, data of the size that it takes, and the folder for what is found.

    Args:
        source: a run folder, or the name of trained weights, whose folder is then `runs/<name>`.
        data: a data set's name; by default the one that the entry was trained on.
    """
    entry = load(source)
    name = data or read_recipe(source).get("data", DEFAULTS["data"])
    dataset = load_dataset(name, data_root, size=entry.model.image_shape[1:])
    return entry, dataset, output_folder(source)


def output_folder(source: str) -> Path:
    """Where findings about a trained entry go: its run folder, or `runs/<name>` for weights."""
    folder = Path(source)
    return folder if (folder / "config.json").is_file() else Path("runs") / folder.name


def evaluate_run(entry: Entry, data: Dataset, *, images: int, particles: int, seed: int) -> dict:
    """Held-out bounds on the discrete model; see `capsule_zoo.inference.summarize`."""
    idata = evaluate(
        entry.model,
        entry.guide,
        data.test[:images],
        num_particles=particles,
        seed=seed,
        draws=0,
    )
    return {"data": data.test.name, "guide": entry.default_guide, **summarize(idata)}


def compare_run(
    entry: Entry,
    data: Dataset,
    guides: list[str],
    *,
    tune_steps: int,
    images: int,
    particles: int,
    seed: int,
    progress: bool = True,
) -> Comparison:
    """Guides to one trained model, side by side.

    The entry's own guide is taken as it is; every other is made from the entry and tuned on
    training images with the model frozen. A guide of points gets two rows: its MAP objective,
    which is no bound, and `<name>, widened`, which is.
    """
    pairs: dict[str, tuple[nn.Module, nn.Module]] = {}
    for name in guides:
        guide = entry.guide
        if name != entry.default_guide:
            guide = entry.make_guide(name)
            fit(
                entry.model,
                guide,
                data.train,
                objective=entry.objective,
                freeze="model",
                seed=seed,
                progress=progress,
                **_training(entry, None, {"steps": tune_steps}),
            )
        pairs[name] = (entry.model, guide)
        glance = evaluate(entry.model, guide, data.test[:2], num_particles=1, draws=0)
        if not glance.attrs["is_bound"]:
            wide = widen(entry.model, guide, data.train[:WIDEN_IMAGES], seed=seed)
            pairs[f"{name}, widened"] = (entry.model, wide)
    return compare(pairs, data.test[:images], num_particles=particles, seed=seed)


def draw(entry: Entry, name: str, images: Tensor, folder: Path) -> Path:
    """Write one of the entry's figures into a folder.

    Raises:
        ValueError: the entry has no such figure; says which it has.
    """
    if name not in entry.figures:
        raise ValueError(unknown("figure", name, list(entry.figures)))
    path = folder / f"{name}.png"
    save_figure(entry.figures[name](entry, images), path)
    return path


def publish(source: str, name: str, experiments: list[str], data_root: Path | None = None) -> Path:
    """Put a run's weights and their card among the zoo's trained weights.

    The card holds the recipe, the command that trained the run, versions, machine, data and its
    splits, the headline and the checks of `cards.examine`, and the metrics of each experiment's
    record. Weights that were published before may be published again: the records on their card are
    read again, and others added.

    Returns:
        The path of the card.

    Raises:
        ValueError: neither a run nor trained weights, an experiment without a record, absent data,
            or weights that fail a check.
    """
    made, folder = read_recipe(source), Path(source)
    training = made.get("training")
    if training is None:
        limits = " ".join(f"--{key} {value:g}" for key, value in made["limits"].items())
        command = f"capsule-zoo train {made['entry']} --data {made['data']} --seed {made['seed']}"
        metrics = json.loads((folder / "metrics.json").read_text())
        training = {"command": f"{command} {limits}".strip(), "versions": versions()}
        training |= {"machine": machine(), **metrics}
    shown = dict.fromkeys([*made.get("records", {}), *experiments])
    records = {experiment: read_record(experiment) for experiment in shown}
    entry, data, _ = open_run(source, data_root=data_root)
    card = {"data": made["data"], "seed": made["seed"], "training": training}
    card |= examine(entry, data)
    card["records"] = {e: {k: r[k] for k in ("command", "metrics")} for e, r in records.items()}
    return save_weights(entry, name, plain(card))


def note(folder: Path, key: str, found: dict) -> None:
    """Put what was found into the folder's `metrics.json`, beside what is there."""
    path = folder / "metrics.json"
    metrics = json.loads(path.read_text()) if path.is_file() else {}
    write_json(path, plain({**metrics, key: found}))


def plain(value: Any) -> Any:
    """The same in types that JSON knows; what is not finite becomes None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _settings_of(folder: Path, name: str) -> dict[str, Any]:
    """The settings that a run folder was trained with."""
    saved = read_recipe(folder)
    if saved["entry"] != name:
        raise ValueError(f"{folder} holds a run of {saved['entry']!r}, not of {name!r}")
    return {key: saved[key] for key in DEFAULTS if key in saved}


def _training(entry: Entry, lr: float | None, limits: dict[str, float]) -> dict[str, Any]:
    """Settings for `fit`: the entry's own, under what the user gave."""
    settings = dict(entry.training)
    if lr is not None:
        settings["lr"] = lr
    if limits:
        settings = {key: value for key, value in settings.items() if key not in LIMITS} | limits
    if not any(key in settings for key in LIMITS):
        settings["epochs"] = 10
    return settings
