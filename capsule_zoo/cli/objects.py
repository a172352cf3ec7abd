"""The command `capsule-zoo segment`: find the objects of a user's pictures."""

from pathlib import Path
from typing import Annotated

import typer

from capsule_zoo.cli.options import (
    AllImages,
    AsJson,
    Data,
    DataRoot,
    RunArgument,
    print_json,
    print_metrics,
    user_settings,
)


def segment(
    run: RunArgument,
    data: Data = None,
    data_root: DataRoot = None,
    images: AllImages = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Use only the held-out fifth of your own pictures.")
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
    draws: Annotated[
        int | None,
        typer.Option(help="Samples of the guide that are combined.  [default: 5]", min=1),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Randomness of attention; try .1 for touching digits.  [default: the run's own]",
            min=0,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of all random numbers.  [default: 0]", min=0, max=2**63 - 1),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write into.  [default: RUN/objects]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the objects of pictures: their number, boxes and masks, as files.

    RUN is a run of scenes. The folder gets objects.csv, counts.csv, masks/ (pixels are numbers of
    objects) and pictures/ (every object in its color and box). A folder of your own is used as a
    whole, training pictures included, and the tables name its files. Other data sets give their
    test pictures. No count is above the number of slots. all_slots_filled is the number of pictures
    with an object in every slot: these pictures may hold more objects.

    A run that was trained on one picture, or on a folder of pictures of any sizes (tiles:PATH),
    reads whole pictures of any size and any number of objects. counts.csv then has the interval
    that holds the number with probability .9, and masks have 16 bits.

    \b
    Examples:
      capsule-zoo train scenes --data PICTURE.png --steps 2500 --out runs/mine
      capsule-zoo segment runs/mine --data OTHER.png
      capsule-zoo train scenes --data folder:PATH --steps 1000 --set slots=4
      capsule-zoo segment runs/scenes-PATH-0
      capsule-zoo segment scenes-mnist --data multi-digits --images 20 --out found
      capsule-zoo segment scenes-mnist --data multi-digits:canvas=80,most=5 --slots 7
    """
    from capsule_zoo.runs import folder as runs
    from capsule_zoo.runs.objects import segment_run

    opened = runs.open_pictures(run, data, data_root, slots is None, held_out, out)
    entry, pictures, files, target = opened
    options = user_settings(slots=slots, draws=draws, temperature=temperature, seed=seed)
    result = segment_run(entry, pictures[:images], target, files=files, **options)
    print_metrics(result)
    print(f"written to {target}")
    print_json(as_json, result)
