"""Objects found in a user's pictures and in scenes of points, written to files."""

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

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
from capsule_zoo.inference.counting import count_interval
from capsule_zoo.inference.objects import FoundObjects, find_objects
from capsule_zoo.inference.whole_pictures import read_pictures
from capsule_zoo.models import Constellations, Scenes
from capsule_zoo.models.checks import check_known
from capsule_zoo.registry import Entry, create, load
from capsule_zoo.zoo.scenes.entry import pair_with_canvas
from capsule_zoo.zoo.scenes.figures import colored_objects, outlined_objects

EDGES = ("left", "top", "right", "bottom")  # columns of a table of objects


def segment_run(
    entry: Entry,
    pictures: Split | Sequence[Tensor],
    out: Path,
    *,
    files: Sequence[str] = (),
    slots: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Find the objects of pictures, write them into a folder, and return a summary.

    The summary's `all_slots_filled` is the number of images with an object in every slot: there may
    be more objects in them.

    The folder gets `objects.csv`, one row for each object; `counts.csv`, one row for each image;
    `masks/<image>.png`, whose pixels are numbers of objects, 0 for the ground; and
    `pictures/<image>.png`, the image with each object in its color and box. Files of an earlier
    call are removed. Masks of whole pictures have 16 bits, and are arrays in `masks/<image>.npy`
    too; `counts.csv` has the interval that holds the number with probability .9.

    Args:
        pictures: a split, or whole pictures (C, H, W) of any sizes for a model of them.
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
    if entry.model.log_intensity is not None:
        return _segment_whole(entry, pictures, out, files, {"slots": slots, **options})
    if not isinstance(pictures, Split):
        raise ValueError(f"{entry.name} reads pictures of one size; give them as a Split")
    if slots is not None:
        height, width = pictures.images.shape[-2:]
        entry = pair_with_canvas(entry, height, width, slots)
    detections = find_objects(entry.model, entry.guide, pictures.images, **options)
    drawn = colored_objects(pictures.images, detections.numbers, entry.model.slots)
    _clear(out)
    progress = track([*zip(detections.numbers, drawn, strict=True)], "writing", "pictures")
    for number, (mask, picture) in enumerate(progress):
        Image.fromarray(mask.numpy().astype(np.uint8)).save(out / f"masks/{number}.png")
        _save_pixels(picture, out / f"pictures/{number}.png")
    objects, counts = tables(detections, files)
    objects.to_csv(out / "objects.csv", index=False)
    counts.to_csv(out / "counts.csv", index=False)
    return {
        "images": len(pictures),
        "objects": len(objects),
        "mean_count": float(counts["count"].mean()),
        "all_slots_filled": int(detections.is_full.sum()),
        "unexplained": float(counts["unexplained"].mean()),
    }


def _segment_whole(
    entry: Entry,
    pictures: Split | Sequence[Tensor],
    out: Path,
    files: Sequence[str],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Find the objects of whole pictures, write them into a folder, and return a summary."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{entry.name} was trained on tiles of whole pictures, and reads any number of "
                f"objects at all places at once; leave --{name} out"
            )
    images = list(pictures.images if isinstance(pictures, Split) else pictures)
    results = read_pictures(entry.model, entry.guide, images)
    _clear(out)
    objects, counts, hidden = [], [], 0
    for number, (image, result) in enumerate(zip(images, results, strict=True)):
        mask = result.numbers.numpy().astype(np.uint16)
        Image.fromarray(mask).save(out / f"masks/{number}.png")
        np.save(out / f"masks/{number}.npy", mask)
        _save_pixels(outlined_objects(image, result.numbers), out / f"pictures/{number}.png")
        named: dict[str, Any] = {"image": number, **({"file": files[number]} if files else {})}
        low, high = count_interval(result.count_probabilities)
        counts.append(
            named
            | {"count": result.count, "low": low, "high": high}
            | {"probability": round(float(result.count_probabilities.max()), 4)}
            | {"unexplained": round(result.unexplained, 6)}
        )
        hidden += int((~result.visible).sum())
        parts = (result.presence, result.centers, result.boxes.int(), result.visible)
        rows = zip(*(part.tolist() for part in parts), strict=True)
        for index, (presence, (x, y), box, visible) in enumerate(rows, 1):
            edges = box if visible else [None] * len(EDGES)
            places = dict(zip(EDGES, edges, strict=True))
            row = {"object": index, "presence": round(presence, 4), "x": round(x, 1)}
            objects.append({**named, **row, "y": round(y, 1), **places})
    columns = ["image", *["file"][: len(files)], "object", "presence", "x", "y", *EDGES]
    frame = pd.DataFrame(objects, columns=columns).astype(dict.fromkeys(EDGES, "Int64"))
    frame.to_csv(out / "objects.csv", index=False)
    if hidden:
        warnings.warn(
            f"{hidden} of {len(objects)} objects lie wholly behind others and have no box, so that "
            "counts may be too high; train longer",
            stacklevel=3,
        )
    table = pd.DataFrame(counts)
    table.to_csv(out / "counts.csv", index=False)
    summary: dict[str, Any] = {"images": len(images), "objects": len(objects)}
    if len(images) == 1:
        summary |= {key: counts[0][key] for key in ("count", "low", "high")}
    return summary | {
        "mean_count": float(table["count"].mean()),
        "unexplained": float(table["unexplained"].mean()),
    }


def _clear(out: Path) -> None:
    """Make the folders of masks and pictures, and remove the files of an earlier call."""
    older = pd.read_csv(out / "counts.csv") if (out / "counts.csv").is_file() else ()
    for kind in ("masks", "pictures"):
        (out / kind).mkdir(parents=True, exist_ok=True)
        for number in range(len(older)):
            for suffix in ("png", "npy"):
                (out / kind / f"{number}.{suffix}").unlink(missing_ok=True)


def _save_pixels(picture: Tensor, file: Path) -> None:
    """Write a picture (3, H, W), from 0 to 1, as PNG."""
    pixels = (255 * picture.clamp(0, 1)).round().byte().movedim(0, -1).numpy()
    Image.fromarray(pixels).save(file)


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
    objects[[*EDGES]] = box.astype(int)
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
