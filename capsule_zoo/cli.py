"""The command line: `capsule-zoo --help`.

Every command imports what it needs when it is called, so that help and lists come at once. What a
user can mend (a wrong name, absent data, a damaged file, a loss that is not finite) is told in a
line or two, without a traceback, and ends the program with status 2.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from capsule_zoo import selfcheck
from capsule_zoo.explore.notebook import explore
from capsule_zoo.report import report

app = typer.Typer(
    name="capsule-zoo",
    help="Capsule models as joint distributions; routings as guides and objectives over them.",
    epilog="Begin with: capsule-zoo reproduce part-whole/digits",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run folder, or the name of trained weights.")
]
Data = Annotated[
    str | None,
    typer.Option("--data", help="Data set, or folder:PATH.  [default: the one trained on]"),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(help="Folder with torchvision's own.  [default: $CAPSULE_ZOO_DATA, or download]"),
]
Images = Annotated[int, typer.Option(help="How many test images.", min=1)]
Particles = Annotated[int, typer.Option(help="Draws for each image, K.", min=1)]
Seed = Annotated[int, typer.Option(help="Of everything that is random.", min=0)]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the metrics as one JSON object on the last line.")
]
Device = Annotated[str, typer.Option(help="A torch device, such as cuda.")]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; status 2 for what the user can mend."""
    try:
        app(args=arguments)
    except (ValueError, OSError, RuntimeError) as error:
        from capsule_zoo.inference import NonFiniteLoss

        if not isinstance(error, (ValueError, OSError, NonFiniteLoss)):
            raise
        print(f"capsule-zoo: {error}", file=sys.stderr)
        sys.exit(2)


@app.command("list")
def list_entries(
    pattern: Annotated[str, typer.Argument(help='Such as "part*".')] = "*",
    as_json: AsJson = False,
) -> None:
    """Say which entries there are.

    \b
    Examples:
      capsule-zoo list
      capsule-zoo list "part*"
    """
    from capsule_zoo.registry import describe, list_models

    found = {name: describe(name) for name in list_models(pattern)}
    if not found:
        raise ValueError(f"no entry matches {pattern!r}; there are {list_models()}")
    for name, words in found.items():
        print(f"{name:{max(map(len, found))}}  {words}")
    _print_json(as_json, found)


@app.command()
def train(
    entry: Annotated[str, typer.Argument(metavar="ENTRY", help="See: capsule-zoo list.")],
    data: Annotated[
        str | None, typer.Option(help="Data set, or folder:PATH.  [default: digits]")
    ] = None,
    data_root: DataRoot = None,
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
      capsule-zoo train part-whole --data folder:pictures --transform rotate=20 --out runs/mine
      capsule-zoo train part-whole --data mnist --minutes 60 --resume
    """
    from capsule_zoo import runs

    limits = {"epochs": epochs, "steps": steps, "minutes": minutes}
    given: dict[str, Any] = {
        "data": data,
        "sizes": _read_sizes(set_) or None,
        "guide": guide,
        "seed": seed,
        "batch_size": batch_size,
        "lr": lr,
        "transform": transform,
        "limits": {name: limit for name, limit in limits.items() if limit is not None} or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    folder = out or _run_folder(entry, given.get("data", "digits"), given.get("seed", 0))
    _, run = runs.train(
        entry,
        folder,
        given,
        data_root=data_root,
        resume=resume,
        overwrite=overwrite,
        device=device,
    )
    _print_metrics(run.metrics)
    print(f"written to {folder}; now try: capsule-zoo evaluate {shlex.quote(str(folder))}")
    _print_json(as_json, run.metrics)


@app.command()
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
    _print_metrics(found)
    if not found["is_bound"]:
        print("the guide places points, so map_objective is no bound; see: capsule-zoo compare")
    _print_json(as_json, found)


@app.command()
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
    table = runs.compare_run(
        entry,
        dataset,
        names,
        tune_steps=tune_steps,
        images=images,
        particles=particles,
        seed=seed,
    )
    print(table.drop(columns="is_bound").dropna(axis=1, how="all").round(3).to_string(na_rep=""))
    write_whole(folder / "compare.csv", table.to_csv(index_label="guide").encode())
    save_figure(table.plot(), folder / "compare.png")
    found = table.to_dict(orient="index")
    runs.note(folder, "compare", found)
    print(f"drawn in {folder / 'compare.png'}")
    _print_json(as_json, found)


@app.command()
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
    from capsule_zoo.records import save_figure
    from capsule_zoo.registry import load

    means = runs.sample_means(load(run), n, seed)
    columns = math.ceil(math.sqrt(n))
    rows = {f"{i * columns + 1}": row for i, row in enumerate(means.split(columns))}
    path = runs.output_folder(run) / "draws.png"
    save_figure(image_rows(rows, f"Samples from the prior of {run}"), path)
    print(f"drawn in {path}")
    _print_json(as_json, {"samples": n, "seed": seed, "figure": str(path)})


@app.command()
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
    _print_json(as_json, {"figure": str(path)})


@app.command()
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


@app.command()
def reproduce(
    experiment: Annotated[
        str | None, typer.Argument(metavar="EXPERIMENT", help="Leave out for a list.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Training time.  [default: a full run]")
    ] = None,
    seed: Seed = 0,
    data_root: DataRoot = None,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Where records are written.")] = Path("results"),
    keep: Annotated[
        Path | None, typer.Option(help="Keep what was trained in this run folder.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Measure this run, or these weights, without training.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment; write its record and figures. Without a name, list the experiments.

    \b
    Examples:
      capsule-zoo reproduce
      capsule-zoo reproduce part-whole/digits
      capsule-zoo reproduce part-whole/digits --minutes 1 --seed 3 --out elsewhere
    """
    from capsule_zoo import experiments

    if experiment is None:
        names = experiments.list_experiments()
        found: dict = {name: experiments.find_experiment(name).summary for name in names}
        for name, words in found.items():
            print(f"{name:28}{words}")
    else:
        options = experiments.Options(
            minutes=minutes, seed=seed, data_root=data_root, device=device, run=run
        )
        result, path = experiments.reproduce(experiment, options, folder=out, keep=keep)
        if result.table is not None:
            print(result.table.round(3).to_string(na_rep=""))
        _print_metrics({name: metric[:2] for name, metric in result.metrics.items()})
        print(f"written to {path} and figures beside it")
        found = experiments.as_metrics(result)
    _print_json(as_json, found)


def _read_sizes(words: list[str] | None) -> dict[str, Any]:
    """`objects=16`, `layers=[4,8]` as a dict; what is not JSON is a string."""
    sizes = {}
    for word in words or []:
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


def _print_metrics(metrics: dict[str, Any]) -> None:
    """One line each; a pair is a value and its standard error."""
    for name, value in metrics.items():
        value, error = value if isinstance(value, tuple) else (value, metrics.get(f"{name}_se"))
        if name.endswith("_se") or value != value:
            continue
        words = f"{value:.4g}" if isinstance(value, float) else str(value)
        print(f"{name:24}{words}" + ("" if error is None else f" (s.e. {error:.2g})"))


def _print_json(wanted: bool, found: dict) -> None:
    if wanted:
        from capsule_zoo.runs import plain

        print(json.dumps(plain(found)), flush=True)


app.command()(explore)
app.command("selfcheck")(selfcheck.command)
app.command()(report)
