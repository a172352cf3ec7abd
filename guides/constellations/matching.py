"""Guides to scenes of points: exact, by RANSAC, by EM with permutations or free assignments.

    point_corner    ~ the guide's own distribution of matchings
    object_presence = whether the matching gives points to the object
    object_pose     ~ p(pose | points, matching), in closed form but for one quadrature

The guides differ in the matching only. The log weight of a draw of the exact guide is log p(points)
whatever is drawn, but for the quadrature of poses. `parse` names the object and the corner of every
point.
"""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from capsule_zoo.data.points import mask_points
from capsule_zoo.data.progress import announce
from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.constellations.em import explain_by_em
from capsule_zoo.guides.constellations.exact import (
    Matchings,
    assign_points,
    corners_of,
    explain_exactly,
    groups,
    log_evidence_of,
)
from capsule_zoo.guides.constellations.pose_posterior import ObjectPoses, SimilarityPosterior
from capsule_zoo.guides.constellations.ransac import CHOICES, SETS, explain_by_ransac
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.constellations import Constellations
from capsule_zoo.models.constellations.exact_cover import sums_of
from capsule_zoo.models.constellations.matching_distributions import (
    FunctionMatchings,
    codes_of,
    from_codes,
    symmetries,
)
from capsule_zoo.models.constellations.scene_distribution import (
    SceneDistribution,
    log_joint,
    object_fit,
)


class MatchingGuide(Guide):
    """The base class of guides to constellations: subclasses find the matching.

    Unless a subclass adds a network, the guide has no parameters. It computes in float64.
    """

    model_class = Constellations
    observes = "points"
    fit_settings = {"lr": 1e-3}

    def explain(self, distribution: SceneDistribution, points: Tensor) -> Matchings:
        """Return a matching for each scene of points (S, N, 2)."""
        raise NotImplementedError

    def parse(self, points: Tensor, present: Tensor | None = None) -> Matchings:
        """Infer the object and the corner of every point, and the log evidence in nats.

        Args:
            points: (S, N, 2), any real numbers; scenes are expected to lie in [-1, 1].
            present: (S, N), 1 where there is a point; None if NaN marks absent points.

        Raises:
            ValueError: points that the model does not take, a mask of another shape, or a number
                of points that no set of objects can have.
        """
        points = mask_points(points, present)
        self.model.space.check(points)
        points = points.double()
        self._check_numbers(points)
        announce(f"parsing {len(points):,} scenes")
        return self.explain(self.model.distribution(), points)

    def forward(self, points: Tensor, labels: Tensor | None = None) -> Tensor:
        distribution, places = self.model.distribution(), points.double()
        self._check_numbers(places)
        with pyro.plate("images", len(points), dim=-1):
            code = pyro.sample("point_corner", self.matchings(distribution, places, points.dtype))
            objects, corners = from_codes(distribution, code)
            object_presence = (
                objects[..., None] == torch.arange(len(distribution.sizes), device=code.device)
            ).any(-2)
            presence = dist.Bernoulli(object_presence.to(points)).to_event(1)
            pyro.sample("object_presence", presence)
            distributions = [
                SimilarityPosterior(
                    object_fit(distribution, places, objects, corners, k)[0],
                    object_presence[..., k],
                    distribution.noise_of(k),
                    distribution.tau,
                )
                for k in range(len(distribution.sizes))
            ]
            return pyro.sample("object_pose", ObjectPoses(distributions, points.dtype))

    def matchings(
        self, distribution: SceneDistribution, points: Tensor, dtype: torch.dtype
    ) -> FunctionMatchings:
        """Return q(matching | points): the matching that `explain` finds, up to symmetries.

        Its log probabilities are of type `dtype`.
        """
        return _distribution_of_variants(
            distribution, points, self.explain(distribution, points), dtype
        )

    def _check_numbers(self, points: Tensor) -> None:
        """Raise ValueError if no set of objects and clutter has a scene's number of points."""
        numbers = (~points[..., 0].isnan()).sum(1).unique().tolist()
        sizes, clutter = self.model.sizes, self.model.clutter
        wrong = [n for n in numbers if not any(0 <= n - s <= clutter for s in sums_of(sizes))]
        if wrong:
            raise ValueError(
                f"points holds scenes of {', '.join(map(str, wrong))} points, which no set of "
                f"objects of {', '.join(map(str, sizes))} corners and at most {clutter} clutter "
                "points has; build the model with more clutter, or with other templates"
            )


class ExactMatching(MatchingGuide):
    """The exact posterior of constellations, by sums over all presences, matchings and clutter.

    `parse` returns the likeliest assignment of the points among objects, and log p(points).
    """

    def explain(self, distribution: SceneDistribution, points: Tensor) -> Matchings:
        return explain_exactly(distribution, points)

    def matchings(
        self, distribution: SceneDistribution, points: Tensor, dtype: torch.dtype
    ) -> FunctionMatchings:
        with torch.no_grad():
            scene_groups = list(groups(distribution, points))
            evidence = log_evidence_of(points, scene_groups)
        present = ~points[..., 0].isnan()

        def draw_codes(number: int) -> Tensor:
            drawn = []
            for _ in range(number):
                codes = torch.full(present.shape, -1, device=points.device)
                for group in scene_groups:
                    objects = assign_points(points, [group], best=False)
                    corners = corners_of(distribution, points, objects, best=False)
                    group_codes = codes_of(distribution, present, objects, corners)
                    codes[group.rows] = group_codes[group.rows]
                drawn.append(codes)
            return torch.stack(drawn)

        def log_probability(code: Tensor) -> Tensor:
            return (log_joint(distribution, points, *from_codes(distribution, code)) - evidence).to(
                dtype
            )

        return FunctionMatchings(points, draw_codes, log_probability)


class RansacMatching(MatchingGuide):
    """The guide by RANSAC: two points fix a similarity, and objects choose among their best fits.

    Args:
        model: the model.
        sets: number of sets of points that an object chooses among.
        choices: number of joint choices that survive each object.

    Raises:
        ValueError: `sets` or `choices` below 1.
    """

    def __init__(self, model: Constellations, sets: int = SETS, choices: int = CHOICES) -> None:
        super().__init__(model)
        check_at_least(1, sets=sets, choices=choices)
        self.sets, self.choices = sets, choices

    def explain(self, distribution: SceneDistribution, points: Tensor) -> Matchings:
        return explain_by_ransac(distribution, points, self.sets, self.choices)


class SinkhornMatching(MatchingGuide):
    """The guide by variational EM with near-permutations, from annealing and Sinkhorn's steps.

    Args:
        model: the model.
        starts: number of runs for each set of objects.
        steps: number of steps of EM.
        seed: seed of the poses that EM starts from.

    Raises:
        ValueError: `starts` or `steps` below 1, or a negative seed.
    """

    permutations = True

    def __init__(
        self, model: Constellations, starts: int = 10, steps: int = 40, seed: int = 0
    ) -> None:
        super().__init__(model)
        check_at_least(1, starts=starts, steps=steps)
        check_at_least(0, seed=seed)
        self.runs: dict[str, Any] = {"starts": starts, "steps": steps, "seed": seed}

    def explain(self, distribution: SceneDistribution, points: Tensor) -> Matchings:
        return explain_by_em(distribution, points, permutations=self.permutations, **self.runs)


class MixtureMatching(SinkhornMatching):
    """The guide by variational EM with free assignments: several points may choose one corner.

    `parse` returns the free assignments; their log evidence is minus infinity where they are not
    one to one, as the model's are. As a guide it draws the nearest permutation.

    Args:
        model, starts, steps, seed: as for `SinkhornMatching`.
    """

    permutations = False

    def matchings(
        self, distribution: SceneDistribution, points: Tensor, dtype: torch.dtype
    ) -> FunctionMatchings:
        matchings = explain_by_em(
            distribution, points, permutations=False, rounded=True, **self.runs
        )
        return _distribution_of_variants(distribution, points, matchings, dtype)


def _distribution_of_variants(
    distribution: SceneDistribution, points: Tensor, best_matchings: Matchings, dtype: torch.dtype
) -> FunctionMatchings:
    """Return a distribution over the best matchings and the nearly equally likely symmetric ones.

    Their probabilities are proportional to their densities under the model.
    """
    code = codes_of(
        distribution, ~points[..., 0].isnan(), best_matchings.objects, best_matchings.corners
    )
    candidates = symmetries(distribution).to(code.device)[:, code]  # (maps, B, N)
    weights = log_joint(distribution, points, *from_codes(distribution, candidates)).T  # (B, maps)
    log_weights = weights.clamp(min=-1e30).to(dtype).log_softmax(-1)

    def draw_codes(number: int) -> Tensor:
        indices = dist.Categorical(logits=log_weights).sample((number,))
        return candidates[indices, torch.arange(len(points))]

    def log_probability(code: Tensor) -> Tensor:
        equal = (candidates.transpose(0, 1) == code[..., None, :]).all(-1)
        return torch.where(equal, log_weights, -torch.inf).logsumexp(-1)

    return FunctionMatchings(points, draw_codes, log_probability)
