"""Constellations: scenes of points that are the corners of a few objects.

Story. An object is a template of a few corners, such as a square. Each object is present or not.
Where it is present, a similarity moves, rotates and scales it, and every corner shows one point,
with noise. There may be clutter too. The points of a scene come in no order: to infer which point
is which corner of which object is to parse the scene. Scenes are small, and the exact posterior can
be computed.

    object_presence_k ~ Bernoulli(presence)                  # (B, objects)
    object_pose_k     ~ Normal(0, sigma_pose^2 I)            # y, (B, objects, 4)
    clutter           ~ Uniform{0, ..., clutter}             # number of clutter points
    point_corner      ~ random order of all corners that are present, and of the clutter  # (B, N)
    points_i          ~ Normal(F(p) y_k, s_k^2 I)            # corner p of object k, (B, N, 2)
                        or Uniform([-1, 1]^2)                # clutter
    F(p)              = [1 0 p_x p_y; 0 1 p_y -p_x]
    s_k^2             = sigma_floor^2 + (sigma |(y_3, y_4)| / radius_k)^2

Templates are centered and divided by their radius, the root mean square distance of their corners
from the center. `sigma` is noise on the template, in its own units, and is scaled with the object;
`sigma_floor` is noise on the scene. The paper adds its noise to the template as well, and then
scales the scene to [-1, 1]. This is a scale and a shift that all objects share, and that the model
leaves to the poses.

References:
    Kosiorek, Sabour, Teh & Hinton 2019, "Stacked capsule autoencoders" (arXiv 1906.06818),
    section 3.1.
    Nazabal, Tsagkas & Williams 2021, "Inference for generative capsule models" (arXiv 2103.06676).
    There noise is on the scene only, sigma = 0 here.
"""

import math
from collections.abc import Sequence

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import pyro_method
from torch import Tensor, nn

from capsule_zoo.data.points import check_templates
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.checks import check_at_least, check_positive
from capsule_zoo.models.constellations.matching_distributions import MatchedPoints, RandomMatching
from capsule_zoo.models.constellations.point_space import PointSpace
from capsule_zoo.models.constellations.scene_distribution import SceneDistribution
from capsule_zoo.models.constellations.similarities import (
    Noise,
    Template,
    center_points,
    place_corners,
)


class Constellations(Model):
    """The model of objects with similarities as poses and points as corners, see the top.

    Args:
        templates: the corners of every object, (corners, 2) each.
        sigma: standard deviation of the noise on the templates, in their units; 0 for none.
        sigma_floor: standard deviation of the noise on the scene.
        sigma_pose: standard deviation of every number of a pose.
        presence: probability of each object.
        clutter: the largest number of clutter points in a scene.

    Raises:
        ValueError: a template of fewer than two different points, or a number out of range.

    Called as `model(points=None, labels=None, batch_size=1)` it returns points (B, N, 2), where N
    is the largest number of points of a scene, and NaN marks slots without a point.
    """

    sites = (
        Site("object_presence", ("images",), event_dim=1, discrete=True),
        Site("object_pose", ("images",), event_dim=2),
        Site("point_corner", ("images",), event_dim=1, discrete=True),
    )
    observes = "points"

    def __init__(
        self,
        templates: Sequence[Tensor],
        sigma: float = 0.1,
        sigma_floor: float = 0.01,
        sigma_pose: float = 0.5,
        presence: float = 0.5,
        clutter: int = 0,
    ) -> None:
        super().__init__()
        shapes = [
            torch.as_tensor(template, dtype=torch.get_default_dtype()) for template in templates
        ]
        check_templates(templates)
        check_positive(sigma_floor=sigma_floor, sigma_pose=sigma_pose)
        check_at_least(0, sigma=sigma, clutter=clutter)
        if not 0 < presence < 1:
            raise ValueError(f"presence must lie between 0 and 1, not {presence!r}")
        self.sizes = tuple(len(shape) for shape in shapes)
        self.corners = nn.Parameter(torch.cat(shapes))
        self.log_floor = nn.Parameter(torch.tensor(math.log(sigma_floor)))
        self.log_sigma = nn.Parameter(torch.tensor(math.log(sigma))) if sigma > 0 else None
        self.sigma_pose = sigma_pose
        self.presence = presence
        self.clutter = clutter
        self.space = PointSpace(sum(self.sizes) + clutter)

    @pyro_method
    def distribution(self) -> SceneDistribution:
        """Return the distribution of scenes for the present parameters, without gradients.

        Guides compute with it in float64.
        """
        with torch.no_grad():
            templates = tuple(
                Template.of(shape.double()) for shape in self.corners.split(self.sizes)
            )
            sigma = 0.0 if self.log_sigma is None else float(self.log_sigma.exp())
            noise = Noise(float(self.log_floor.exp()), sigma)
        return SceneDistribution(templates, noise, self.sigma_pose, self.presence, self.clutter)

    def forward(
        self, points: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        like, distribution = self.corners, self.distribution()
        slots = sum(self.sizes) + self.clutter if points is None else points.shape[1]
        objects = len(self.sizes)
        with pyro.plate("images", batch_size if points is None else len(points), dim=-1):
            on = like.new_full((objects,), self.presence)
            presence = pyro.sample("object_presence", dist.Bernoulli(on).to_event(1))
            zero = like.new_zeros(objects, 4)
            pose = pyro.sample("object_pose", dist.Normal(zero, self.sigma_pose).to_event(2))
            code = pyro.sample("point_corner", RandomMatching(distribution, presence, slots))
            return pyro.sample("points", self.points_distribution(pose, code), obs=points)

    @pyro_method
    def points_distribution(self, pose: Tensor, code: Tensor) -> MatchedPoints:
        """Return p(points | poses, matching), for poses (*batch, objects, 4)."""
        places, scales = [], []
        size = pose[..., 2:].square().sum(-1)  # |u|^2, (*batch, objects)
        for k, shape in enumerate(self.corners.split(self.sizes)):
            corners, radius = center_points(shape)
            moved = place_corners(pose[..., k, :], corners)
            places.append(torch.view_as_real(moved))
            variance = (2 * self.log_floor).exp() + 0 * size[..., k]
            if self.log_sigma is not None:
                variance = variance + (2 * self.log_sigma).exp() * size[..., k] / radius**2
            scales.append(variance.sqrt()[..., None].expand(moved.shape))
        return MatchedPoints(torch.cat(places, -2), torch.cat(scales, -1), code)
