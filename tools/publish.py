"""Add a run's weights to the zoo's trained weights, with a card that states their origin.

    python tools/publish.py runs/part-whole-mnist-0 part-whole-mnist --record part-whole/classify

The tests measure the headline of every card in `weights/` again.
"""

import argparse
import json
import re
import shlex
from pathlib import Path

from capsule_zoo import registry
from capsule_zoo.records import machine, plain, read_record, versions
from capsule_zoo.registry import NAME, create, read_recipe, save_weights
from capsule_zoo.runs.cards import examine
from capsule_zoo.runs.folder import open_run, read_metrics
from capsule_zoo.settings import flat

FIELDS = (
    *("entry", "guide", "pair", "what", "data", "split", "seed", "training"),
    *("headline", "checks", "records"),
)


def publish(
    source: str,
    name: str,
    experiments: list[str],
    data_root: Path | None = None,
    *,
    into: Path | None = None,
    overwrite: bool = False,
) -> Path:
    """Publish a run's weights: add them and their card to the zoo's trained weights.

    The card holds the recipe, the command that trained the run, versions, machine, data and its
    splits, the headline and the checks of `examine`, and the metrics of each experiment's record.
    Published weights may be published again: the records on their card are then read again, and
    further records are added.

    Args:
        source: a run folder, or the name of trained weights.
        name: name of the weights, lower case with hyphens.
        experiments: experiments whose records go on the card.
        into: the folder to write into; the zoo's own weights by default.
        overwrite: replace weights of that name.

    Returns:
        The path of the card.

    Raises:
        ValueError: a name that is taken or not of that form, neither a run nor trained weights, an
            experiment without a record or with a record of other weights, absent data, or weights
            that fail a check.
    """
    if not re.fullmatch(NAME, name):
        raise ValueError(
            f"trained weights are named in lower case with hyphens, such as part-whole-mnist, "
            f"not {name!r}"
        )
    card_path = (registry.WEIGHTS if into is None else into) / f"{name}.json"
    for path in (card_path, card_path.with_suffix(".safetensors")):
        if path.exists() and not overwrite:
            raise ValueError(
                f"{path} exists; replace these weights by --overwrite, or choose another name"
            )
    made = read_recipe(source)
    training = made.get("training") or _training_of(made, Path(source))
    experiment_names = dict.fromkeys([*made.get("records", {}), *experiments])
    records = {experiment: read_record(experiment) for experiment in experiment_names}
    for experiment, record in records.items():
        if not is_of(record, training["command"], name, source):
            raise ValueError(
                f"the record {experiment} is not of {name}: its command is {record['command']!r}; "
                f"measure these weights by --run {name}, or leave the record out"
            )
    entry, data, _ = open_run(source, data_root=data_root)
    card = {key: made[key] for key in ("data", "seed", "class_names") if key in made}
    card["training"] = training
    card |= examine(entry, data)
    card["records"] = {e: {k: r[k] for k in ("command", "metrics")} for e, r in records.items()}
    save_weights(entry, card_path, plain(card))
    return card_path


def is_of(record: dict, trained_by: str, *names: str) -> bool:
    """Return whether a record measures the given weights, and not another training.

    It does if the command that trained the weights also made the record, or if the record names
    the weights.

    Args:
        trained_by: the command that trained the weights.
        names: the names that the weights have had: their own, and the folder of their run.
    """
    arguments = shlex.split(record["command"])
    run = arguments[arguments.index("--run") + 1] if "--run" in arguments else None
    settings = json.dumps(record.get("settings", {}))
    return (
        record["command"] == trained_by
        or run in names
        or any(f'"{name}"' in settings for name in names)
    )


def _training_of(made: dict, folder: Path) -> dict:
    """Return a card's fields on the training of a run: command, versions, machine, metrics."""
    metrics = read_metrics(folder)
    if "steps" not in metrics:
        raise ValueError(f"the run in {folder} has not ended; go on with it by --resume first")
    metrics.pop("outcome", None)  # the outcome of a study
    command = _command(made, folder)
    return {"command": command, "versions": versions(), "machine": machine(), **metrics}


def _command(made: dict, folder: Path) -> str:
    """Return the command that reproduces a run: its study's, or its recipe's."""
    study = folder.parent / "config.json"
    if study.is_file() and "command" in (above := json.loads(study.read_text())):
        return above["command"]
    if "limits" not in made or made.get("experiment"):
        raise ValueError(f"{folder} is of a study, whose config.json must lie above; move it there")
    of_data = ("image_shape", "classes")
    settings = {k: v for k, v in flat(made["settings"]).items() if k not in of_data}
    options = {key: made.get(key) for key in ("size", "batch_size", "lr", "transform", "objective")}
    parts = ["capsule-zoo", *(f"--import {module}" for module in made.get("modules", []))]
    data = shlex.quote(made["data"])
    parts += [f"train {made['entry']} --data {data} --seed {made['seed']}"]
    if made["guide"] != create(made["entry"]).default_guide:
        parts.append(f"--guide {made['guide']}")
    parts += [
        f"--set {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in settings.items()
    ]
    for name, value in {**options, **made["limits"]}.items():
        if value is not None:
            text = f"{value:.15g}" if isinstance(value, float | int) else value
            parts.append(f"--{name.replace('_', '-')} {text}")
    return " ".join(parts)


def main() -> None:
    """Publish a run with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=publish.__doc__.partition("\n")[0])
    parser.add_argument("source", help="a run folder, or the name of trained weights")
    parser.add_argument("name", help="name for the weights")
    parser.add_argument("--record", action="append", default=[], help="goes on the card")
    parser.add_argument("--into", type=Path, help="folder (default: the zoo's weights)")
    parser.add_argument("--overwrite", action="store_true", help="replace weights of that name")
    arguments = parser.parse_args()
    path = publish(
        arguments.source,
        arguments.name,
        arguments.record,
        into=arguments.into,
        overwrite=arguments.overwrite,
    )
    print(f"card written to {path}")


if __name__ == "__main__":
    main()
