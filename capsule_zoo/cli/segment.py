"""The command `capsule-zoo segment`, which finds the objects in a user's pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule_zoo.cli.options import (
    AsJson,
    Data,
    DataRoot,
    RunArgument,
    Seed,
    print_json,
    print_metrics,
)


def segment(
    run: RunArgument,
    data: Data = None,
    data_root: DataRoot = None,
    images: Annotated[
        int | None, typer.Option(help="How many test images.  [default: all]", min=1)
    ] = None,
    draws: Annotated[int, typer.Option(help="Draws of the guide that are combined.", min=1)] = 5,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="[default: RUN/objects]")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the objects of test pictures: their number, boxes and masks, as files.

    RUN is a run of scenes. The folder gets objects.csv, counts.csv, masks/ (pixels are numbers of
    objects) and pictures/ (every object in its color and box).

    \b
    Examples:
      capsule-zoo train scenes --data folder:PATH --minutes 10
      capsule-zoo segment runs/scenes-PATH-0
      capsule-zoo segment scenes-mnist --data multi-mnist --images 20 --out found
    """
    from capsule_zoo.runs import folder as runs
    from capsule_zoo.runs.segment import segment_run

    entry, dataset, folder = runs.open_run(run, data, data_root)
    target = out or folder / "objects"
    test = dataset.test if images is None else dataset.test[:images]
    found = segment_run(entry, test, target, draws=draws, seed=seed)
    print_metrics(found)
    print(f"written to {target}")
    print_json(as_json, found)
