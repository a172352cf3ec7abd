"""Commands about run folders and trained weights; `capsule_zoo.runs` does the work."""

import shlex
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from capsule_zoo.cli.options import (
    AsJson,
    Data,
    DataRoot,
    Device,
    Images,
    Particles,
    Quiet,
    RunArgument,
    Seed,
    print_json,
    print_metrics,
    read_settings,
    user_settings,
)

INTERRUPTED = 130  # exit status of a program that Ctrl-C or SIGTERM ended


def train(
    entry: Annotated[str, typer.Argument(metavar="ENTRY", help="See: capsule-zoo list.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set, a folder or .npz file of pictures, or one picture for scenes.  "
            "[default: the entry's own]"
        ),
    ] = None,
    data_root: DataRoot = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="Resize images to pixels: 28, or 28x20 (height x width). Of one picture, and of "
            "tiles:PATH, it is the width of an object.  [default: as is; the width is guessed]"
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Stop after this many epochs.  [default: see above]")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many optimizer steps.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop training after this many minutes; figures come on top."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of all random numbers.  [default: 0]")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images in a step.  [default: the entry's own, or 128]")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate.  [default: the entry's own]")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the entry, as JSON or none; see show. May be repeated.",
        ),
    ] = None,
    guide: Annotated[
        str | None,
        typer.Option(help="One of the entry's guides; see show.  [default: the entry's own]"),
    ] = None,
    transform: Annotated[
        str | None, typer.Option(help="Move images at random: rotate=DEGREES or shift=PIXELS.")
    ] = None,
    objective: Annotated[
        str | None, typer.Option(help="Objective, such as Trace_ELBO.  [default: the entry's own]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder.  [default: runs/ENTRY-DATA-SEED]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in the folder.")
    ] = False,
    log: Annotated[
        str | None,
        typer.Option(help="tensorboard: also write its event files into the run folder."),
    ] = None,
    device: Device = "cpu",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train an entry on a data set and write a run folder.

    Training ends at the first of --epochs, --steps and --minutes; without any of them at the
    entry's own limit, or after 10 epochs. An entry that is trained in stages then has at least the
    steps that its stages need; if a limit gives them fewer, a warning says so at the end. --minutes
    is the time of training only: the start of the program and the figures at the end take their
    own. A classifier then gets an error rate on its validation images. Ctrl-C or SIGTERM ends
    training cleanly with status 130.

    --resume continues with the settings of the run; only the limits and --lr may change. Nothing is
    written before the first checkpoint, and --overwrite keeps the old run until then. Every
    checkpoint adds the new steps to history.csv.

    \b
    Examples:
      capsule-zoo train part-whole --steps 400
      capsule-zoo train part-whole --data mnist --minutes 30 --set objects=24 --set parts=32
      capsule-zoo train part-whole --data folder:pictures --size 28 --out runs/mine
      capsule-zoo train scenes --data coins.png --steps 2500
      capsule-zoo train part-whole --transform rotate=20
      capsule-zoo train part-whole --data mnist --minutes 60 --resume
    """
    from capsule_zoo.data.datasets import full_name
    from capsule_zoo.inference.training.workers import is_first_process
    from capsule_zoo.registry import find_registration
    from capsule_zoo.runs import folder as runs

    made = find_registration(entry)
    limits = user_settings(epochs=epochs, steps=steps, minutes=minutes)
    options = user_settings(
        data=data,
        size=size,
        settings=read_settings(set_, made.arguments) or None,
        guide=guide,
        seed=seed,
        batch_size=batch_size,
        lr=lr,
        transform=transform,
        objective=objective,
        limits=limits or None,
    )
    data = data or made.data
    kind, _, path = full_name(data).partition(":")
    file = Path(path).name if kind in ("folder", "constellations") else ""
    folder = out or Path("runs") / f"{entry}-{file or data.replace(':', '-')}-{seed or 0}"
    _, run = runs.train(
        entry,
        folder,
        options,
        data_root=data_root,
        resume=resume,
        overwrite=overwrite,
        device=device,
        progress=not quiet,
        log=log,
    )
    if is_first_process():
        metrics = runs.read_metrics(folder)
        print_metrics(metrics)
        if not quiet:
            print(f"written to {folder}; now try: capsule-zoo evaluate {shlex.quote(str(folder))}")
        print_json(as_json, metrics)
    if run.stopped == "interrupted":
        raise typer.Exit(INTERRUPTED)


METHODS: dict[str, dict[str, Any]] = {  # options of each method of `evaluate`, with defaults
    "bound": dict(images=1000, particles=50, seed=0),
    "error-rate": dict(images=None),
    "log-partition": dict(images=None, chains=100, temperatures=14_500, seed=0),
    "anneal": dict(images=20, simulated=16, chains=16, temperatures=500, seed=0),
}


def evaluate(
    run: RunArgument,
    method: Annotated[
        str | None,
        typer.Option(
            help="bound, error-rate, log-partition or anneal.  [default: what suits the model]"
        ),
    ] = None,
    data: Data = None,
    data_root: DataRoot = None,
    images: Annotated[
        int | None,
        typer.Option(
            help="Number of test images.  [default: 1000 for a bound, 20 for anneal, else all]",
            min=1,
        ),
    ] = None,
    particles: Annotated[
        int | None, typer.Option(help="Of bound: draws for each image, K.  [default: 50]", min=1)
    ] = None,
    chains: Annotated[
        int | None,
        typer.Option(
            help="Of log-partition: annealing chains; of anneal: chains of each image.  "
            "[default: 100; 16]",
            min=1,
        ),
    ] = None,
    temperatures: Annotated[
        int | None,
        typer.Option(
            help="Of log-partition and anneal: annealing steps.  [default: 14500; 500]", min=2
        ),
    ] = None,
    simulated: Annotated[
        int | None,
        typer.Option(
            help="Of anneal: images drawn from the model, to measure the gap.  [default: 16]", min=0
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of all random numbers.  [default: 0]", min=0, max=2**63 - 1),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure a run on test images: bounds on log p(image), or an error rate.

    Without --method, a model of labels gets its error rate, an energy model log-partition, and any
    other model a bound. Log-likelihoods and bounds are in nats per image. The result is added to
    the run's metrics.json.

    bound: bounds on log p(image) of the run's guide. A remark tells where a few draws decide the
    importance-weighted bound (IWAE). Presences are drawn as 0 or 1, also where training relaxed
    them.

    error-rate: the fraction of wrong labels, for a model or guide that predicts labels.

    log-partition: the log-likelihood under an energy model. The estimate by annealed importance
    sampling (AIS) is too high in expectation, the estimate by reverse annealing (RAISE) too low.
    The exact value is added where it can be summed. For a model of binary pixels the images are
    binarized once. At 28x28 pixels the defaults take a few minutes.

    anneal: bounds on log p(image) from both sides. The lower bound is tighter than the guide's own.
    Its chains are annealed to the posterior of an image, from the guide or from Gauss-Newton
    distributions around points that are refined from the guide. A warning says if an
    importance-weighted bound exceeds the lower bound. The upper bound is on images that the model
    draws: chains go back from their known latents. gap is the mean distance of both bounds on these
    images; gap_median and gap_largest tell whether a few images decide it. lost_elbo is how far the
    guide's ELBO lies below the lower bound.

    \b
    Examples:
      capsule-zoo evaluate runs/part-whole-digits-0
      capsule-zoo evaluate runs/part-whole-mnist-0 --data rotated-mnist --particles 1000 --json
      capsule-zoo evaluate capsule-network-mnist --method error-rate --data affnist
      capsule-zoo evaluate capsule-rbm-mnist --temperatures 1000
      capsule-zoo evaluate runs/vae-digits-0 --method anneal --images 10 --chains 8
    """
    from capsule_zoo.inference.evaluation.classification import predicts_labels
    from capsule_zoo.models.checks import check_known
    from capsule_zoo.registry import load
    from capsule_zoo.runs import annealing, measurements
    from capsule_zoo.runs import folder as runs

    if method is not None:
        check_known("method", method, METHODS)
    method = method or measurements.measuring_method(load(run))
    options = user_settings(images=images, particles=particles, chains=chains, seed=seed)
    options |= user_settings(temperatures=temperatures, simulated=simulated)
    _check_options(method, options)
    measures: dict[str, Callable[..., dict]] = {
        "bound": measurements.evaluate_run,
        "error-rate": measurements.error_rate_run,
        "log-partition": measurements.log_partition_run,
        "anneal": partial(annealing.anneal_run, progress=not quiet),
    }
    only_tests = method in ("bound", "error-rate")
    entry, dataset, folder = runs.open_run(run, data, data_root, only_tests=only_tests)
    runs.refuse_unwritable(folder)
    metrics = measures[method](entry, dataset, **(METHODS[method] | options))
    runs.note(folder, method.replace("-", "_"), metrics)
    print_metrics(metrics)
    if not metrics.get("is_bound", True):
        print("the guide places points, so map_objective is not a bound; see: capsule-zoo compare")
        if predicts_labels(entry.model, entry.guide):
            print("it predicts labels; see: capsule-zoo evaluate RUN --method error-rate")
    print_json(as_json, metrics)


def _check_options(method: str, options: Iterable[str]) -> None:
    """Raise ValueError if `method` does not take one of the given options."""
    for name in options:
        if name not in METHODS[method]:
            takers = [taker for taker, defaults in METHODS.items() if name in defaults]
            raise ValueError(
                f"--{name} is an option of --method {' or '.join(takers)}, and this measures "
                f"--method {method}; leave out --{name}, or give another --method"
            )


def compare(
    run: RunArgument,
    guides: Annotated[
        str | None, typer.Option(help="Comma-separated guide names.  [default: all that fit]")
    ] = None,
    tune_steps: Annotated[
        int, typer.Option(help="Steps that tune each other guide, or widen points.", min=1)
    ] = 200,
    data: Data = None,
    data_root: DataRoot = None,
    images: Images = 200,
    particles: Particles = 50,
    seed: Seed = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare guides to one trained model on test images.

    The guides are the entry's guides, and the general guides that fit its model: free_form,
    corrected, low_rank, gauss_newton, mixture, semi_amortized and auto_normal. General guides are
    fitted to the images.

    The run's own guide is used unchanged; other guides are tuned with the model frozen. A guide of
    points is shown with its MAP objective, which is not a bound, and again widened into a bound.
    Writes compare.csv and compare.png.

    \b
    Examples:
      capsule-zoo compare runs/part-whole-digits-0
      capsule-zoo compare runs/part-whole-digits-0 --guides delta,normal --tune-steps 500
    """
    from capsule_zoo.data.files import write_whole
    from capsule_zoo.records import save_figure
    from capsule_zoo.runs import folder as runs
    from capsule_zoo.runs import measurements

    entry, dataset, folder = runs.open_run(run, data, data_root)
    runs.refuse_unwritable(folder)
    names = measurements.guides_of(entry) if guides is None else _names(guides)
    shared: dict[str, Any] = dict(images=images, particles=particles, seed=seed)
    table = measurements.compare_run(
        entry, dataset, names, tune_steps=tune_steps, progress=not quiet, **shared
    )
    print(table.drop(columns="is_bound").dropna(axis=1, how="all").round(3).to_string(na_rep=""))
    write_whole(folder / "compare.csv", table.to_csv(index_label="guide").encode())
    save_figure(table.draw(), folder / "compare.png")
    rows = table.to_dict(orient="index")
    runs.note(folder, "compare", rows)
    if not quiet:
        print(f"drawn in {folder / 'compare.png'}")
    print_json(as_json, rows)


def figure(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="One of the entry's figures; see show.")
    ],
    run: RunArgument,
    data: Data = None,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Draw one of the entry's figures into the run folder.

    Every entry that models images or points has the figure samples: draws from the model, which
    need no data. Other figures show test images.

    \b
    Examples:
      capsule-zoo figure samples runs/part-whole-digits-0
      capsule-zoo figure parses runs/part-whole-digits-0
    """
    from capsule_zoo.runs import folder as runs

    path = runs.draw_of_run(run, name, data, data_root)
    print(f"drawn in {path}")
    print_json(as_json, {"figure": str(path)})


def _names(text: str) -> list[str]:
    """Return the names in a comma-separated list."""
    return [name for name in map(str.strip, text.split(",")) if name]
