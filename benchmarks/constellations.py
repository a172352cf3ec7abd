"""Time the parsing of 512 scenes of points, compared with RANSAC in a loop over scenes.

The scenes hold squares and triangles with noise 0.1 on given templates. `ransac` and `exact` are
the zoo's guides, which parse all scenes at once; `exact` also sums over all matchings. The peer
`loop` is RANSAC as it is usually written: for every scene, every template and every pair of points,
the similarity that the pair fixes, and SciPy's `linear_sum_assignment` of corners to points. The
best sets of points that cover the scene win. On scenes without much noise all three parses are
equal, which is checked first.
"""

import itertools
from collections.abc import Callable

import numpy as np
import torch
from harness import Benchmark, Contestants, main
from scipy.optimize import linear_sum_assignment

from capsule_zoo.data.points import TEMPLATES, Scenes, draw_scenes
from capsule_zoo.guides import ExactMatching, RansacMatching
from capsule_zoo.inference.segmentation import segmentation_accuracy
from capsule_zoo.registry import create

SCENES = 512
SIGMA = 0.1

Sets = dict[frozenset[int], float]  # of points, with the squared distance from their corners


def scenes(number: int, sigma: float) -> Scenes:
    return draw_scenes(number, sigma, seed=3)


def fits(points: np.ndarray, template: np.ndarray) -> Sets:
    """Return the sets of points that a template fits, from every pair of points, with misfits."""
    misfits: Sets = {}
    for a, b in itertools.permutations(range(len(points)), 2):
        for corner in range(1, len(template)):
            rotation = (points[b] - points[a]) / (template[corner] - template[0])
            placed = points[a] + rotation * (template - template[0])
            cost = np.abs(placed[:, None] - points[None]) ** 2
            rows, columns = linear_sum_assignment(cost)
            misfit = cost[rows, columns].sum() / abs(rotation) ** 2
            members = frozenset(columns.tolist())
            if misfit < misfits.get(members, np.inf):
                misfits[members] = misfit
    return misfits


def loop(drawn: Scenes) -> torch.Tensor:
    """Return the object of every point, by a loop over scenes."""
    templates = [np.array(shape) @ np.array([1, 1j]) for shape in TEMPLATES]
    objects = torch.full(drawn.points.shape[:2], -1)
    for scene, (places, present) in enumerate(zip(drawn.points, drawn.present, strict=True)):
        points = places[present].numpy() @ np.array([1, 1j])
        same = {len(t): t for t in templates}  # equal templates find equal sets
        sets = {size: fits(points, t) for size, t in same.items() if size <= len(points)}
        best, best_cover = np.inf, ()
        for presences in itertools.product((False, True), repeat=len(templates)):
            wanted = [k for k, on in enumerate(presences) if on]
            if sum(len(templates[k]) for k in wanted) != len(points):
                continue
            score, cover = cheapest([sets[len(templates[k])] for k in wanted])
            if score < best:
                best, best_cover = score, tuple(zip(wanted, cover, strict=True))
        slots = present.nonzero()[:, 0]
        for k, members in best_cover:
            objects[scene, slots[list(members)]] = k
    return objects


def cheapest(tables: list[Sets], used: frozenset[int] = frozenset()) -> tuple[float, tuple]:
    """Return the smallest total misfit of disjoint sets, one from each table, and the sets."""
    if not tables:
        return 0.0, ()
    best: tuple[float, tuple] = (np.inf, ())
    for members, misfit in sorted(tables[0].items(), key=lambda item: item[1]):
        if misfit >= best[0]:
            break
        if members & used:
            continue
        rest, further = cheapest(tables[1:], used | members)
        if misfit + rest < best[0]:
            best = misfit + rest, (members, *further)
    return best


def make() -> Contestants:
    drawn = scenes(SCENES, SIGMA)
    model = create("constellations", sigma=SIGMA).model.double()
    guides = {"ransac": RansacMatching(model), "exact": ExactMatching(model)}
    ours: dict[str, Callable[[], object]] = {
        name: lambda guide=guide: guide.parse(drawn.points) for name, guide in guides.items()
    }
    return {**ours, "loop": lambda: loop(drawn)}


def check() -> None:
    drawn = scenes(min(SCENES, 40), 0.005)
    model = create("constellations", sigma=0.005).model.double()
    parsed = {
        "ransac": RansacMatching(model).parse(drawn.points).objects,
        "exact": ExactMatching(model).parse(drawn.points).objects,
        "loop": loop(drawn),
    }
    for name, objects in parsed.items():
        right = segmentation_accuracy(
            objects, drawn.objects, drawn.present, model.distribution().kinds
        )
        assert (right > 1 - 1e-6).all(), f"{name} parses scenes {(right < 1).nonzero()} otherwise"


if __name__ == "__main__":
    data = f"{SCENES} scenes of up to 11 points, noise {SIGMA} on the templates"
    main(Benchmark("constellations", make, check, "ransac", ("loop",), data, "constellations"))
