"""Widening of point guides: normal distributions instead of points, so that the loss is a bound.

>>> wide = fit_guide("widened", model, guide, dataset.train[:1000])

A Delta over a continuous site has no density, so its log weight can exceed log p(image). Here every
such Delta becomes a Normal around the same value. Each coordinate of the site has one scale, shared
by all images; the scales are fitted with everything else frozen. The negated loss is then a bound
for any scales, and fitting them makes it tighter.

A Delta over a relaxed site, whose value is a logit, becomes the relaxed distribution with that
logit, which has no scale. A Delta over a discrete site is a probability of one, and is counted as
such.
"""

import copy
from functools import partial
from typing import Any

import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.infer import ELBO
from pyro.poutine import Trace
from torch import Tensor, nn

from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.per_image.site_distributions import (
    ByLogits,
    Continuous,
    OtherDistributions,
    family_of,
)
from capsule_zoo.inference.check import check_pair, is_delta, is_discrete, latent_sites
from capsule_zoo.inference.evaluation.bound import point_sites
from capsule_zoo.inference.evaluation.prepare import (
    Images,
    discrete_form,
    is_per_image,
    prepare_images,
)
from capsule_zoo.inference.functions import check_module
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import call_arguments
from capsule_zoo.inference.training.fit import fit_to_end
from capsule_zoo.inference.training.settings import Checks, Inputs, Pace
from capsule_zoo.models.checks import check_positive
from capsule_zoo.models.common.modes import eval_mode, frozen


class Widened(Guide):
    """A guide whose Deltas over continuous sites are replaced by Normals around their values.

    A site with another support than the reals gets its Normal in the unconstrained space of
    `torch.distributions.biject_to` (`capsule_zoo.guides.per_image.site_distributions`).

    Args:
        model: the model that both guides belong to.
        guide: the guide to widen; its parameters are shared, not copied.
        images: (B, C, H, W), on which the guide runs once for its sites and their shapes.
        scale: initial scale of every coordinate.

    Raises:
        ValueError: the guide has no Delta over a continuous site, or no distribution fits such a
        site.
    """

    guide: nn.Module
    per_image: bool

    @accept_arrays("images", like="model")
    def __init__(
        self, model: nn.Module, guide: nn.Module, images: Tensor, scale: float = 0.05
    ) -> None:
        check_positive(scale=scale)
        super().__init__(model)
        self._modules["guide"] = guide  # not by assignment, which would rename it in Pyro's store
        self.per_image = is_per_image(guide)
        guide_trace, model_trace = _traces(model, guide, images)
        sites = sorted(point_sites(model_trace, guide_trace))
        if not sites:
            raise ValueError(
                f"guide {type(guide).__name__} has no Delta over a continuous site; "
                "there is nothing to widen"
            )
        self.families = {n: family_of(n, model_trace.nodes[n]["fn"]) for n in sites}
        self.masses = _masses(model_trace, guide_trace)
        for name in self.sites_with_scales():
            fn, value = guide_trace.nodes[name]["fn"], guide_trace.nodes[name]["value"]
            center, _ = self.families[name].start(fn, value)
            start = torch.full_like(center[:1], scale).log()  # (1, ...), shared by all images
            self.register_parameter(f"{name}_log_scale", nn.Parameter(start))
        guide_trace, model_trace = _traces(discrete_form(model), discrete_form(guide), images)
        self.discrete_points = point_sites(model_trace, guide_trace)
        self.discrete_masses = _masses(model_trace, guide_trace)

    @property
    def covers(self) -> tuple[str, ...]:
        return tuple(getattr(self.guide, "covers", ()))

    def train(self, mode: bool = True) -> "Widened":
        """Set the mode; the inner guide stays in evaluation mode, in which the bound is measured.

        Its running statistics therefore stay as they are while the scales are fitted.
        """
        super().train(mode)
        self.guide.eval()
        return self

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Any:
        # taken here: inside of a function that is a module, parameters are the function's
        scales = {name: self.scale(name) for name in self.sites_with_scales()}
        with OtherDistributions(partial(self._widen_site, scales)):
            return self.guide(*call_arguments(images, labels))

    def _widen_site(self, scales: dict[str, Tensor], name: str, distribution: Any) -> Any:
        """Replace the Delta of a widened site by a distribution with a density."""
        if not is_delta(distribution):
            return distribution
        family = self.families.get(name)
        if isinstance(family, ByLogits):
            return family.distribution(
                family.start(distribution, distribution.mean), distribution.event_dim
            )
        if isinstance(family, Continuous):
            return family.normal(
                family.start(distribution, distribution.mean)[0],
                scales[name],
                distribution.event_dim,
            )
        certain = (
            name in self.masses
        )  # a point mass at a discrete value, which has log probability 0
        return (
            dist.Delta(distribution.mean, event_dim=distribution.event_dim)
            if certain
            else distribution
        )

    def scale(self, site: str) -> Tensor:
        """Return the scale of each coordinate of a site, (1, ...), for all images."""
        return getattr(self, f"{site}_log_scale").exp()

    def sites_with_scales(self) -> list[str]:
        """Return the names of the widened sites that are not relaxed."""
        return [name for name, family in self.families.items() if isinstance(family, Continuous)]

    def discretize(self) -> "Widened":
        """Return the discrete guide, with these scales; discrete sites have none."""
        discrete = discrete_form(self.guide)
        if discrete is self.guide:
            return self
        twin = copy.copy(self)
        twin._modules = {**self._modules, "guide": discrete}
        twin.families = {k: v for k, v in self.families.items() if k in self.discrete_points}
        twin.masses = self.discrete_masses
        return twin


def _traces(model: nn.Module, guide: nn.Module, images: Tensor) -> tuple[Trace, Trace]:
    """Trace guide, and model at the guide's sample; the random state is restored."""
    with poutine.block(), torch.no_grad(), torch.random.fork_rng():
        guide_trace = poutine.trace(guide).get_trace(images)
        model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(images)
    return guide_trace, model_trace


def _masses(model_trace: Trace, guide_trace: Trace) -> set[str]:
    """Return the discrete sites at which the guide is certain of one value."""
    wanted, drawn = latent_sites(model_trace), latent_sites(guide_trace)
    certain = {name for name, site in drawn.items() if is_delta(site["fn"])}
    return {name for name in certain & wanted.keys() if is_discrete(wanted[name]["fn"])}


@torch.inference_mode(False)
def widen(
    model: nn.Module,
    guide: nn.Module,
    images: Images,
    *,
    steps: int = 200,
    lr: float = 0.05,
    scale: float = 0.05,
    batch_size: int = 128,
    seed: int = 0,
    objective: ELBO | None = None,
    progress: bool = False,
) -> Widened:
    """Convert a point guide to a guide with a density, so that its loss is a valid bound.

    Args:
        images: training images (N, C, H, W), or a `Split`; never the held-out ones.
        steps, lr, batch_size, seed, objective, progress: settings of the fit of the scales, see
            `fit`. The learning rate falls to zero along a cosine.
        scale: initial scale of every coordinate.

    Returns:
        A guide that shares the parameters of `guide`, which are not changed.

    Raises:
        ValueError: the guide is no module or has no Delta over a continuous site, or an argument is
            not allowed.
    """
    check_module(guide)
    images = prepare_images(model, images, guide)
    example = images if is_per_image(guide) else images[:2]
    with isolated_parameters(model, guide), eval_mode(guide):
        check_pair(model, guide, example)
        widened = Widened(model, guide, example, scale)
    with frozen(guide):
        fit_to_end(
            model,
            widened,
            images,
            objective=objective,
            lr=lr,
            pace=Pace("cosine"),
            steps=steps,
            batch_size=len(images) if widened.per_image else batch_size,
            seed=seed,
            freeze="model",
            inputs=Inputs(device=images.device),
            checks=Checks(progress=progress),
        )
    return widened
