"""Figures of scenes of points: points colored by object, and the fitted templates."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.figures.grids import panels
from capsule_zoo.guides.constellations.matching import MatchingGuide
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.models.constellations import Constellations
from capsule_zoo.models.constellations.matching_distributions import from_codes
from capsule_zoo.models.constellations.scene_distribution import SceneDistribution, object_fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
CLUTTER = "#777777"
MAX_SCENES = 6  # most scenes in a figure

Parse = tuple[Tensor, Tensor]  # objects and corners, (S, N) each


def scene_rows(
    distribution: SceneDistribution,
    points: Tensor,
    rows: Mapping[str, Parse],
    title: str,
    others: Mapping[str, SceneDistribution] = MappingProxyType({}),
) -> "Figure":
    """Draw up to six scenes, in a row for each parse, with templates fitted to their points.

    Templates are fitted to an object's points by least squares. Clutter is a gray cross.

    Args:
        distribution: the scene distribution with the templates.
        points: (S, N, 2), NaN where a point is absent.
        rows: parses of the scenes by name.
        others: scene distributions with other templates, by the name of their row.
    """
    points = points[:MAX_SCENES].double()
    shape = len(points), len(rows)
    figure, axes = panels(*shape, (0.72, 0.74), (0.8, 0.4), sharex=True, sharey=True)
    for line, (name, parse) in zip(axes, rows.items(), strict=True):
        for scene, axis in enumerate(line):
            objects, corners = (tensor[scene : scene + 1] for tensor in parse)
            scene_distribution = others.get(name, distribution)
            _draw_scene(axis, scene_distribution, points[scene : scene + 1], objects, corners)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_scene(
    axis: "Axes", distribution: SceneDistribution, points: Tensor, objects: Tensor, corners: Tensor
) -> None:
    for k, template in enumerate(distribution.templates):
        color = COLORS[k % len(COLORS)]
        object_points = points[0][objects[0] == k]
        axis.plot(object_points[:, 0], object_points[:, 1], "o", color=color, markersize=4)
        fit, _, whole = object_fit(distribution, points, objects, corners, k)
        if not whole.item():  # a free assignment need not give every corner one point
            continue
        rotation = fit.cross[0] / fit.number
        around = template.corners[template.corners.angle().argsort()]
        outline = fit.center[0] + rotation * torch.cat([around, around[:1]])
        axis.plot(outline.real, outline.imag, color=color, linewidth=0.9)
    stray = points[0][(objects[0] < 0) & ~points[0, :, 0].isnan()]
    axis.plot(stray[:, 0], stray[:, 1], "x", color=CLUTTER, markersize=4)
    axis.set(xticks=[], yticks=[], xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axis.spines[:].set_color("#dddddd")


def template_rows(
    distributions: Mapping[str, SceneDistribution], title: str = "Templates"
) -> "Figure":
    """Draw the templates of each distribution in one row, with a disk of noise at each corner.

    Templates are centered, scaled, and rotated so that the first corner points upwards.

    Args:
        distributions: scene distributions by the name of their row.
    """
    from matplotlib.patches import Circle

    columns = max(len(distribution.templates) for distribution in distributions.values())
    figure, axes = panels(columns, len(distributions), (1.3, 1.35), (0.8, 0.4))
    for line, (name, distribution) in zip(axes, distributions.items(), strict=True):
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
        for axis in line:
            axis.set(xticks=[], yticks=[], xlim=(-2, 2), ylim=(-2, 2), aspect="equal")
            axis.spines[:].set_color("#dddddd")
        for k, (axis, template) in enumerate(zip(line, distribution.templates, strict=False)):
            color = COLORS[k % len(COLORS)]
            corners = sort_by_angle(template.corners)
            axis.fill(corners.real, corners.imag, facecolor="none", edgecolor=color, linewidth=0.9)
            for corner in corners:
                place = corner.real.item(), corner.imag.item()
                axis.add_patch(
                    Circle(place, distribution.noise_of(k).proportional, color=color, alpha=0.3)
                )
            axis.plot(corners.real, corners.imag, "o", color=color, markersize=3)
    figure.suptitle(title, fontsize=10)
    return figure


def sort_by_angle(corners: Tensor) -> Tensor:
    """Sort complex corners by angle, and rotate them so that the first one points up."""
    ordered = corners[corners.angle().argsort()]
    return ordered * 1j * ordered[0].conj() / ordered[0].abs()


@torch.no_grad()
def scene_parses(model: Constellations, guide: MatchingGuide, points: Tensor) -> "Figure":
    """Draw the guide's parses of up to six scenes."""
    matchings = guide.parse(points[:MAX_SCENES])
    rows = {"parse": (matchings.objects, matchings.corners)}
    return scene_rows(
        model.distribution(),
        points,
        rows,
        "Scenes of points and their inferred objects, a color for each template",
    )


@torch.no_grad()
def scene_samples(model: Constellations, seed: int = 0) -> "Figure":
    """Draw six scenes sampled from the prior, with their true objects."""
    with use_seed(seed):
        nodes = poutine.trace(model).get_trace(batch_size=MAX_SCENES).nodes
    distribution = model.distribution()
    rows = {"sample": from_codes(distribution, nodes["point_corner"]["value"])}
    return scene_rows(
        distribution,
        nodes["points"]["value"],
        rows,
        "Scenes drawn from the prior, a color for each template",
    )
