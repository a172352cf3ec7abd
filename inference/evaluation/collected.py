"""Collection of the draws and log weights of an evaluation, with the names of their dims.

A model's plates name the dims of its sites: a pose of every part in every image has the dims
(chain, draw, image, parts, coordinate).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from pyro.poutine import Trace
from torch import Tensor

from capsule_zoo.inference.check import latent_sites
from capsule_zoo.inference.log_weight import IMAGES_PLATE
from capsule_zoo.models.common.modes import seeded
from capsule_zoo.models.common.spaces import ObservationSpace

_RESERVED = {"chain", "draw", "image"}
Names = tuple[str | None, ...]


class Chain:
    """The results collected from the passes of one chain.

    Args:
        draws: number of posterior draws to keep for each image.
        space: the space of the observations, which names their site, variable and dims.
        log_likelihood: keep the log density of the observations at the kept draws.

    Attributes:
        names: names of the dims of each variable after the image dim, by group and variable.
    """

    def __init__(self, draws: int, space: ObservationSpace, log_likelihood: bool = False) -> None:
        self.draws = draws
        self.space = space
        self.log_likelihood = log_likelihood
        self.names: dict[tuple[str, str], Names] = {}
        self._passes = 0
        self._kept: dict[tuple[str, str], list[list[np.ndarray]]] = {}

    def add(
        self, particles: tuple[int, int], log_weight: Tensor, model_trace: Trace, guide_trace: Trace
    ) -> None:
        """Add one pass; `particles` is the index of its first particle and their number."""
        first, _ = particles
        self._passes += 1
        self._append("sample_stats", "log_weight", particles, log_weight)
        if first >= self.draws:
            return
        drawn = latent_sites(guide_trace)
        for name, site in drawn.items():
            if name in model_trace.nodes:  # not an auxiliary site
                found = named(model_trace.nodes[name], site["value"], self.space)
                self._append("posterior", name, particles, *found)
        observed = model_trace.nodes.get(self.space.site)
        if observed is not None and latent_sites(model_trace).keys() <= drawn.keys():
            self._keep_observed(observed, bool(drawn), particles)

    def _keep_observed(self, site: dict, given: bool, particles: tuple[int, int]) -> None:
        # a stream of its own: weights do not depend on `draws`
        with seeded(torch.initial_seed() + 1 + self._passes):
            redrawn = site["fn"].sample()
        name, found = self.space.variable, named(site, redrawn, self.space)
        self._append("posterior_predictive", name, particles, *found)
        if given and self.log_likelihood:
            log_prob = site["fn"].log_prob(site["value"])
            by_image, _ = images_first(log_prob, plate_names(site, log_prob.dim()))
            total = by_image.reshape(len(by_image), -1).sum(1)
            self._append("log_likelihood", name, particles, total)

    def _append(
        self, group: str, name: str, particles: tuple[int, int], values: Tensor, names: Names = ()
    ) -> None:
        """Append values (count images, ...): every log weight, and the draws to keep of others."""
        first, count = particles
        kept = count if group == "sample_stats" else self.draws - first
        self.names[group, name] = names
        parts = self._kept.setdefault((group, name), [])
        if first == 0:
            parts.append([])  # the next images
        draws = values.reshape(count, -1, *values.shape[1:])[:kept]
        parts[-1].append(draws.cpu().numpy())

    def values(self) -> dict[tuple[str, str], np.ndarray]:
        """Return the arrays (draws, images, ...) by group and variable."""
        return {
            key: np.concatenate([np.concatenate(draws) for draws in parts], axis=1)
            for key, parts in self._kept.items()
        }


def named(site: dict, value: Tensor, space: ObservationSpace) -> tuple[Tensor, Names]:
    """Put the images first, drop the dims of size 1 that no plate owns, and name the others.

    Args:
        site: a node of the model's trace, which determines the plates and the event rank.
        value: a value of that site, (*batch, *event).
        space: the space of the observations.

    Returns:
        (images, ...) and the names of the dims after the images, None for a dim without a name.
    """
    event = event_names(site["name"], site["fn"].event_dim, space)
    return images_first(value, (*plate_names(site, value.dim() - len(event)), *event))


def images_first(value: Tensor, names: Names) -> tuple[Tensor, Names]:
    """Put the images first, as `named` does; a value without an image dim is of a single image."""
    stray = [dim for dim, name in enumerate(names) if name == "" and value.shape[dim] == 1]
    value = value.squeeze(tuple(stray))
    names = tuple(name or None for dim, name in enumerate(names) if dim not in stray)
    if IMAGES_PLATE not in names:
        return value[None], names
    dim = names.index(IMAGES_PLATE)
    return value.movedim(dim, 0), (*names[:dim], *names[dim + 1 :])


def plate_names(site: dict, rank: int) -> Names:
    """Return the names of the plates of a site's batch dims, "" where a dim has no plate."""
    frames = {frame.dim: frame.name for frame in site["cond_indep_stack"] if frame.vectorized}
    return tuple(frames.get(dim, "") for dim in range(-rank, 0))


def event_names(site: str, rank: int, space: ObservationSpace) -> Names:
    """Return the names of the dims of one event, None where they are unknown."""
    if site == space.site and rank == len(space.dims):
        return space.dims
    return ("coordinate",) if site.endswith("_pose") and rank == 1 else (None,) * rank


def dims_of_group(
    values: Mapping[str, np.ndarray], names: Mapping[str, Names], space: ObservationSpace
) -> dict[str, list[str]]:
    """Return the dims of each variable (chain, draw, image, ...), unique within a variable.

    A dim without a name is called `<variable>_dim_<number>`. So is a dim whose name has another
    size elsewhere in the group, or is reserved in every evaluation ("draw").
    """
    sizes: dict[str, set[int]] = {}
    for variable, array in values.items():
        for name, size in zip(names[variable], array.shape[3:], strict=True):
            sizes.setdefault(name or "", set()).add(size)
    good = {name for name, found in sizes.items() if len(found) == 1} - {""}
    return {
        variable: ["chain", "draw", "image", *_unique(variable, names[variable], good, space.dims)]
        for variable in values
    }


def _unique(
    variable: str, names: Sequence[str | None], good: set[str], observed: tuple[str, ...]
) -> list[str]:
    allowed = good if tuple(names) == observed else good - _RESERVED - {*observed}
    numbers = iter(range(len(names)))
    return [
        name if name in allowed and names.count(name) == 1 else f"{variable}_dim_{next(numbers)}"
        for name in names
    ]
