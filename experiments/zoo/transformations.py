"""How codes, poses, presences and classes change with the image: one protocol for every entry.

An image is read as it is and after a motion: a shift, a turn, a change of scale or a shear. What an
entry infers, the means of its guide's laws or the class capsules of a classifier, is sorted into
four kinds by the names of the sites. If a kind is invariant it does not change. If it is linearly
equivariant, one linear map takes it from the image to the moved image, for all images.

References:
    Lenc & Vedaldi 2015, "Understanding image representations by measuring their equivariance and
    equivalence" (CVPR), sections 3 and 4: the linear map, fitted on other images.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capsule_zoo.data import Dataset, load_dataset, transforms
from capsule_zoo.experiments import Job, Options, Result, Study, begun, choose, experiment, train
from capsule_zoo.experiments.common.findings import by_quantity, mean_and_error, over_seeds, ratio
from capsule_zoo.experiments.zoo.guide_swaps import published
from capsule_zoo.figures.curves import changes
from capsule_zoo.inference.evaluation.ancestral import law_means
from capsule_zoo.inference.evaluation.classification import classify, predicts_labels
from capsule_zoo.models.common.modes import in_eval_mode
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry, list_models, load, takes_images

Kinds = dict[str, Tensor]  # by kind, numbers of every image, (N, K); classes are (N,)
MOTIONS: dict[str, tuple[str, tuple[float, ...], Callable[[float], Tensor]]] = {
    "shift": ("pixels", (1.0, 2.0, 4.0), lambda x: transforms.motion(shift=(x, 0.0))),
    "turn": ("degrees", (10.0, 20.0, 40.0), lambda x: transforms.motion(x)),
    "scale": ("of the size", (0.1, 0.2, 0.3), lambda x: transforms.motion(scale=(1 + x, 1 + x))),
    "shear": ("of the height", (0.1, 0.2, 0.4), lambda x: transforms.motion(shear=x)),
}
ENDINGS = {"pose": "pose", "presence": "presence", "switch": "presence"}  # others are codes
VARIED = 1e-3  # a number that varies less, as a part of the most, tells the linear map nothing
LEAST = 1e-9  # variance of a kind that is constant
PENALTIES = torch.logspace(-2, 5, 8).tolist()  # of the linear map


@experiment("zoo/transformations", data="mnist")
def transformations(
    options: Options,
    *,
    entries: tuple[str, ...] = (),
    images: int = 500,
    fitted: int = 1000,
    updates: int = 300,
) -> Result:
    """Measure how every entry's codes, poses, presences and classes follow the image (an hour).

    An entry is read from its published weights of MNIST, or else trained for some updates.
    `move_<kind>` is the squared change of the numbers of a kind, as a multiple of the sum of their
    variances over images: 0 does not change, and two different images are 2 apart. `follows_<kind>`
    is the share of the variance after the motion that a linear map from before it explains; 1 is
    linearly equivariant. The map, a ridge regression, is fitted on moved training images.
    `changed_class` is the share of images whose class changes.

    Args:
        entries: names of entries; all that read images if none is named.
        images: number of test images.
        fitted: number of training images of the linear map.
        updates: updates of an entry without published weights.
    """
    known = {name: name for name in list_models() if takes_images(name)}
    names = choose("entry", entries or tuple(known), known)
    how = dict(images=images, fitted=fitted, updates=updates)
    outcomes = Study(dict.fromkeys(names)).run(measure, options, **how)
    found: dict[str, dict[str, Numbers]] = {}
    for name, (rows,) in outcomes.items():
        for place, numbers in rows.items():
            found.setdefault(place, {})[name.replace("-", "_")] = over_seeds([numbers])
    tables = {}
    for place, rows in found.items():
        motion, amount, unit = place.split("_")
        names_of = f"{{quantity}}_{{variant}}_{motion}_{amount}".replace(".", "_")
        tables[f"{motion} {amount} {unit}"] = Table(by_quantity(rows), names_of)
    return Result({**tables}, {"": changes(found, list(MOTIONS))})


def measure(job: Job, *, images: int, fitted: int, updates: int) -> dict[str, Numbers]:
    """Return the numbers of one entry by motion, amount and unit; see `transformations`."""
    data = load_dataset("mnist", root=job.options.data_root)
    entry = entry_of(job.name, data, updates, job.options)
    test, known = data.test.images[:images], data.train.images[:fitted]
    before, seen_before = {**read(entry, test), **classes(entry, test)}, read(entry, known)
    found: dict[str, Numbers] = {}
    for name, (unit, amounts, motion) in MOTIONS.items():
        for amount in amounts:
            shown, seen = (
                transforms.warp_images(x, motion(amount)).clamp(0, 1) for x in (test, known)
            )
            after = {**read(entry, shown), **classes(entry, shown)}
            moved = read(entry, seen)
            found[f"{name}_{amount:g}_{unit}"] = compared(before, after, seen_before, moved)
    return found


def entry_of(name: str, data: Dataset, updates: int, options: Options) -> Entry:
    """Return the published entry of MNIST, or one that is trained for some updates."""
    if weights := published(name, "mnist"):
        return load(weights)
    entry = begun(name, data, options)
    train(entry, data, options, name="entry", steps=updates)
    return entry


@torch.no_grad()
def read(entry: Entry, images: Tensor) -> Kinds:
    """Return what an entry infers from images (N, C, H, W), by kind."""
    model, guide = entry.model, entry.guide
    found: dict[str, list[Tensor]] = {}
    if model.supervised:
        with in_eval_mode(model):
            parts = [capsules_of(model, few) for few in images.split(100)]
        found = {kind: [torch.cat([part[kind] for part in parts])] for kind in parts[0]}
    else:
        for name, means in law_means(guide, images, guide.covers).items():
            kind = ENDINGS.get(name.rpartition("_")[2], "code")
            found.setdefault(kind, []).append(means.flatten(1))
        if hasattr(guide, "scores"):  # class capsules, whose lengths are presences
            with in_eval_mode(guide):
                lengths = [guide.scores(few).sigmoid() for few in images.split(500)]
            found["presence"] = [torch.cat(lengths)]
    return {kind: torch.cat(parts, 1) for kind, parts in found.items()}


def classes(entry: Entry, images: Tensor) -> Kinds:
    """Return the classes (N,) that an entry tells of test images, if it tells any."""
    if not predicts_labels(entry.model, entry.guide):
        return {}
    return {"class": classify(entry.model, entry.guide, images)}


def capsules_of(classifier: Any, images: Tensor) -> Kinds:
    """Return the class capsules of a classifier, or its scores if it has none."""
    if not hasattr(classifier, "capsules"):
        return {"code": classifier.scores(images)}
    grid = classifier.capsules(images)[-1]
    return {"pose": grid.pose.flatten(1), "presence": grid.presence.flatten(1)}


def compared(before: Kinds, after: Kinds, known: Kinds, moved: Kinds) -> Numbers:
    """Return the numbers of one motion; see `transformations`.

    Args:
        before, after: what is inferred from test images and from moved test images.
        known, moved: the same of the training images that the linear map is fitted on.
    """
    found: Numbers = {}
    for kind, first in before.items():
        if kind == "class":
            found["changed_class"] = mean_and_error((first != after[kind]).float())
        elif (variance := first.var(0).sum()) > LEAST:
            square = (after[kind] - first).square().sum(1)
            found[f"move_{kind}"] = mean_and_error(square / variance)
            found[f"follows_{kind}"] = explained(known[kind], moved[kind], first, after[kind])
    return found


def explained(known: Tensor, moved: Tensor, before: Tensor, after: Tensor) -> Number:
    """Return the share of the variance of `after` that a linear map from `before` explains.

    Args:
        known, moved: the pairs (N, K) that the map is fitted on.
        before, after: the pairs (M, K) that it is tested on.
    """
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    varied = known.std(0) > VARIED * known.std(0).max()
    known, before = known[:, varied], before[:, varied]
    line = make_pipeline(StandardScaler(), RidgeCV(PENALTIES)).fit(known.numpy(), moved.numpy())
    predicted = torch.as_tensor(line.predict(before.numpy())).view_as(after)
    left = (predicted - after).square().sum(1)
    share, error, count = ratio(left, (after - after.mean(0)).square().sum(1))
    return 1 - share, error, count
