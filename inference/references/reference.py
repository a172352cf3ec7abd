"""Reference posteriors: small problems with exact draws, or draws of chains that were checked.

>>> problem = load_reference("constellation")
>>> problem.log_prob(x)                       # (...,), nats, from unconstrained vectors (..., D)
>>> problem.sites(x)["object_pose"]           # the same numbers as the model's sites
>>> problem.draws, problem.checks             # gold draws (S, D), and how they were made
>>> problem.score(my_draws).mean_error        # in posterior standard deviations
>>> problem.score(ExactMatching(problem.model)).kl

They serve any method of inference, in Pyro or outside of it. A problem is a model and one image.
The continuous sites make up one vector in R^D. The discrete sites are summed out exactly:

    log_prob(x) = log sum_s p(image, z(x), s) + log |dz / dx|

This is the log posterior density up to a constant, log p(image). `problems` describes the
problems, and `tools/reference_draws.py` makes their files.

References:
    Magnusson, Torgander, Buerkner, Zhang, Carpenter & Vehtari 2024, "posteriordb: Testing,
    Benchmarking and Developing Bayesian Inference Algorithms" (arXiv 2407.04967). Sountsov, Radul
    et al. 2020, "Inference Gym".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from pyro import poutine
from torch import Tensor, nn
from torch.distributions import biject_to

from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.inference.annealing.path import score_latents
from capsule_zoo.inference.evaluation.ancestral import infer
from capsule_zoo.inference.evaluation.evaluate import evaluate
from capsule_zoo.inference.evaluation.summary import per_image_elbo
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import log_density
from capsule_zoo.inference.posterior.site_vector import SiteVector
from capsule_zoo.models import Model
from capsule_zoo.models.checks import check_whole
from capsule_zoo.models.common.modes import use_seed

_ROWS = 8192  # rows of the model in one run


class Score(NamedTuple):
    """The distance of draws from a reference posterior.

    Attributes:
        mean_error: root mean square over coordinates of the error of E[x], in posterior standard
            standard deviations of x.
        square_error: error of E[x^2], in posterior standard deviations of x^2.
        worst: the largest absolute error of one coordinate, among both kinds.
        noise: the expected mean_error of this many independent draws of the posterior,
            1 / sqrt(draws). An error near it shows no fault.
        kl: KL(q || posterior) of a guide in nats, estimated from its draws. None for draws without
            a guide, for a guide without a density, and where log p(image) is not known exactly.
    """

    mean_error: float
    square_error: float
    worst: float
    noise: float
    kl: float | None


@dataclass(frozen=True, eq=False)
class Reference:
    """A posterior with reference draws; see the top of this file.

    Attributes:
        name: the name for `load_reference`.
        model: the model, in float64, with discrete presences and fixed parameters.
        images: the observed image, (1, ...).
        settings: every joint value of the discrete sites, (settings, ...) by site.
        draws: reference draws of the unconstrained vector, (S, D), float64.
        mean, scale: mean and standard deviation of every coordinate, (D,), exact or from more
            draws than are kept.
        square_mean, squared_deviation: mean and standard deviation of every coordinate's square.
        log_evidence: log p(image) in nats where it is known exactly, else None.
        checks: origin and checks of the draws: method, seed, chains, R-hat, ESS.
    """

    name: str
    model: Model
    images: Tensor
    settings: Mapping[str, Tensor]
    draws: Tensor
    mean: Tensor
    scale: Tensor
    square_mean: Tensor
    squared_deviation: Tensor
    log_evidence: float | None
    checks: Mapping[str, Any]

    @property
    def dimension(self) -> int:
        """The length D of an unconstrained vector."""
        return self._continuous.dimension

    @accept_arrays("x")
    def log_prob(self, x: Tensor) -> Tensor:
        """Compute log p(image, x), (...,) in nats, discrete sites summed out, with gradients.

        Args:
            x: unconstrained vectors, (..., D).

        Raises:
            ValueError: the last dim is not D.
        """
        self._check(x)
        rows = x.reshape(-1, self.dimension).to(self.images)
        size = max(1, _ROWS // len(next(iter(self.settings.values()))))
        split = map(self._continuous.split, rows.split(size))
        joint = [self._log_joint(values) + log_jacobian for values, log_jacobian in split]
        return torch.cat(joint).reshape(x.shape[:-1])

    @accept_arrays("x")
    def sites(self, x: Tensor) -> dict[str, Tensor]:
        """Convert vectors (..., D) to the values of the continuous sites, (..., *shape).

        Raises:
            ValueError: the last dim is not D.
        """
        self._check(x)
        values, _ = self._continuous.split(x.reshape(-1, self.dimension))
        return {
            name: value.reshape(*x.shape[:-1], *value.shape[1:]) for name, value in values.items()
        }

    @accept_arrays("values")
    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Convert values (S, ...) of the continuous sites to unconstrained vectors (S, D).

        Raises:
            ValueError: a site is missing.
        """
        wanted = list(self._continuous.places)
        if missing := [name for name in wanted if name not in values]:
            raise ValueError(f"values lacks {missing}; it needs all of {wanted}")
        return self._continuous.join(values)

    @accept_arrays("drawn")
    def score(self, drawn: Tensor | nn.Module, num_draws: int = 1000, seed: int = 0) -> Score:
        """Compute the errors of draws, or of a guide's draws, compared with the reference.

        Args:
            drawn: unconstrained draws (S, D), or a guide to the model.
            num_draws: draws from the guide.
            seed: seed of the guide's draws.

        Raises:
            ValueError: draws of another shape, not finite, or fewer than two.
        """
        check_whole(2, num_draws=num_draws)
        kl = None
        if isinstance(drawn, nn.Module):
            kl = self._kl(drawn, num_draws, seed)
            images = self.images.expand(num_draws, *self.images.shape[1:])
            names = list(self._continuous.places)
            drawn = self.vector(infer(drawn, images, names, seed, num_draws))
        if drawn.dim() != 2 or drawn.shape[1] != self.dimension or len(drawn) < 2:
            raise ValueError(
                f"drawn must be (draws, {self.dimension}) unconstrained numbers with two draws or "
                f"more, or a guide, not {tuple(drawn.shape)}; `vector` makes them from sites"
            )
        if not drawn.isfinite().all():
            raise ValueError("drawn holds NaN or infinite numbers; leave such draws out")
        x = drawn.detach().to(self.mean)
        mean = (x.mean(0) - self.mean) / self.scale
        square = (x.square().mean(0) - self.square_mean) / self.squared_deviation
        worst = torch.cat([mean, square]).abs().max().item()
        return Score(_rms(mean), _rms(square), worst, len(x) ** -0.5, kl)

    def _kl(self, guide: nn.Module, num_draws: int, seed: int) -> float | None:
        """Return the gap log p(image) - ELBO of a guide, or None if log p is unknown."""
        if self.log_evidence is None:
            return None
        settings: dict[str, Any] = dict(num_particles=num_draws, seed=seed, draws=0)
        idata = evaluate(self.model, guide, self.images, **settings)
        is_bound = bool(idata.attrs["is_bound"])
        return self.log_evidence - float(per_image_elbo(idata)[0]) if is_bound else None

    @cached_property
    def _continuous(self) -> SiteVector:
        with isolated_parameters(self.model), torch.no_grad(), use_seed(0):
            nodes = poutine.trace(self.model).get_trace(self.images).nodes
        vector = SiteVector()
        for name in (site.name for site in self.model.sites if site.name not in self.settings):
            vector.add(name, nodes[name]["value"], biject_to(nodes[name]["fn"].support))
        return vector

    def _check(self, x: Tensor) -> None:
        if x.shape[-1:] != (self.dimension,):
            raise ValueError(
                f"x must be vectors (..., {self.dimension}) for {self.name!r}, not {tuple(x.shape)}"
            )

    def _log_joint(self, values: Mapping[str, Tensor]) -> Tensor:
        """Compute log sum_s p(image, values, s) over discrete settings s, (rows,)."""
        rows = len(next(iter(values.values())))
        count = len(next(iter(self.settings.values())))
        latents = {name: value.repeat_interleave(count, 0) for name, value in values.items()}
        for name, value in self.settings.items():
            latents[name] = value.repeat(rows, *[1] * (value.dim() - 1))
        images = self.images.expand(rows * count, *self.images.shape[1:])
        with isolated_parameters(self.model), poutine.block():
            joint = log_density(score_latents(self.model, latents, images), images)
        return joint.view(rows, count).logsumexp(1)


def _rms(errors: Tensor) -> float:
    return errors.square().mean().sqrt().item()
