"""The command `capsule-zoo segment`: find the objects of a user's pictures."""

from pathlib import Path
from typing import Annotated, Any

import typer

from capsule_zoo.cli.options import (
    AllImages,
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
    images: AllImages = None,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Of your own pictures, only the fifth not trained on."),
    ] = False,
    slots: Annotated[
        int | None,
        typer.Option(
            help="Most objects in a picture; pictures then keep their size. [default: as in the "
            "run, in pictures resized to its size]",
            min=1,
            max=255,  # bytes of the masks
            show_default=False,
        ),
    ] = None,
    draws: Annotated[int, typer.Option(help="Draws of the guide that are combined.", min=1)] = 5,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Of the places at which each draw looks; .1 tells digits that stand close apart. "
            "[default: the run's own]",
            min=0,
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write into.  [default: RUN/objects]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the objects of pictures: their number, boxes and masks, as files.

    RUN is a run of scenes. The folder gets objects.csv, counts.csv, masks/ (pixels are numbers of
    objects) and pictures/ (every object in its color and box). Of a folder of your own all pictures
    are read, also those of training, and the tables name their files. Of other data sets only the
    test pictures are read. No picture is counted above the slots of the run; all_slots_filled is
    the number of pictures that fill them all, and may hold more.

    \b
    Examples:
      capsule-zoo train scenes --data folder:PATH --steps 1000 --set slots=4
      capsule-zoo segment runs/scenes-PATH-0
      capsule-zoo segment scenes-mnist --data multi-digits --images 20 --out found
      capsule-zoo segment scenes-mnist --data multi-digits:canvas=80,most=5 --slots 7
    """
    from capsule_zoo.runs import folder as runs
    from capsule_zoo.runs.objects import segment_run

    opened = runs.open_pictures(run, data, data_root, slots is None, held_out, out)
    entry, pictures, files, target = opened
    options: dict[str, Any] = dict(slots=slots, draws=draws, temperature=temperature, seed=seed)
    result = segment_run(entry, pictures[:images], target, files=files, **options)
    print_metrics(result)
    print(f"written to {target}")
    print_json(as_json, result)
