"""The path of unnormalized densities from a guide, or the prior, to the joint density.

    log f_beta(z) = log start(z) + beta gain(z)

    start a guide    start(z) = q(z | image),  gain(z) = log p(image, z) - log q(z | image)
    start the prior  start(z) = p(z),          gain(z) = log p(image | z)
    start both       start(z) = (1 - s) q(z | image) + s p(z),  s the fraction of the prior

The last one serves where the posterior is as wide as the prior in regions that a narrow guide gives
no density to: an object outside of the canvas, a part that is hidden.

At beta = 0 the distribution is normalized and can be drawn from; at beta = 1 it is p(image, z),
whose integral is p(image). Continuous sites are held as one position in unconstrained space, where
Hamiltonian steps need no borders, and the Jacobian of the transforms is a part of `start`. Sites
that the model enumerates are summed out.

Where sites of a model may be permuted and leave its density as it is, such as the slots of
`Scenes`, a guide finds one order of them, and an exact draw of the posterior has another. Then
q(z | image) is the mean of the guide's density over all S! orders, each of which takes time. Chains
start in the order of the guide: no other one gives other weights.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.poutine import Trace
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.escape_messenger import EscapeMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import NonlocalExit
from torch import Tensor
from torch.distributions.transforms import identity_transform

from capsule_zoo.guides.per_image.site_distributions import (
    ByLogits,
    Continuous,
    UnservedSite,
    family_of,
)
from capsule_zoo.inference.check import latent_sites, name_of
from capsule_zoo.inference.log_weight import enumerated_sites, log_density, plate_nesting
from capsule_zoo.inference.posterior.site_vector import SiteVector
from capsule_zoo.inference.training.checkpoint import random_state, set_random_state
from capsule_zoo.models.common.sharing import sharing
from capsule_zoo.models.common.spaces import space_of

Beta = float | Tensor  # inverse temperature: one for all rows, or (rows,)


@dataclass(frozen=True)
class Choice:
    """A discrete site, as `size` independent coordinates with `values` values each.

    Attributes:
        values: number of values of one coordinate.
        size: number of coordinates in a row.
        one_hot: whether a coordinate is a one-hot vector instead of a number.
    """

    values: int
    size: int
    one_hot: bool


class State(NamedTuple):
    """The latent values of every row; a row is one chain of one image.

    Attributes:
        position: all continuous sites in unconstrained space, (rows, D).
        choices: the values of the discrete sites, (rows, ...), by name.
    """

    position: Tensor
    choices: dict[str, Tensor]

    def where(self, accepted: Tensor, other: "State") -> "State":
        """Return rows of `self` where `accepted` (rows,) is True, and rows of `other` elsewhere."""
        choices = {
            name: _where(accepted, value, other.choices[name])
            for name, value in self.choices.items()
        }
        return State(_where(accepted, self.position, other.position), choices)

    def rows(self, index: Any) -> "State":
        """Return the latent values of the rows with this index."""
        choices = {name: value[index] for name, value in self.choices.items()}
        return State(self.position[index], choices)


class Terms(NamedTuple):
    """The two terms of log f_beta, (rows,) in nats, and perhaps their gradients, (rows, D).

    Gradients are with respect to `AnnealedPath.moving_values`.
    """

    start: Tensor
    gain: Tensor
    slope_of_start: Tensor | None = None
    slope_of_gain: Tensor | None = None

    def at(self, beta: Beta) -> Tensor:
        """Return log f_beta at an inverse temperature, (rows,)."""
        return self.start + beta * self.gain

    def slope(self, beta: Beta) -> Tensor:
        """Return the gradient of log f_beta at an inverse temperature, (rows, D).

        Raises:
            ValueError: no gradients were taken.
        """
        if self.slope_of_start is None or self.slope_of_gain is None:
            raise ValueError("these terms have no gradients; call terms(state, slopes=True)")
        beta = beta[:, None] if isinstance(beta, Tensor) else beta
        return self.slope_of_start + beta * self.slope_of_gain

    def where(self, accepted: Tensor, other: "Terms") -> "Terms":
        """Return rows of `self` where `accepted` (rows,) is True, and rows of `other` elsewhere."""
        both = [(a, b) for a, b in zip(self, other, strict=True) if a is not None and b is not None]
        return Terms(*(_where(accepted, *pair) for pair in both))


class AnnealedPath:
    """The path for a batch of rows; see the top of this file.

    Args:
        model: a directed model, in the form that is measured.
        guide: the start of the path; None for the prior.
        images: (rows, ...), each image as many times as it has chains.
        prior_fraction: fraction of chains that start at the prior, from 0 to below 1.

    Attributes:
        continuous: the continuous sites, side by side.
        places: the columns of each continuous site in a position, by name.
        columns: the length of a position.
        choices: the discrete sites, by name.
        beside: for each discrete site, the later sites in its plates, discrete or on the
            reals, such as the poses of parts after their presences; none if the model sums sites
            out.
        bits: the binary sites without such sites after them, if there is no continuous site. Many
            of their values change at once.
        flipped: all other discrete sites, whose values change one by one.

    Raises:
        UnservedSite: a site that neither Hamiltonian steps nor flips can move; the message names
            the site.
    """

    def __init__(
        self, model: Callable, guide: Callable | None, images: Tensor, prior_fraction: float = 0.0
    ) -> None:
        self.model = model
        self.guide = guide
        self.images = images
        self.prior_fraction = prior_fraction
        self.noise = random_state(images.device)
        self.observed = space_of(model).sites
        self.orders: Sequence[Mapping[str, str]] = getattr(model, "orders", lambda: [{}])()
        prior = _prior_sites(model, images)
        self.latents = list(prior)
        self.continuous = SiteVector()
        self.choices: dict[str, Choice] = {}
        for name, site in prior.items():
            family = _family(model, name, site["fn"])
            if isinstance(family, Continuous):
                self.continuous.add(name, site["value"], family.transform)
            elif family.temperature is None:
                self.choices[name] = _choice(family, site["value"])
            elif family.has_logits:
                self.continuous.add(name, site["value"])
            else:
                raise UnservedSite(
                    f"site {name!r} of {name_of(model)} is relaxed and lies on a simplex, where "
                    "annealing takes no Hamiltonian steps; measure the discrete model "
                    "(discrete=True)"
                )
        self.places, self.columns = self.continuous.places, self.continuous.dimension
        exact = not any(site.enumerated for site in getattr(model, "sites", ()))
        self.beside = {name: self._beside(name, prior) if exact else [] for name in self.choices}
        self.bits = [
            name
            for name, choice in self.choices.items()
            if not (self.columns or self.beside[name] or choice.one_hot) and choice.values == 2
        ]
        self.flipped = [name for name in self.choices if name not in self.bits]

    def _beside(self, name: str, prior: Mapping[str, dict]) -> list[str]:
        """Return the later sites, discrete or real, with the plates of a discrete site."""
        after = self.latents[self.latents.index(name) + 1 :]
        like = prior[name]["fn"].batch_shape
        if math.prod(like[1:]) != self.choices[name].size:
            return []
        places = {
            site_name: self.places[site_name] for site_name in after if site_name in self.places
        }
        reals = [
            site_name
            for site_name, place in places.items()
            if place.transform == identity_transform
        ]
        free = [*reals, *(site_name for site_name in after if site_name in self.choices)]
        return [site_name for site_name in free if prior[site_name]["fn"].batch_shape == like]

    def at(self, images: Tensor) -> "AnnealedPath":
        """Return the path for other images, one for each row."""
        twin = copy(self)
        twin.images = images
        return twin

    @torch.no_grad()
    def draw(self) -> State:
        """Sample the latents of every row from the start of the path."""
        drawn = self._draw_state(self.model if self.guide is None else self.guide)
        if self.guide is None or not self.prior_fraction:
            return drawn
        lot = torch.rand(len(self.images), device=self.images.device)
        return self._draw_state(self.model).where(lot < self.prior_fraction, drawn)

    def _draw_state(self, program: Callable) -> State:
        with poutine.block():
            trace = poutine.trace(program).get_trace(self.images)
        return self.state({name: trace.nodes[name]["value"] for name in self.latents})

    def state(self, values: Mapping[str, Tensor]) -> State:
        """Return the state with given values of all sites, (rows, ...)."""
        empty = self.images.new_zeros(len(self.images), 0)
        position = self.continuous.join(values) if self.places else empty
        return State(position, {name: values[name] for name in self.choices})

    @torch.no_grad()
    def redraw_element(
        self, state: State, proposed: State, name: str, at: Tensor
    ) -> tuple[State, Tensor]:
        """Resample one element of a site in `proposed` from the prior, given the sites before it.

        Args:
            at: index of the element in each row, (rows,).

        Returns:
            The state, and the log density of the element in `state` under its own prior there,
            minus the log density of the new element, (rows,).
        """
        rows = torch.arange(len(at), device=at.device)
        old, new = (
            self._distribution(name, self.values(candidate)) for candidate in (state, proposed)
        )
        value = new.sample()
        before = old.log_prob(self.values(state)[name])
        ratio = (before - new.log_prob(value)).reshape(len(at), -1)[rows, at]
        if name in self.choices:
            held = proposed.choices[name].clone()
            held[rows, at] = value[rows, at]
            return proposed._replace(choices={**proposed.choices, name: held}), ratio
        position = proposed.position.clone()
        elements = position[:, self.places[name].columns].unflatten(1, (before[0].numel(), -1))
        elements[rows, at] = value.reshape(elements.shape)[rows, at]
        return proposed._replace(position=position), ratio

    def _distribution(self, name: str, values: Mapping[str, Tensor]) -> Any:
        """Return the prior of a site given the values before it, without running the rest."""
        others = {site_name: value for site_name, value in values.items() if site_name != name}
        stop = EscapeMessenger(lambda site: site["name"] == name)
        try:
            with poutine.block(), stop, ValueMessenger(others):
                self.model(self.images)
        except NonlocalExit as error:
            return error.site["fn"]

    def values(self, state: State) -> dict[str, Tensor]:
        """Return the values of all sites at a state, (rows, ...) by name."""
        return {**state.choices, **self.continuous.split(state.position)[0]}

    def moving_values(self, state: State) -> Tensor:
        """Return the values that steps move, (rows, D): the bits or, without bits, the position."""
        if not self.bits:
            return state.position
        return torch.cat([state.choices[name].flatten(1) for name in self.bits], 1)

    def with_moving_values(self, state: State, values: Tensor) -> State:
        """Return the state with other values that steps move, (rows, D)."""
        if not self.bits:
            return state._replace(position=values)
        parts = values.split([self.choices[name].size for name in self.bits], 1)
        pairs = zip(self.bits, parts, strict=True)
        new = {name: part.view_as(state.choices[name]) for name, part in pairs}
        return state._replace(choices={**state.choices, **new})

    def terms(self, state: State, slopes: bool = False) -> Terms:
        """Compute both terms of log f_beta, with gradients if `slopes`."""
        if not slopes:
            with torch.no_grad():
                return Terms(*self._terms(state))
        with torch.enable_grad():
            moving_values = self.moving_values(state).detach().requires_grad_()
            start, gain = self._terms(self.with_moving_values(state, moving_values))
            slope_of_start = _slope(start, moving_values, keep=True)
            slope_of_gain = _slope(gain, moving_values, keep=False)
        return Terms(start.detach(), gain.detach(), slope_of_start, slope_of_gain)

    def _terms(self, state: State) -> tuple[Tensor, Tensor]:
        moved, log_jacobian = self.continuous.split(state.position)
        values = {**state.choices, **moved}
        device = self.images.device
        devices = [device] if device.type == "cuda" else []
        with sharing(), poutine.block(), torch.random.fork_rng(devices):
            # A guide may sample, such as the rotation of its view: with equal noise in every call.
            set_random_state(self.noise, device)
            joint = score_latents(self.model, values, self.images)
            start = self._start(values, joint)
            return start + log_jacobian, log_density(joint, self.images) - start

    def _start(self, values: Mapping[str, Tensor], joint: Trace) -> Tensor:
        """Compute log start(z), (rows,), at values of all sites, given the model's trace there."""
        if self.guide is None:
            return self._log_prior(joint)
        guided = self._log_guide(self.guide, values)
        if not self.prior_fraction:
            return guided
        prior = self._log_prior(joint) + math.log(self.prior_fraction)
        return torch.logaddexp(guided + math.log1p(-self.prior_fraction), prior)

    def _log_prior(self, joint: Trace) -> Tensor:
        """Compute log p(z), (rows,), from a trace of the model."""
        prior = joint.copy()
        for name in self.observed:
            prior.remove_node(name)
        return log_density(prior, self.images)

    def _log_guide(self, guide: Callable, values: Mapping[str, Tensor]) -> Tensor:
        """Return the log of a guide's mean density over all orders of the sites, (rows,)."""
        log_densities = []
        for order in self.orders:
            with ValueMessenger({name: values[order.get(name, name)] for name in values}):
                drawn = poutine.trace(guide).get_trace(self.images)
            log_densities.append(log_density(drawn, self.images))
        return torch.stack(log_densities).logsumexp(0) - math.log(len(log_densities))

    def columns_of(self, sites: Iterable[str]) -> Tensor:
        """Return the columns of continuous sites, one site after the other, (n,)."""
        columns = torch.arange(self.columns)
        return torch.cat([columns[:0], *(columns[self.places[name].columns] for name in sites)])

    def columns_in_orders(self) -> list[Tensor]:
        """Return the columns of a position for each order of the sites, (D,) each."""
        return [self.columns_of(order.get(n, n) for n in self.places) for order in self.orders]


class ValueMessenger(Messenger):
    """The messenger that sets latent sites to given values, which the program scores.

    Unlike under `poutine.condition` the sites stay latent, for programs that replay their traces.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]
            msg["done"] = True


def simulate(model: Callable, number: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Sample latents and images from a model; the latents are exact samples of the posterior.

    Returns:
        Images (number, ...) and the values of the latent sites, by name.

    Raises:
        ValueError: the model cannot draw from its prior.
    """
    with torch.no_grad(), poutine.block():
        try:
            trace = poutine.trace(model).get_trace(batch_size=number)
        except TypeError as error:
            raise ValueError(
                f"{name_of(model)} cannot be called with batch_size={number}, so no images can be "
                f"simulated ({error}); pass simulated=0, or a guide of auto_encoder(program, data)"
            ) from error
    return space_of(model).read(trace), {
        name: site["value"] for name, site in latent_sites(trace).items()
    }


def score_latents(model: Callable, values: Mapping[str, Tensor], images: Tensor) -> Trace:
    """Trace a model at given latents, with its enumerated sites, if any, enumerated."""
    with ValueMessenger(values):
        trace = poutine.trace(model).get_trace(images)
        if not enumerated_sites(trace):
            return trace
        first = -1 - plate_nesting(trace)
        return poutine.trace(EnumMessenger(first)(model)).get_trace(images)


def _prior_sites(model: Callable, images: Tensor) -> dict[str, dict]:
    """Return the latent sites of a model that are not summed out, by name."""
    with torch.no_grad(), poutine.block(), torch.random.fork_rng():
        trace = poutine.trace(model).get_trace(images)
    summed = enumerated_sites(trace)
    sites = {name: site for name, site in latent_sites(trace).items() if name not in summed}
    for name, site in sites.items():
        if len(site["value"]) != len(images):
            raise UnservedSite(
                f"site {name!r} of {name_of(model)} has values of shape "
                f"{tuple(site['value'].shape)} for {len(images)} images, so it belongs to no one "
                "image; draw it inside pyro.plate('images', ...), or make it a parameter"
            )
    return sites


def _family(model: Callable, name: str, distribution: Any) -> Any:
    try:
        return family_of(name, distribution)
    except UnservedSite:
        raise UnservedSite(
            f"site {name!r} of {name_of(model)} has the distribution "
            f"{type(distribution).__name__}, which annealing "
            "cannot move: it takes Hamiltonian steps on continuous sites with a transform from "
            "the reals, and changes the values of Bernoulli and categorical ones; measure "
            "another model, or use `evaluate`"
        ) from None


def _choice(family: ByLogits, value: Tensor) -> Choice:
    """Return the coordinates of a discrete site from its values (rows, ...)."""
    numbers = value[0].numel()
    if issubclass(family.family, torch.distributions.OneHotCategorical):
        return Choice(value.shape[-1], numbers // value.shape[-1], one_hot=True)
    return Choice(family.categories or 2, numbers, one_hot=False)


def _slope(term: Tensor, moved: Tensor, keep: bool) -> Tensor:
    """Return the gradient of a term in the moved values, (rows, D); zero if there is none."""
    if not term.requires_grad:
        return torch.zeros_like(moved)
    (slope,) = torch.autograd.grad(term.sum(), moved, retain_graph=keep, allow_unused=True)
    return torch.zeros_like(moved) if slope is None else slope


def _where(accepted: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return rows of `new` (rows, ...) where `accepted` (rows,) is True, else rows of `old`."""
    return torch.where(accepted.reshape(-1, *[1] * (new.dim() - 1)), new, old)
