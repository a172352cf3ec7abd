"""Commands about run folders and trained weights; what they do is in `capsule_zoo.runs`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from capsule_zoo.terminal import (
    AsJson,
    Data,
    DataRoot,
    Device,
    Images,
    Particles,
    RunArgument,
    Seed,
    print_json,
    print_metrics,
)


def train(
    entry: Annotated[str, typer.Argument(metavar="ENTRY", help="See: capsule-zoo list.")],
    data: Annotated[
        str | None, typer.Option(help="Data set, or folder:PATH.  [default: digits]")
    ] = None,
    data_root: DataRoot = None,
    size: Annotated[
        str | None,
        typer.Option(help="Pixels of the images, such as 28, or 28x20 (height x width)."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data.  [default: the entry's, or 10]")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Wall time.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything that is random.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images a step.  [default: 128]")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.  [default: entry's]")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A size, as JSON; may be repeated."),
    ] = None,
    guide: Annotated[
        str | None, typer.Option(help="One of the entry's guides.  [default: its own]")
    ] = None,
    transform: Annotated[str | None, typer.Option(help="rotate=DEGREES or shift=PIXELS.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder.  [default: runs/ENTRY-DATA-SEED]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the folder's run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace its run.")] = False,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Train an entry on a data set and write a run folder.

    Training ends at the first of --epochs, --steps and --minutes. Ctrl-C ends it in good order;
    --resume goes on, with the settings of the run unless others are given.

    \b
    Examples:
      capsule-zoo train part-whole --minutes 3
      capsule-zoo train part-whole --data mnist --minutes 30 --set objects=24 --set parts=32
      capsule-zoo train part-whole --data folder:pictures --size 28 --out runs/mine
      capsule-zoo train part-whole --transform rotate=20
      capsule-zoo train part-whole --data mnist --minutes 60 --resume
    """
    from capsule_zoo import runs

    limits = _given(epochs=epochs, steps=steps, minutes=minutes)
    given = _given(
        data=data,
        size=size,
        sizes=_read_sizes(set_),
        guide=guide,
        seed=seed,
        batch_size=batch_size,
        lr=lr,
        transform=transform,
        limits=limits or None,
    )
    folder = out or _run_folder(entry, given.get("data", "digits"), given.get("seed", 0))
    _, run = runs.train(
        entry, folder, given, data_root=data_root, resume=resume, overwrite=overwrite, device=device
    )
    print_metrics(run.metrics)
    print(f"written to {folder}; now try: capsule-zoo evaluate {shlex.quote(str(folder))}")
    print_json(as_json, run.metrics)


def evaluate(
    run: RunArgument,
    data: Data = None,
    data_root: DataRoot = None,
    images: Images = 1000,
    particles: Particles = 50,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Bounds on held-out images, on the discrete model, in nats per image.

    The result is added to the run's metrics.json.

    \b
    Examples:
      capsule-zoo evaluate runs/part-whole-digits-0
      capsule-zoo evaluate runs/part-whole-mnist-0 --data rotated-mnist --particles 1000 --json
    """
    from capsule_zoo import runs

    entry, dataset, folder = runs.open_run(run, data, data_root)
    found = runs.evaluate_run(entry, dataset, images=images, particles=particles, seed=seed)
    runs.note(folder, "evaluate", found)
    print_metrics(found)
    if not found["is_bound"]:
        print("the guide places points, so map_objective is no bound; see: capsule-zoo compare")
    print_json(as_json, found)


def compare(
    run: RunArgument,
    guides: Annotated[
        str | None, typer.Option(help="Names with commas between.  [default: all that fit]")
    ] = None,
    tune_steps: Annotated[
        int, typer.Option(help="Training steps for every guide but the run's own.", min=1)
    ] = 200,
    data: Data = None,
    data_root: DataRoot = None,
    images: Images = 200,
    particles: Particles = 50,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Guides to one trained model side by side, on the same held-out images.

    The run's own guide is taken as it is, others are tuned with the model frozen. A guide of points
    is shown as what it is, no bound, and widened into a bound. Writes compare.csv and compare.png.

    \b
    Examples:
      capsule-zoo compare runs/part-whole-digits-0
      capsule-zoo compare runs/part-whole-digits-0 --guides delta,normal --tune-steps 500
    """
    from capsule_zoo import runs
    from capsule_zoo.data.files import write_whole
    from capsule_zoo.records import save_figure

    entry, dataset, folder = runs.open_run(run, data, data_root)
    names = [name.strip() for name in guides.split(",")] if guides else list(entry.guides)
    shared: dict[str, Any] = dict(images=images, particles=particles, seed=seed)
    table = runs.compare_run(entry, dataset, names, tune_steps=tune_steps, **shared)
    print(table.drop(columns="is_bound").dropna(axis=1, how="all").round(3).to_string(na_rep=""))
    write_whole(folder / "compare.csv", table.to_csv(index_label="guide").encode())
    save_figure(table.plot(), folder / "compare.png")
    found = table.to_dict(orient="index")
    runs.note(folder, "compare", found)
    print(f"drawn in {folder / 'compare.png'}")
    print_json(as_json, found)


def sample(
    run: RunArgument,
    n: Annotated[int, typer.Option("--n", help="How many.", min=1, max=400)] = 36,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Draw images from the trained prior into draws.png: means, without pixel noise.

    \b
    Example:
      capsule-zoo sample runs/part-whole-digits-0 --n 64
    """
    import math

    from capsule_zoo import runs
    from capsule_zoo.figures import image_rows
    from capsule_zoo.inference.ancestral import mean_images
    from capsule_zoo.records import save_figure
    from capsule_zoo.registry import load

    means = mean_images(load(run).model, n, seed=seed)
    columns = math.ceil(math.sqrt(n))
    rows = {f"{i * columns + 1}": row for i, row in enumerate(means.split(columns))}
    path = runs.output_folder(run) / "draws.png"
    save_figure(image_rows(rows, f"Samples from the prior of {run}"), path)
    print(f"drawn in {path}")
    print_json(as_json, {"samples": n, "seed": seed, "figure": str(path)})


def figure(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of the entry's figures.")],
    run: RunArgument,
    data: Data = None,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Draw one of the entry's figures, from test images, into the run folder.

    \b
    Example:
      capsule-zoo figure parses runs/part-whole-digits-0
    """
    from capsule_zoo import runs

    entry, dataset, folder = runs.open_run(run, data, data_root)
    path = runs.draw(entry, name, dataset.test.images, folder)
    print(f"drawn in {path}")
    print_json(as_json, {"figure": str(path)})


def publish(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the trained weights.")],
    record: Annotated[
        list[str] | None,
        typer.Option(help="Experiment whose record goes on the card; may be repeated."),
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Put a run's weights among the zoo's, with a card that says where they come from.

    \b
    Example:
      capsule-zoo publish runs/part-whole-mnist-0 part-whole-mnist --record part-whole/classify
    """
    from capsule_zoo import runs

    path = runs.publish(run, name, record or [], data_root)
    print(f"card written to {path}")


def _given(**settings: Any) -> dict[str, Any]:
    """The settings that the user chose."""
    return {name: value for name, value in settings.items() if value is not None}


def _read_sizes(words: list[str] | None) -> dict[str, Any] | None:
    """`objects=16`, `layers=[4,8]` as a dict; what is not JSON is a string."""
    if not words:
        return None
    sizes = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key.isidentifier() and equals):
            raise ValueError(f"--set takes KEY=VALUE, such as objects=16, not {word!r}")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        sizes[key] = tuple(parsed) if isinstance(parsed, list) else parsed
    return sizes


def _run_folder(entry: str, data: str, seed: int) -> Path:
    kind, _, path = data.partition(":")
    return Path("runs") / f"{entry}-{Path(path).name or kind}-{seed}"
