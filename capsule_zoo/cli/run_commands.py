"""Commands about run folders and trained weights.

The work is done in `capsule_zoo.runs`.
"""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from capsule_zoo.cli.options import (
    AllImages,
    AsJson,
    Data,
    DataRoot,
    Device,
    Images,
    Particles,
    Quiet,
    RunArgument,
    Seed,
    given,
    print_json,
    print_metrics,
    read_settings,
)

_Where = tuple[str, str | None, Path | None]
_SHARE = "--prior-share"
INTERRUPTED = 130  # the status of a program that Ctrl-C ended; here also SIGTERM


def train(
    entry: Annotated[str, typer.Argument(metavar="ENTRY", help="See: capsule-zoo list.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set, or a folder or .npz file of pictures.  [default: the entry's own]"
        ),
    ] = None,
    data_root: DataRoot = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="Resize images to pixels: 28, or 28x20 (height x width).  [default: as is]"
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
      capsule-zoo train part-whole --transform rotate=20
      capsule-zoo train part-whole --data mnist --minutes 60 --resume
    """
    from capsule_zoo.inference.training.workers import is_first_process
    from capsule_zoo.registry import default_data, registered
    from capsule_zoo.runs import folder as runs
    from capsule_zoo.runs.measurements import measuring_command

    limits = given(epochs=epochs, steps=steps, minutes=minutes)
    chosen = given(
        data=data,
        size=size,
        settings=read_settings(set_, registered(entry).arguments) or None,
        guide=guide,
        seed=seed,
        batch_size=batch_size,
        lr=lr,
        transform=transform,
        objective=objective,
        limits=limits or None,
    )
    folder = out or _run_folder(
        entry, chosen.get("data") or default_data(entry), chosen.get("seed", 0)
    )
    made, run = runs.train(
        entry,
        folder,
        chosen,
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
            command = f"capsule-zoo {measuring_command(made)} {shlex.quote(str(folder))}"
            print(f"written to {folder}; now try: {command}")
        print_json(as_json, metrics)
    if run.stopped == "interrupted":
        raise typer.Exit(INTERRUPTED)


def evaluate(
    run: RunArgument,
    data: Data = None,
    data_root: DataRoot = None,
    images: Annotated[
        int | None,
        typer.Option(help="Number of test images.  [default: 1000; all for a classifier]", min=1),
    ] = None,
    particles: Particles = 50,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compute bounds on log p(image) of test images, in nats per image.

    A remark tells where a few draws decide the importance-weighted bound (IWAE).
    Presences are drawn as 0 or 1, also where training relaxed them. For a classifier the result is
    the error rate. An energy model gives no bound; see log-partition. The result is added to the
    run's metrics.json.

    \b
    Examples:
      capsule-zoo evaluate runs/part-whole-digits-0
      capsule-zoo evaluate runs/part-whole-mnist-0 --data rotated-mnist --particles 1000 --json
    """
    from capsule_zoo.runs.measurements import evaluate_run

    how: dict[str, Any] = dict(images=images, particles=particles, seed=seed)
    _measure(evaluate_run, (run, data, data_root), tests=True, as_json=as_json, **how)


def error_rate(
    run: RunArgument,
    data: Data = None,
    data_root: DataRoot = None,
    images: AllImages = None,
    as_json: AsJson = False,
) -> None:
    """Compute the error rate of a classifier on test images.

    The result is added to the run's metrics.json.

    \b
    Examples:
      capsule-zoo error-rate runs/cnn-digits-0
      capsule-zoo error-rate matrix-capsules-mnist --data affnist --images 2000
    """
    from capsule_zoo.runs.measurements import error_rate_run

    _measure(error_rate_run, (run, data, data_root), tests=True, images=images, as_json=as_json)


def log_partition(
    run: RunArgument,
    data: Data = None,
    data_root: DataRoot = None,
    images: AllImages = None,
    chains: Annotated[int, typer.Option(help="Annealing chains.", min=1)] = 100,
    temperatures: Annotated[int, typer.Option(help="Steps of the annealing.", min=1)] = 14_500,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Estimate the log-likelihood of test images under an energy model, in nats per image.

    The estimate by annealed importance sampling (AIS) is too high in expectation, the estimate by
    reverse annealing (RAISE) too low. The exact value is added where it can be summed. For a model
    of binary pixels the images are binarized once. The time grows with --chains and --temperatures:
    at 28x28 pixels the defaults take a few minutes. The result is added to the run's metrics.json.

    \b
    Examples:
      capsule-zoo log-partition runs/capsule-rbm-digits-0
      capsule-zoo log-partition capsule-rbm-mnist --temperatures 1000
    """
    from capsule_zoo.runs.measurements import log_partition_run

    how: dict[str, Any] = dict(images=images, chains=chains, temperatures=temperatures, seed=seed)
    _measure(log_partition_run, (run, data, data_root), as_json=as_json, **how)


def anneal(
    run: RunArgument,
    data: Data = None,
    data_root: DataRoot = None,
    images: Images = 20,
    simulated: Annotated[
        int, typer.Option(help="Images drawn from the model, to measure the gap.", min=0)
    ] = 16,
    chains: Annotated[int, typer.Option(help="Annealed chains of each image.", min=1)] = 16,
    temperatures: Annotated[int, typer.Option(help="Steps of the annealing.", min=2)] = 500,
    prior_share: Annotated[
        float,
        typer.Option(_SHARE, help="Share of chains that start at the prior, from 0 to below 1."),
    ] = 0.0,
    seed: Seed = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Estimate the log-likelihood of test images from both sides, in nats per image.

    The lower bound is tighter than the guide's own. Its chains are annealed to the posterior of an
    image. They start at the guide, or at Gauss-Newton distributions around points that are refined
    from its answers, whichever has the higher importance-weighted bound. If such a bound exceeds
    the lower one all the same, a warning says so. The upper bound is of images that the model
    draws: chains go back from their known latents. gap is the mean distance of both bounds of these
    images; gap_median and gap_largest tell whether a few of them decide it. lost_elbo says how far
    the guide's ELBO lies below the lower bound.

    A prior share of .25 closes some of the gap where objects or parts may be hidden. The time grows
    with --images, --simulated, --chains and --temperatures. For energy models see log-partition.
    The result is added to the run's metrics.json.

    \b
    Examples:
      capsule-zoo anneal runs/vae-digits-0
      capsule-zoo anneal recurrent-capsules-mnist --images 10 --chains 8 --temperatures 200
    """
    from capsule_zoo.runs.annealing import anneal_run

    if not 0 <= prior_share < 1:
        raise typer.BadParameter(f"{prior_share} is not from 0 to below 1", param_hint=_SHARE)
    how: dict[str, Any] = dict(simulated=simulated, chains=chains, temperatures=temperatures)
    how |= dict(prior_share=prior_share, images=images, seed=seed, progress=not quiet)
    _measure(anneal_run, (run, data, data_root), as_json=as_json, **how)


def compare(
    run: RunArgument,
    guides: Annotated[
        str | None, typer.Option(help="Names with commas between.  [default: all that fit]")
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
    """Compare guides to one trained model on the same test images.

    The guides are those of the entry, and the general ones that serve its model: free_form,
    corrected, low_rank, gauss_newton, mixture, semi_amortized and auto_normal, which are fitted to
    the images.

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
    found = table.to_dict(orient="index")
    runs.note(folder, "compare", found)
    if not quiet:
        print(f"drawn in {folder / 'compare.png'}")
    print_json(as_json, found)


def sample(
    run: RunArgument,
    n: Annotated[int, typer.Option("--n", help="Number of images.", min=1, max=400)] = 36,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Draw images from the trained prior into draws.png: means, without pixel noise.

    \b
    Example:
      capsule-zoo sample runs/part-whole-digits-0 --n 64
    """
    import math

    from capsule_zoo.figures.grids import image_rows
    from capsule_zoo.inference.evaluation.ancestral import mean_images
    from capsule_zoo.records import save_figure
    from capsule_zoo.registry import load
    from capsule_zoo.runs import folder as runs
    from capsule_zoo.runs.measurements import refuse_without_images

    entry = load(run)
    refuse_without_images(entry)
    means = mean_images(entry.model, n, seed=seed)
    columns = math.ceil(math.sqrt(n))
    rows = {f"{i * columns + 1}": row for i, row in enumerate(means.split(columns))}
    path = runs.output_folder(run) / "draws.png"
    save_figure(image_rows(rows, f"Samples from the prior of {run}"), path)
    print(f"drawn in {path}")
    print_json(as_json, {"samples": n, "seed": seed, "figure": str(path)})


def figure(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="One of the entry's figures; see show.")
    ],
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
    from capsule_zoo.runs import folder as runs

    entry, dataset, folder = runs.open_run(run, data, data_root, only_tests=True)
    path = runs.draw(entry, name, dataset.test.images, folder)
    print(f"drawn in {path}")
    print_json(as_json, {"figure": str(path)})


def _measure(
    measure: Callable[..., dict], where: _Where, tests: bool = False, *, as_json: bool, **how: Any
) -> None:
    """Measure the run at `where`, add the result to its metrics.json, and print it."""
    from capsule_zoo.runs import folder as runs

    entry, dataset, folder = runs.open_run(*where, only_tests=tests)
    runs.refuse_unwritable(folder)
    found = measure(entry, dataset, **how)
    runs.note(folder, measure.__name__.removesuffix("_run"), found)
    print_metrics(found)
    if not found.get("is_bound", True):
        print("the guide places points, so map_objective is not a bound; see: capsule-zoo compare")
    print_json(as_json, found)


def _names(words: str) -> list[str]:
    """Return the names in a comma-separated list."""
    return [name for name in map(str.strip, words.split(",")) if name]


def _run_folder(entry: str, data: str, seed: int) -> Path:
    from capsule_zoo.data.datasets import full_name

    kind, _, path = full_name(data).partition(":")
    own = Path(path).name if kind in ("folder", "constellations") else ""
    return Path("runs") / f"{entry}-{own or data.replace(':', '-')}-{seed}"
