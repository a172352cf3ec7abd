"""Counterfactual images: how an image would have looked if, say, an object had moved.

>>> result = intervene(model, guide, images, {"object_pose": lambda pose: pose + shift})
>>> result.reconstruction, result.mean                    # before and after, (1, N, C, H, W)

Three steps answer it, for every draw from the guide.

    abduction     latents are drawn from the guide, z ~ q(z | image). They stand for the noise of
                  all sites: z_v = f_v(z above v, noise_v).
    action        the sites that are named get their new values.
    prediction    the model runs again with the same noise. Sites that do not depend on the action
                  keep their values. The others follow: parts move with their object, and keep their
                  own residuals.

`inference.posterior.shared_noise` says how noise is kept for every kind of distribution. The
observed image is a site too: its counterfactual keeps the residual of every pixel.

References:
    Pearl 2009, "Causality", theorem 7.1.7. Balke & Pearl 1994, "Probabilistic evaluation of
    counterfactual queries", for twin networks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Distribution
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from capsule_zoo.inference.check import latent_sites, name_of
from capsule_zoo.inference.evaluation.prepare import Images, is_per_image, prepare
from capsule_zoo.inference.functions import require_model
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import with_summed_drawn
from capsule_zoo.inference.posterior.shared_noise import NoRule, carry
from capsule_zoo.models import Model
from capsule_zoo.models.checks import check_seed, check_whole
from capsule_zoo.models.common.modes import eval_mode, use_seed

Action = Tensor | float | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Counterfactual:
    """The result of `intervene`, for K draws of each of N images.

    Attributes:
        images: the counterfactual images (K, N, C, H, W), with the pixel noise of the given images.
        mean: E[image | counterfactual latents], without pixel noise, (K, N, C, H, W).
        reconstruction: E[image | inferred latents], the mean image before the action.
        latents: the counterfactual value of every latent site, (K, N, ...).
        inferred: the values drawn from the guide.
    """

    images: Tensor
    mean: Tensor
    reconstruction: Tensor
    latents: dict[str, Tensor]
    inferred: dict[str, Tensor]


@require_model
def intervene(
    model: Model,
    guide: nn.Module,
    images: Images,
    do: Mapping[str, Action],
    *,
    num_samples: int = 1,
    seed: int = 0,
    batch_size: int = 500,
) -> Counterfactual:
    """Return counterfactual images: some latent sites have other values, and the noise is kept.

    The discrete model is used, in the order in which its program draws the sites. (An energy model
    has no direction itself: its program draws the hidden units, then the image.) The images are
    as good as the guide: with the exact posterior they are the model's counterfactuals.

    Args:
        model: any model that draws images.
        guide: a guide to it.
        images: (N, C, H, W), or scenes of points (N, points, 2).
        do: the action: for every site that is set, its new value, or a function from its inferred
            value (N, ...) to the new one. A value is repeated where it has fewer dims.
        num_samples: draws from the guide, K.
        seed: seed of all draws; torch's random state is left as it was.
        batch_size: images in one pass.

    Raises:
        ValueError: `do` names no site, an unknown site or the image, or a value does not have the
            site's shape or lies outside of its support; the model explains labels only; images or
            numbers that do not fit; or a site depends on the action, and there is no rule by which
            its noise is kept.
        IncompatibleGuide: the guide does not fit the model.
    """
    check_whole(1, num_samples=num_samples, batch_size=batch_size)
    check_seed(seed)
    if getattr(model, "supervised", False):
        raise ValueError(
            f"{name_of(model)} explains labels and draws no images, so that no image can be "
            "predicted; give a model of images"
        )
    if not model.space.site:
        raise ValueError(
            f"intervene keeps the noise of a model that declares its observed site, and "
            f"{name_of(model)} is a plain program; use pyro.do on the program itself"
        )
    pair = prepare(model, guide, images, labels=None, seed=seed, discrete=True)
    size = len(pair.images) if is_per_image(guide) else batch_size
    mode = eval_mode(pair.model, pair.guide)
    outcomes: list[Counterfactual] = []
    with isolated_parameters(pair.model, pair.guide), mode, use_seed(seed), torch.no_grad():
        for _ in range(num_samples):
            drawn = [
                _infer_latents(pair.model, pair.guide, batch) for batch in pair.images.split(size)
            ]
            inferred = _join_values(drawn, torch.cat)
            new = _new_values(model, inferred, do)
            parts = [
                _predict_outcomes(
                    pair.model, pair.images[rows], _at(inferred, rows), _at(new, rows)
                )
                for rows in torch.arange(len(pair.images)).split(size)
            ]
            outcomes.append(
                Counterfactual(**_join_values([vars(part) for part in parts], torch.cat))
            )
    return Counterfactual(**_join_values([vars(outcome) for outcome in outcomes], torch.stack))


def _join_values(
    parts: Sequence[Mapping[str, Any]], join: Callable[[list[Tensor]], Tensor]
) -> dict:
    """Join tensors by name; a value may be a mapping of tensors."""
    return {
        name: _join_values([part[name] for part in parts], join)
        if isinstance(parts[0][name], dict)
        else join([part[name] for part in parts])
        for name in parts[0]
    }


def _at(values: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: value[rows.to(value.device)] for name, value in values.items()}


def _infer_latents(model: Callable, guide: Callable, images: Tensor) -> dict[str, Tensor]:
    """Sample every latent site (B, ...) from the guide; summed-out sites from their posterior."""
    drawn = latent_sites(poutine.trace(guide).get_trace(images))
    names = latent_sites(poutine.trace(model).get_trace(images))
    values = {name: drawn[name]["value"] for name in names if name in drawn}
    nodes = with_summed_drawn(model, values, images).nodes
    return {name: nodes[name]["value"] for name in names}


def _new_values(
    model: Model, inferred: Mapping[str, Tensor], do: Mapping[str, Action]
) -> dict[str, Tensor]:
    """Compute and check the new values (N, ...) of the sites that are set."""
    if not do:
        raise ValueError(f"do is empty; set one of the latent sites {list(inferred)}")
    new_values = {}
    for name, action in do.items():
        if name not in inferred:
            raise ValueError(
                f"do sets {name!r}, but the latent sites of {name_of(model)} are {list(inferred)}"
            )
        old = inferred[name]
        value = torch.as_tensor(action(old.clone()) if callable(action) else action).to(old)
        try:
            new_values[name] = value.expand(old.shape)
        except RuntimeError:
            raise ValueError(
                f"do sets {name!r} to a value of shape {tuple(value.shape)}, but the site has the "
                f"shape {tuple(old.shape)}; give a value that broadcasts to it, or a function of "
                "the inferred value"
            ) from None
    return new_values


def _predict_outcomes(
    model: Any, images: Tensor, inferred: dict[str, Tensor], new: dict[str, Tensor]
) -> Counterfactual:
    """Run the model at the inferred values, then with the new values and the noise kept."""
    before = poutine.trace(poutine.condition(model, inferred)).get_trace(images)
    with _SameNoise(before, new):
        after = poutine.trace(model).get_trace(images)
    site, space = model.space.site, model.space
    old, distribution = before.nodes[site]["fn"], after.nodes[site]["fn"]
    carried_image = _carry(site, before.nodes[site]["value"], old, distribution)
    return Counterfactual(
        images=space.as_batch(carried_image),
        mean=space.as_batch(distribution.mean),
        reconstruction=space.as_batch(old.mean),
        latents={name: after.nodes[name]["value"] for name in inferred},
        inferred=inferred,
    )


class _SameNoise(Messenger):
    """The messenger that sets sites, and computes the others from their inferred noise."""

    def __init__(self, before: Trace, new: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.before = before
        self.new = new

    def _pyro_sample(self, msg: Any) -> None:
        name, distribution = msg["name"], msg["fn"]
        if msg["is_observed"] or name not in self.before.nodes:
            return
        if name in self.new:
            value = self.new[name]
            if not distribution.support.check(value).all():
                raise ValueError(
                    f"do sets {name!r} to values outside of its support {distribution.support}"
                )
        elif isinstance(distribution, Distribution):
            factual = self.before.nodes[name]
            value = _carry(name, factual["value"], factual["fn"], distribution)
        else:  # a subsample site: the indices of a plate
            return
        msg["value"] = value
        msg["done"] = True


def _carry(name: str, value: Tensor, before: Any, after: Any) -> Tensor:
    try:
        return carry(value, before, after)
    except NoRule as error:
        raise ValueError(
            f"site {name!r} depends on the action, and {error}; set {name!r} too, or add a rule: "
            "capsule_zoo.inference.posterior.shared_noise.carried.register"
        ) from error
