"""Objects found in a user's pictures and in scenes of points, written to files."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

from capsule_zoo.data import Split
from capsule_zoo.data.files import write_whole
from capsule_zoo.data.points import read_scenes, rescale_points
from capsule_zoo.data.progress import track
from capsule_zoo.guides.constellations.amortized import AmortizedMatching
from capsule_zoo.guides.constellations.matching import (
    ExactMatching,
    MatchingGuide,
    MixtureMatching,
    RansacMatching,
    SinkhornMatching,
)
from capsule_zoo.inference.objects import FoundObjects, find_objects
from capsule_zoo.models import Constellations, Scenes
from capsule_zoo.models.checks import check_known
from capsule_zoo.registry import Entry, create, load
from capsule_zoo.zoo.scenes.entry import pair_with_canvas
from capsule_zoo.zoo.scenes.figures import colored_objects


def segment_run(
    entry: Entry,
    split: Split,
    out: Path,
    *,
    files: Sequence[str] = (),
    slots: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Find the objects of a split, write them into a folder, and return a summary.

    The summary's `all_slots_filled` is the number of images with an object in every slot: there may
    be more objects in them.

    The folder gets `objects.csv`, one row for each object; `counts.csv`, one row for each image;
    `masks/<image>.png`, whose pixels are numbers of objects, 0 for the ground; and
    `pictures/<image>.png`, the image with each object in its color and box. Files of an earlier
    call are removed.

    Args:
        files: the file of each image, for the tables.
        slots: most objects of an image, which may then have any size; see `pair_with_canvas`.
        options: draws, temperature and seed of `find_objects`.

    Raises:
        ValueError: the entry is no model of scenes, or the images do not fit it.
    """
    if isinstance(entry.model, Constellations):
        raise ValueError(
            f"{entry.name} finds objects of points, and segment those of pictures; in Python, call "
            "capsule_zoo.runs.objects.parse_file"
        )
    if not isinstance(entry.model, Scenes):
        raise ValueError(
            f"{entry.name} finds no objects; train the entry scenes on these pictures first: "
            "capsule-zoo train scenes --data folder:PATH"
        )
    if slots is not None:
        height, width = split.images.shape[-2:]
        entry = pair_with_canvas(entry, height, width, slots)
    detections = find_objects(entry.model, entry.guide, split.images, **options)
    pictures = colored_objects(split.images, detections.numbers, entry.model.slots)
    older = pd.read_csv(out / "counts.csv") if (out / "counts.csv").is_file() else ()
    for kind in ("masks", "pictures"):
        (out / kind).mkdir(parents=True, exist_ok=True)
        for number in range(len(older)):
            (out / kind / f"{number}.png").unlink(missing_ok=True)
    drawn = track([*zip(detections.numbers, pictures, strict=True)], "writing", "pictures")
    for number, (mask, picture) in enumerate(drawn):
        Image.fromarray(mask.numpy().astype(np.uint8)).save(out / f"masks/{number}.png")
        pixels = (255 * picture.clamp(0, 1)).round().byte().movedim(0, -1).numpy()
        Image.fromarray(pixels).save(out / f"pictures/{number}.png")
    objects, counts = tables(detections, files)
    objects.to_csv(out / "objects.csv", index=False)
    counts.to_csv(out / "counts.csv", index=False)
    return {
        "images": len(split),
        "objects": len(objects),
        "mean_count": float(counts["count"].mean()),
        "all_slots_filled": int(detections.is_full.sum()),
        "unexplained": float(counts["unexplained"].mean()),
    }


def tables(
    detections: FoundObjects, files: Sequence[str] = ()
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return two tables: a row for each object, with box and pose, and a row for each image.

    Args:
        files: the file of each image, which gets a column if there are any.
    """
    image, slot = (index.numpy() for index in detections.presence.nonzero(as_tuple=True))
    box, pose = detections.boxes[image, slot].numpy(), detections.pose[image, slot].numpy()
    objects = pd.DataFrame({"image": image, "object": slot + 1})
    objects[["left", "top", "right", "bottom"]] = box.astype(int)
    objects[["log_size", "x", "y", "angle"][: pose.shape[1]]] = pose.round(4)
    counts = pd.DataFrame(
        {"image": range(len(detections.counts)), "count": detections.counts.numpy()}
    )
    counts["probability"] = detections.count_probabilities.amax(-1).numpy().round(4)
    counts["unexplained"] = detections.unexplained.numpy().round(6)
    for table in (objects, counts) if files else ():
        table.insert(1, "file", [files[number] for number in table["image"]])
    return objects, counts


GUIDES: dict[str, type[MatchingGuide]] = {
    "exact": ExactMatching,
    "ransac": RansacMatching,
    "sinkhorn": SinkhornMatching,
    "mixture": MixtureMatching,
}
AMORTIZED = "amortized"


def parse_file(
    file: str | Path, out: str | Path, guide: str = "exact", run: str | None = None, **sizes: Any
) -> dict[str, Any]:
    """Parse a file of scenes, and write the object and corner of every point, and log evidence.

    Every scene is shifted and scaled to the square [-1, 1]^2 first. `out` is a NumPy archive of
    `objects` and `corners`, (S, N), -1 for clutter and absent points, and of `log_evidence`, (S,),
    in nats, of the scaled scenes.

    Args:
        file: see `data.points.read_scenes`; its templates, if any, replace the zoo's.
        guide: "exact", "ransac", "sinkhorn", "mixture", or "amortized" for the set transformer that
            was trained in `run`.
        run: a run folder, or the name of trained weights, whose templates and noise are used.
        sizes: further arguments of `Constellations`, such as `sigma` and `clutter`.

    Returns:
        The number of scenes and of points, and the mean log evidence.

    Raises:
        ValueError: a file, a guide, a run or a size that does not fit; nothing is written.
    """
    if (out := Path(out)).is_dir() or out.resolve() == Path(file).resolve():
        raise ValueError(f"out must be a new file, not {out}; choose another name")
    points, present, templates = read_scenes(file)
    check_known("guide", guide, [*GUIDES, AMORTIZED])
    model = _model(run, templates, sizes)
    parser = GUIDES[guide](model) if guide in GUIDES else _open_transformer(run)
    matchings = parser.parse(rescale_points(points.double()), present)
    archive = io.BytesIO()
    np.savez(archive, **{name: value.numpy() for name, value in vars(matchings).items()})
    write_whole(out, archive.getvalue())
    return {
        "scenes": len(points),
        "points": int(present.sum()),
        "clutter": int((present & (matchings.objects < 0)).sum()),
        "log_evidence": matchings.log_evidence.mean().item(),
    }


def _open_transformer(run: str | None) -> AmortizedMatching:
    """Return the set transformer of a run."""
    guide = None if run is None else load(run).guide
    if not isinstance(guide, AmortizedMatching):
        where = "no run is named" if run is None else f"{run} holds a {type(guide).__name__}"
        raise ValueError(
            f"guide amortized has to be trained, but {where}; give a run that was made by "
            "capsule-zoo train constellations --guide amortized"
        )
    guide.model.double()
    return guide


def _model(
    run: str | None, templates: tuple[torch.Tensor, ...] | None, sizes: Mapping[str, Any]
) -> Constellations:
    if run is None:
        if templates is None:
            return create("constellations", **sizes).model.double()
        return Constellations(templates, **sizes).double()
    model = load(run).model
    if not isinstance(model, Constellations):
        raise ValueError(f"{run} is not a run of constellations, and cannot parse scenes of points")
    if templates is not None or sizes:
        wrong = [*sizes, *(["the templates of the file"] if templates is not None else [])]
        raise ValueError(
            f"{run} has its own templates and sizes; leave out run, or {' and '.join(wrong)}"
        )
    return model.double()
