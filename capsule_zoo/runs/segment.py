"""The objects of pictures, written as files: masks, a table, and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from capsule_zoo.data import Split
from capsule_zoo.inference.evaluation.objects import FoundObjects, find_objects
from capsule_zoo.models import Scenes
from capsule_zoo.registry import Entry
from capsule_zoo.zoo.scenes.figures import colored_objects


def segment_run(
    entry: Entry, split: Split, out: Path, *, draws: int = 5, seed: int = 0
) -> dict[str, Any]:
    """Write what is found in a split into a folder, and return a summary.

    The folder gets `objects.csv`, one row for each object; `counts.csv`, one row for each image;
    `masks/<image>.png`, whose pixels are numbers of objects, 0 for the ground; and
    `pictures/<image>.png`, the image with each object in its color and box.

    Raises:
        ValueError: the entry is no model of scenes, or the images do not fit it.
    """
    if not isinstance(entry.model, Scenes):
        raise ValueError(
            f"{entry.name} finds no objects; train the entry scenes on these pictures first: "
            "capsule-zoo train scenes --data folder:PATH"
        )
    found = find_objects(entry.model, entry.guide, split.images, draws=draws, seed=seed)
    pictures = colored_objects(split.images, found)
    for kind in ("masks", "pictures"):
        (out / kind).mkdir(parents=True, exist_ok=True)
    for number, (mask, picture) in enumerate(zip(found.numbers, pictures, strict=True)):
        Image.fromarray(mask.numpy().astype(np.uint8)).save(out / f"masks/{number}.png")
        pixels = (255 * picture.clamp(0, 1)).round().byte().movedim(0, -1).numpy()
        Image.fromarray(pixels).save(out / f"pictures/{number}.png")
    objects, counts = tables(found)
    objects.to_csv(out / "objects.csv", index=False)
    counts.to_csv(out / "counts.csv", index=False)
    return {
        "images": len(split),
        "objects": len(objects),
        "mean_count": float(counts["count"].mean()),
        "unexplained": float(counts["unexplained"].mean()),
    }


def tables(found: FoundObjects) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row for each object, with its box and pose, and a row for each image."""
    image, slot = (index.numpy() for index in found.presence.nonzero(as_tuple=True))
    box, pose = found.boxes[image, slot].numpy(), found.pose[image, slot].numpy()
    objects = pd.DataFrame({"image": image, "object": slot + 1})
    objects[["left", "top", "right", "bottom"]] = box.astype(int)
    objects[["log_size", "x", "y", "angle"][: pose.shape[1]]] = pose.round(4)
    counts = pd.DataFrame({"image": range(len(found.counts)), "count": found.counts.numpy()})
    counts["probability"] = found.count_probabilities.amax(-1).numpy().round(4)
    counts["unexplained"] = found.unexplained.numpy().round(6)
    return objects, counts
