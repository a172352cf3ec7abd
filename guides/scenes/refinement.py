"""Refinement of proposals: gradient steps on what an object explains of its patch of a picture.

See `guides.scenes.whole_pictures`, which makes the proposals.
"""

from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.guides.scenes.proposals import PrivateTrace, Proposal
from capsule_zoo.models.common.trace_density import plain_log_density, scored_sites
from capsule_zoo.models.scenes import Scenes
from capsule_zoo.models.scenes.pictures import AsObject, Drawn, Pictures

RATE = 0.3  # step size of Adam, in standard deviations of the proposal


@dataclass(frozen=True, eq=False)
class PatchPosterior:
    """The posterior of one object on each of K patches, given the other objects, up to a constant.

    Attributes:
        model: scenes on the canvas of a patch.
        plate: the plate of the patches.
        image, ground: (K, C, P, P).
        observed: the pixels of the image that count, bool (K, C, P, P).
        others: sums of the layers of the others (`Scenes.layers`), each (K, c, P, P).
        power: power of the likelihood.
    """

    model: Scenes
    plate: pyro.plate
    image: Tensor
    ground: Tensor
    observed: Tensor
    others: list[Tensor]
    power: float

    def place(self, values: dict[str, Tensor]) -> tuple[Drawn, Pictures, Tensor, Tensor]:
        """Return the objects of values and their pictures, log p and their log density, (K,)."""
        with PrivateTrace():
            draw = poutine.condition(AsObject("")(self.model.draw_object), data=values)
            trace = poutine.trace(draw).get_trace(self.plate)
        drawn = trace.nodes["_RETURN"]["value"]
        placed = self.model.place_object(drawn)
        sums = zip(self.model.layers(placed), self.others, strict=True)
        mean = self.model.mix_layers([x + y[:, None] for x, y in sums], self.ground)[:, 0]
        error = torch.where(self.observed, self.image - mean, 0).square().sum((1, 2, 3))
        log_p = plain_log_density(scored_sites(trace), self.image)
        return drawn, placed, log_p, log_p - 0.5 * self.power * error / self.model.sigma_image**2

    def refine(self, proposal: Proposal, steps: int) -> Proposal:
        """Move the values of proposals, at the means of their distributions, to a higher density.

        Steps of Adam move values with Normal distributions, in units of their standard deviations.
        The distributions move with the values, so that log q is unchanged. An object that is not
        better in the end stays as it was.
        """
        means = proposal.values
        scales = {n: x["fn"].stddev for n, x in proposal.sites.items() if _is_normal(x["fn"])}
        moves = {n: torch.zeros_like(means[n], requires_grad=True) for n in scales}
        optimizer = torch.optim.Adam(moves.values(), lr=RATE)
        with torch.enable_grad():
            for _ in range(steps):
                values = {n: means[n] + scales[n] * move for n, move in moves.items()}
                gradients = torch.autograd.grad(
                    -self.place(means | values)[-1].sum(), list(moves.values())
                )
                for move, gradient in zip(moves.values(), gradients, strict=True):
                    move.grad = gradient
                optimizer.step()
        with torch.no_grad():
            values = {n: means[n] + scales[n] * move for n, move in moves.items()}
            better = self.place(means | values)[-1] > self.place(means)[-1]
            for name, value in values.items():
                here = better.reshape(-1, *(1,) * (value.dim() - 1))
                values[name] = torch.where(here, value, means[name])
            drawn, placed, log_p, _ = self.place(means | values)
            log_q = plain_log_density(proposal.sites, self.image)
            return Proposal(proposal.guide_trace, drawn, placed, log_p - log_q)


def _is_normal(distribution: Any) -> bool:
    """Return whether a distribution is Normal, of one number or of independent ones."""
    while isinstance(distribution, dist.Independent | torch.distributions.Independent):
        distribution = distribution.base_dist
    return isinstance(distribution, torch.distributions.Normal)
