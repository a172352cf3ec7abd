"""The Gaussian approximation of a posterior at its mode, from first derivatives.

    q(u | image) = Normal(u*, P^-1),    P = sum over sites s of J_s' F_s J_s  at u*

u holds all continuous sites in unconstrained space. J_s is the Jacobian of the parameters of site
s, latent or observed, and F_s their Fisher information: 1 / scale^2 of a normal value minus its
mean, 2 of the logarithm of its scale, (n + 1) / (n + 3) and n / (n + 3) times these of Student's t
with n degrees of freedom (1 for Cauchy), p (1 - p) of a Bernoulli logit, and the inverse of the
variance of any other distribution. Of the absolute value of such a variable the logarithm counts,
with the information of the scale. In a mixture of normal distributions each counts as much as it is
responsible for. So P is the sum of the precisions of prior and pixels. It is positive definite, and
exact for linear means of normal distributions. Discrete sites are held at their likeliest values.
Some of them decide the distribution of a continuous site, as the presence of a part decides its
pose. Metropolis-Hastings proposals change these first, and draw the pose again.

The distribution is local. On one of eight digits of a VAE with two latents, compared with
quadrature, one mode missed another one that holds 5 % of the posterior, and the small standard
error of its importance-weighted bound did not show that. Take several modes where it matters.

J has a forward derivative for each number of u, of all images at once (`torch.func.jvp`). Where an
operation of the model has none, they are central differences. u* is a refined point that climbs a
few steps further by the same matrix (Levenberg-Marquardt).

>>> guide = fit_guide("gauss_newton", model, encoder, images)  # -> GaussNewton
>>> guide = fit_guide("mixture", model, encoder, images)      # a mixture of the modes that it finds
>>> SemiAmortized(encoder, 100, kind="gauss_newton")          # for the images of each call

References:
    MacKay 1992, "A Practical Bayesian Framework for Backpropagation Networks" (Laplace's method).
    Schraudolph 2002, "Fast Curvature Matrix-Vector Products for Second-Order Gradient Descent"
    (the Gauss-Newton matrix in general). Nocedal & Wright 2006, section 10.3 (the steps).
"""

import math
from collections.abc import Callable
from typing import Any
from warnings import catch_warnings, simplefilter
from weakref import WeakSet

import pyro.distributions as dist
import torch
from pyro import poutine, validation_enabled
from pyro.distributions.torch import Independent
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor
from torch.distributions.multivariate_normal import _precision_to_scale_tril
from torch.distributions.transforms import AbsTransform, ComposeTransform

from capsule_zoo.data.progress import track
from capsule_zoo.guides import FreeForm, GaussNewton, Guide
from capsule_zoo.guides.per_image.site_distributions import ByLogits, UnservedSite
from capsule_zoo.inference.annealing.path import AnnealedPath, State, ValueMessenger
from capsule_zoo.inference.annealing.transitions import flip
from capsule_zoo.inference.check import name_of
from capsule_zoo.inference.evaluation.prepare import Images, prepare_images
from capsule_zoo.inference.functions import require_model
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.not_finite import refuse_non_finite
from capsule_zoo.inference.posterior.modes import (
    duplicates,
    evidence_of,
    improper_by_site,
    proper_rows,
    refuse_improper,
)
from capsule_zoo.inference.posterior.refine import run_refinement
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_whole
from capsule_zoo.models.common.missing_pixels import ObservedPixels
from capsule_zoo.models.common.modes import eval_mode, frozen, use_seed
from capsule_zoo.models.common.plates import ImageDistribution
from capsule_zoo.models.common.spaces import tile_batch

Measured = list[tuple[Tensor, Tensor]]  # parameters, and the roots of their Fisher information

CLIMBING = 64  # default number of prior samples that climb for each image
_ROWS = 1024  # rows of one pass: images times directions
_WITHOUT_FORWARD_MODE: WeakSet[Callable] = WeakSet()  # see `_derivative`
_NUMBERS = 2**25  # entries of the Jacobians that are in memory at once
_WHOLE = 2048  # coordinates of an image above which the default is blocks
_DAMPING = 0.01  # damping of the step after a step that failed
_ROUNDS, _FLIPS = 4, 8  # rounds for models with `AnnealedPath.beside`; proposals for each value
_SCREENED = 16  # prior samples for each one that climbs
_TEMPERED, _RATE = (
    120,
    0.4,
)  # steps of the climb, and their length in standard deviations of the prior
_COLD = 0.01  # first weight of the likelihood; it is 1 after half of the steps

_MULTIVARIATE = (
    torch.distributions.MultivariateNormal,
    torch.distributions.LowRankMultivariateNormal,
)


@require_model
@torch.inference_mode(False)
def gauss_newton(
    model: Model,
    start: Guide | None,
    images: Images,
    *,
    steps: int = 100,
    climb: int = 3,
    modes: int = 1,
    climbing: int = CLIMBING,
    blocks: bool | None = None,
    seed: int = 0,
    check: bool = True,
) -> GaussNewton:
    """Return the guide with the Gauss-Newton distribution of every image; see the top of this file.

    Args:
        model: the model; it is not changed.
        start: the guide whose answers are refined; None starts at draws from the prior.
        images: (B, C, H, W).
        steps: steps of free-form inference, from `start` to the points.
        climb: steps by the Gauss-Newton matrix that follow. One is exact where means are linear.
        modes: points that are refined for each image: the answer of `start`, and in turn points
            that climb from the prior and draws of `start`. They become a mixture, weighted by
            evidence, in which a point that reaches the mode of another one counts once.
        climbing: draws of the prior that climb for each image, where `modes` is above 1: the
            likeliest of 16 times as many. More find higher points in scenes of several objects.
        blocks: whether the distribution is independent between sites, and between the elements of
            their plates: the parts, the objects. By default above 2,048 numbers an image.
        seed: seed of all noise.
        check: whether images outside of the pixels' range are refused.

    Raises:
        ValueError: the model has no normalized density of images, or a number is out of range.
        UnservedSite: a site is summed out by enumeration, has no variance, or no free-form
            distribution; or none is continuous.
        NonFiniteGuide: the distribution of an image is not finite, or so wide that draws of it
            overflow; the message names image and site. Of several modes such ones are left out.
    """
    check_whole(0, steps=steps, climb=climb)
    check_whole(1, modes=modes, climbing=climbing)
    if model.supervised or not model.normalized:
        raise ValueError(
            f"{type(model).__name__} gives its images no mean and variance under a normalized "
            "density, so there is no Gauss-Newton distribution; use another guide"
        )
    if summed := [site.name for site in model.sites if site.enumerated]:
        raise UnservedSite(
            f"{name_of(model)} sums out {', '.join(summed)} by enumeration, so there is no "
            "Gauss-Newton distribution; build it with selection='marginal', or use free_form"
        )
    images = prepare_images(model, images, start, check=check)
    programs = [item for item in (model, start) if item is not None]
    mode, freeze = eval_mode(*programs), frozen(*programs)
    quiet = validation_enabled(False)
    with isolated_parameters(*programs), quiet, mode, freeze, use_seed(seed), poutine.block():
        if modes > 1:
            start = _several(model, start, images, modes, climbing)
            images = tile_batch(images, modes)
        points = run_refinement(model, start, images, steps, seed=seed)
        assert isinstance(points, FreeForm)
        path, state = path_at(model, points, images)
        groups = _groups(path, points, path.columns > _WHOLE if blocks is None else blocks)
        settles = any(path.beside.values())
        for _ in range(_ROUNDS if settles else 1):
            state = _settle_discrete(points, path, state) if settles else state
            state, precisions = climb_density(path, state, groups, climb)
        improper = improper_by_site(path, state, groups, precisions)
        rows = proper_rows(torch.stack([*improper.values()]).any(0), modes)
        improper = {name: wrong[rows] for name, wrong in improper.items()}
        refuse_improper(path, state, improper, modes, _measure_by_site)
        state, precisions = state.rows(rows), [item[rows] for item in precisions]
        for logits in points.logits.values():
            logits.data.copy_(logits.data[rows])
        factors = [_precision_to_scale_tril(item) for item in precisions]
        for name, loc in points.locs.items():
            loc.data.copy_(state.position[:, path.places[name].columns].reshape(loc.shape))
        by_site = _factors_by_site(path, points, factors)
        if modes == 1:
            return GaussNewton(points, by_site)
        evidence = evidence_of(GaussNewton(points, by_site), images).view(modes, -1)
        duplicate = duplicates(state, groups, precisions, evidence)
        guide = GaussNewton(points, by_site, evidence.masked_fill(duplicate, -math.inf))
        highest = evidence.amax(0)
        refuse_non_finite(guide, images, highest.masked_fill(highest == -math.inf, math.nan))
        return guide


def precision(path: AnnealedPath, state: State, columns: Tensor) -> Tensor:
    """Compute the Gauss-Newton matrix of the log joint density, (B, n, n) in float64.

    Args:
        path: the path from the prior to the joint density of the images.
        state: the latents of every image.
        columns: indices of the columns of the position to which the matrix belongs, (n,).
    """
    first = path.at(path.images[:1])
    rows = max(1, _NUMBERS // (_dependent(first, state.rows([0]))[1].numel() * len(columns)))
    parts = torch.arange(len(path.images)).split(rows)
    jacobians = (_jacobian(path.at(path.images[i]), state.rows(i), columns) for i in parts)
    return torch.cat([jacobian @ jacobian.mT for jacobian in jacobians])


def _jacobian(path: AnnealedPath, state: State, columns: Tensor) -> Tensor:
    """Return the Jacobian of parameters, times roots of information, (B, columns, n), float64."""
    images = len(path.images)
    places, root = _dependent(path, state)
    unit = torch.eye(state.position.shape[1]).to(state.position)[columns]
    derivatives = []
    for chunk in unit.split(max(1, _ROWS // images)):
        copies = path.at(tile_batch(path.images, len(chunk)))
        held = state.rows(torch.arange(images).repeat(len(chunk)))

        def parameters(position: Tensor, copies: AnnealedPath = copies, held: State = held) -> Any:
            measured = _measure_sites(copies, held._replace(position=position))
            return torch.cat([measured[i][0].reshape(len(position), -1) for i in places], 1)

        rows = chunk.repeat_interleave(images, 0)
        along = _derivative(parameters, held.position, rows, path.model)
        derivatives.append(along.double().unflatten(0, (len(chunk), images)))
    return (torch.cat(derivatives) * root.double()).transpose(0, 1)


@torch.no_grad()
def _derivative(
    function: Callable[[Tensor], Tensor], at: Tensor, along: Tensor, model: Callable
) -> Tensor:
    """Return each row's directional derivative, by forward mode or central differences.

    Forward mode is not available for `grid_sample`, nor for functions with a backward pass of their
    own. It is tried once for a model: Pyro's errors keep the tensors of a trace until they are
    collected. The error of the differences, about 1e-4 of the derivative in float32, does not
    matter.
    """
    if model not in _WITHOUT_FORWARD_MODE:
        try:
            with catch_warnings():
                simplefilter("ignore", FutureWarning)  # torch warns when it scripts its formulas
                return torch.func.jvp(function, (at,), (along,))[1]
        except (NotImplementedError, RuntimeError):
            _WITHOUT_FORWARD_MODE.add(model)
    step = torch.finfo(at.dtype).eps ** (1 / 3)
    return (function(at + step * along) - function(at - step * along)) / (2 * step)


def _dependent(path: AnnealedPath, state: State) -> tuple[list[int], Tensor]:
    """Return indices of parameters that depend on the position, and information roots, (B, n)."""
    with torch.enable_grad():
        position = state.position.detach().requires_grad_()
        measurements = _measure_sites(path, state._replace(position=position))
    places = [i for i, (values, _) in enumerate(measurements) if values.requires_grad]
    roots = [measurements[i][1].detach().expand_as(measurements[i][0]) for i in places]
    return places, torch.cat([root.reshape(len(position), -1) for root in roots], 1)


def _measure_sites(path: AnnealedPath, state: State) -> Measured:
    """Return all sites' parameters and roots at a state; see `measure_information`."""
    return [pair for parameters in _measure_by_site(path, state).values() for pair in parameters]


def _measure_by_site(path: AnnealedPath, state: State) -> dict[str, Measured]:
    """Return each site's parameters and roots at a state; see `measure_information`.

    Raises:
        UnservedSite: the image or a continuous site has no variance.
    """
    values = path.values(state)
    with poutine.block(), ValueMessenger(values):
        trace = prune_subsample_sites(poutine.trace(path.model).get_trace(path.images))
    by_site: dict[str, Measured] = {}
    for name, site in trace.nodes.items():
        if site["type"] != "sample":
            continue
        parameters = measure_information(site["fn"], site["value"])
        if not parameters and (name in path.places or name in path.observed):
            raise UnservedSite(
                f"site {name!r} of {name_of(path.model)} has the distribution "
                f"{type(site['fn']).__name__} "
                "without mean and variance, so there is no Gauss-Newton distribution; use free_form"
            )
        by_site[name] = parameters
    return by_site


def measure_information(distribution: Any, value: Tensor) -> Measured:
    """Return a distribution's parameters, and the square roots of their Fisher information.

    A mean enters as the distance of the value from it, because the value of a latent site moves
    too. There are none for a distribution without mean and variance.
    """
    if isinstance(distribution, Independent | ExpandedDistribution):
        return measure_information(distribution.base_dist, value)
    if isinstance(distribution, ObservedPixels) and isinstance(
        distribution.distribution, ImageDistribution
    ):
        assert distribution.observed is not None  # the images are passed
        inside = ObservedPixels(
            distribution.distribution.distribution, distribution.observed.unsqueeze(-4)
        )
        return measure_information(inside, value.unsqueeze(-4))
    if isinstance(
        distribution, ImageDistribution
    ):  # the distribution inside has a dim more than the value
        return measure_information(distribution.distribution, value.unsqueeze(-4))
    if isinstance(distribution, MaskedDistribution | ObservedPixels):
        masked = isinstance(distribution, MaskedDistribution)
        inner, mask = (
            (distribution.base_dist, distribution._mask)
            if masked
            else (distribution.distribution, distribution.observed)
        )
        dims = distribution.event_dim if masked else 0
        mask = torch.as_tensor(mask, device=value.device)
        mask = mask.reshape(*mask.shape, *[1] * dims)
        return [(item, root * mask) for item, root in measure_information(inner, value)]
    if isinstance(distribution, torch.distributions.TransformedDistribution):
        base: Any = distribution.base_dist
        absolute = [type(item) for item in distribution.transforms] == [AbsTransform]
        if absolute and (information := _location_scale_information(base)) is not None:
            return [((value / base.scale).log(), information[1].sqrt())]
        return measure_information(
            distribution.base_dist, ComposeTransform(distribution.transforms).inv(value)
        )
    if isinstance(distribution, torch.distributions.MixtureSameFamily):
        return _measure_mixture(distribution, value)
    if (information := _location_scale_information(distribution)) is not None:
        location, scale = information
        return [
            (value - distribution.loc, location.sqrt() / distribution.scale),
            (distribution.scale.log(), scale.sqrt()),
        ]
    if isinstance(distribution, _MULTIVARIATE):  # uncorrelated in the basis of the factor
        difference = (value - distribution.loc)[..., None]
        factor = distribution.scale_tril
        whitened = torch.linalg.solve_triangular(factor, difference, upper=False)[..., 0]
        return [(whitened, torch.ones_like(whitened))]
    if isinstance(distribution, torch.distributions.Bernoulli):
        return [(distribution.logits, (distribution.probs * (1 - distribution.probs)).sqrt())]
    if isinstance(
        distribution, torch.distributions.Categorical | torch.distributions.OneHotCategorical
    ):
        return [(distribution.logits, distribution.probs.sqrt())]
    try:
        return [(value - distribution.mean, distribution.variance.rsqrt())]
    except (NotImplementedError, AttributeError):
        return []


def _location_scale_information(distribution: Any) -> tuple[Tensor, Tensor] | None:
    """Return the Fisher information of location / scale, and of the logarithm of the scale.

    It is finite for Cauchy and Student's t too, whose variance need not be. None of other families.
    """
    if isinstance(distribution, torch.distributions.Normal):
        one = distribution.scale.new_ones(())
        return one, 2 * one
    if isinstance(distribution, torch.distributions.Cauchy | torch.distributions.StudentT):
        freedom = getattr(distribution, "df", distribution.scale.new_ones(()))
        return (freedom + 1) / (freedom + 3), 2 * freedom / (freedom + 3)
    return None


def _measure_mixture(distribution: Any, value: Tensor) -> Measured:
    """Return the parameters of a mixture's components, weighted by their responsibilities."""
    parts = distribution.component_distribution
    padded = value.unsqueeze(-1 - distribution.event_dim)
    fraction = (
        (parts.log_prob(padded) + distribution.mixture_distribution.logits).softmax(-1).sqrt()
    )
    fraction = fraction.reshape(*fraction.shape, *[1] * distribution.event_dim)
    return [(parameter, root * fraction) for parameter, root in measure_information(parts, padded)]


def path_at(model: Model, points: FreeForm, images: Tensor) -> tuple[AnnealedPath, State]:
    """Return the path to the discrete model's joint density, and the state at given points."""
    discrete = points.discretize()
    events = {site.name: site.event_dim for site in discrete.model.latent_sites}
    values = {}
    for name, family in discrete.families.items():
        if isinstance(family, ByLogits):
            distribution = family.distribution(discrete.logits[name].detach(), events[name])
            values[name] = distribution.mode.nan_to_num()  # torch has no mode for even odds
        else:
            values[name] = family.transform(discrete.locs[name].detach())
    path = AnnealedPath(discrete.model, None, images)
    if not path.columns:
        raise UnservedSite(
            f"{type(model).__name__} has no continuous site, so there is no Gauss-Newton "
            "distribution; use free_form"
        )
    return path, path.state(values)


def _settle_discrete(points: FreeForm, path: AnnealedPath, state: State) -> State:
    """Resample discrete values on which other sites depend, by `flip` at the posterior.

    The logits of `points` are set to the new values, where values have changed.
    """
    flips = _FLIPS * sum(choice.size for choice in path.choices.values())
    settled, _ = flip(path, state, path.terms(state), 1.0, flips)
    for name, value in settled.choices.items():
        family = points.discretize().families[name]
        assert isinstance(family, ByLogits)
        sure = family.start(dist.Delta(value), value)
        same = value == state.choices[name]
        same = same.all(-1, keepdim=True) if path.choices[name].one_hot else same
        same = same[..., None] if same.dim() < sure.dim() else same
        points.logits[name].data.copy_(torch.where(same, points.logits[name], sure))
    return settled


def _groups(path: AnnealedPath, points: FreeForm, blocks: bool) -> list[Tensor]:
    """Return groups of correlated columns: one of all columns, or one for each element."""
    if not blocks:
        return [path.columns_of(points.locs)]
    groups: list[Tensor] = []
    for site in points.discretize().model.latent_sites:
        if site.name in path.places:
            shape = path.places[site.name].shape
            inside = max(0, len(shape) - max(site.event_dim, 0))
            groups += path.columns_of([site.name]).view(-1, math.prod(shape[inside:]))
    return groups


def climb_density(
    path: AnnealedPath, state: State, groups: list[Tensor], steps: int
) -> tuple[State, list[Tensor]]:
    """Climb the log joint density by damped steps; return the state and each group's matrix.

    Args:
        groups: the columns of the position that are correlated, as many as there are matrices.
    """
    terms = path.terms(state, slopes=True)
    damping = terms.gain.new_zeros(len(terms.gain)).double()
    matrices = [precision(path, state, group) for group in groups]
    for _ in track(range(steps), "climbing", "steps"):
        slope = terms.slope(1.0).double()
        move = torch.zeros_like(slope)
        for group, matrix in zip(groups, matrices, strict=True):
            ridge = torch.diag_embed(matrix.diagonal(dim1=1, dim2=2) * damping[:, None])
            factor, _ = torch.linalg.cholesky_ex(matrix + ridge)  # a failed row does not move
            solved = torch.cholesky_solve(slope[:, group, None], factor)
            move[:, group] = solved[..., 0]
        other = state._replace(position=state.position + move.to(state.position))
        higher = path.terms(other, slopes=True)
        better = higher.at(1.0) > terms.at(1.0)
        state, terms = other.where(better, state), higher.where(better, terms)
        damping = torch.where(better, damping / 10, (10 * damping).clamp(min=_DAMPING))
        if better.any():
            matrices = [precision(path, state, group) for group in groups]
    return state, matrices


def _factors_by_site(
    path: AnnealedPath, points: FreeForm, factors: list[Tensor]
) -> dict[str, Tensor]:
    """Convert the factors of all groups to the form of `GaussNewton`, by site."""
    sizes = [path.places[name].columns for name in points.locs]
    if len(factors) == 1:
        rows = factors[0].split([s.stop - s.start for s in sizes], 1)
        return dict(zip(points.locs, rows, strict=True))
    site_factors, first = {}, 0
    for name, columns in zip(points.locs, sizes, strict=True):
        number = (columns.stop - columns.start) // factors[first].shape[-1]
        site_factors[name] = torch.stack(factors[first : first + number], 1)
        first += number
    return site_factors


@torch.no_grad()
def _several(
    model: Model, start: Guide | None, images: Tensor, modes: int, climbing: int
) -> FreeForm:
    """Return initial points of all modes: a guide's mode, its samples, climbed prior samples."""
    points = FreeForm(model, tile_batch(images, modes), start)
    discrete = points.discretize()
    guide_copies = range(2, modes, 2) if start is not None else range(0)
    climbed = [copy for copy in range(1, modes) if copy not in guide_copies]
    chunks = images.split(max(1, _ROWS // climbing))
    parts = [_climb_from_prior(discrete.model, part, len(climbed), climbing) for part in chunks]
    for copy in range(1, modes):
        rows = slice(copy * len(images), (copy + 1) * len(images))
        nodes = poutine.trace(start).get_trace(images).nodes if copy in guide_copies else {}
        for name, family in (points if copy in guide_copies else discrete).families.items():
            if copy in guide_copies:
                value = nodes[name]["value"]
            else:
                value = torch.cat([part[name][climbed.index(copy)] for part in parts])
            if isinstance(family, ByLogits):
                points.logits[name][rows] = family.start(dist.Delta(value), value)
            else:
                points.locs[name][rows] = family.start(None, value)[0]
    return points


def _climb_from_prior(
    model: Model, images: Tensor, number: int, climbing: int
) -> dict[str, Tensor]:
    """Return the most probable points reached from prior samples, (number, B, ...) by site.

    The likeliest of many draws climb by Adam while the image counts more and more.
    """
    climbing = max(climbing, number)
    path = AnnealedPath(model, None, tile_batch(images, climbing))
    drawn = [path.draw() for _ in range(_SCREENED)]
    joint = torch.cat([path.terms(candidate).at(1.0) for candidate in drawn])
    choices = {
        name: torch.cat([candidate.choices[name] for candidate in drawn]) for name in path.choices
    }
    every = State(torch.cat([candidate.position for candidate in drawn]), choices)
    state = every.rows(_likeliest(joint, len(images), climbing))
    unit = every.position.std(0).clamp(min=1e-6)
    place = torch.nn.Parameter(state.position / unit)
    climb = torch.optim.Adam([place], betas=(0.8, 0.8), maximize=True)
    for step in track(range(_TEMPERED), "searching for modes", "steps"):
        beta = min(1.0, _COLD + 2 * step / _TEMPERED)
        place.grad = unit * path.terms(state, slopes=True).slope(beta).nan_to_num()
        climb.param_groups[0]["lr"] = _RATE * (1 - step / _TEMPERED)
        climb.step()
        state = state._replace(position=unit * place.detach())
    best = state.rows(_likeliest(path.terms(state).at(1.0), len(images), number))
    return {n: value.unflatten(0, (number, -1)) for n, value in path.values(best).items()}


def _likeliest(joint: Tensor, images: int, number: int) -> Tensor:
    """Return the rows, of copies times images, with the `number` highest values of each image."""
    best = joint.view(-1, images).nan_to_num(-math.inf).topk(number, 0).indices
    return (best * images + torch.arange(images, device=best.device)).flatten()
