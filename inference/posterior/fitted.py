"""Guides that are fitted to given images, from another guide's posterior.

    free_form        `FreeForm`: separate parameters for every image; for a model of bits alone
                     this is mean field. distribution="delta" gives points
    corrected        `Corrected`: the other guide's own distributions, with corrections for every
                     image; sites that it draws given others, as the strokes of a drawing, remain so
    low_rank         `FreeForm` with one normal distribution of low rank for all continuous sites
    gauss_newton     `GaussNewton`: a normal distribution with all correlations, by the model's
                     curvature at a refined point
    mixture          several such distributions, at the modes that several refined points reach
    semi_amortized   `SemiAmortized`: a few steps of free_form, whenever the guide is called
    auto_normal      Pyro's AutoNormal; for models whose latents are all continuous
    widened          `Widened`: normal distributions around the points of the other guide, with
                     scales that all images share; the images are training images, never the
                     held-out ones

`fit_guide` fits any of them; each serves the models with a density whose sites it can draw.

>>> guide = fit_guide("free_form", model, encoder, images, steps=100)
>>> compare({"encoder": (model, encoder), "free form": (model, guide)}, images)
"""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide, AutoNormal, init_to_value
from torch import Tensor, nn

from capsule_zoo.data import Split
from capsule_zoo.data.progress import is_progress_shown
from capsule_zoo.guides import Corrected, FreeForm, Guide
from capsule_zoo.guides.per_image.base import PerImageGuide, families_of
from capsule_zoo.guides.per_image.site_distributions import Continuous, UnservedSite
from capsule_zoo.inference.evaluation.prepare import Images, prepare_images
from capsule_zoo.inference.examination.pairs import model_of_program, replace_program
from capsule_zoo.inference.functions import check_declared
from capsule_zoo.inference.not_finite import NonFiniteGuide
from capsule_zoo.inference.posterior.gauss_newton import gauss_newton
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.inference.posterior.widen import widen
from capsule_zoo.inference.training.fit import fit_to_end
from capsule_zoo.inference.training.settings import Checks, Pace
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_known, check_whole
from capsule_zoo.models.common.modes import eval_mode, use_seed

_MAX_AMORTIZED_STEPS = 20  # steps of the semi-amortized guide, at most
_MODES = 4  # points of a mixture
_MISSING = -1e6  # replaces NaN where images are compared
F = TypeVar("F", bound=Callable)
_PER_IMAGE: dict[str, Callable[..., PerImageGuide]] = {
    "free_form": partial(refine, distribution="normal"),
    "corrected": partial(refine, distribution="corrected"),
    "low_rank": partial(refine, distribution="low_rank"),  # rank 10
    "gauss_newton": gauss_newton,
    "mixture": partial(gauss_newton, modes=_MODES),
}


def fit_guide(
    kind: str,
    model: nn.Module,
    start: nn.Module | None,
    images: Images,
    *,
    steps: int = 100,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """Fit a guide of the named kind to images, starting at another guide's posterior.

    Model and `start` are not changed. How the steps of free_form, corrected and low_rank went is in
    the guide's `refinement`.

    Args:
        kind: one of the names at the top of this module.
        model: the model; for scenes the model of `entry.with_enumerated_presences`. Or a plain
            Pyro program; `start` is then a guide that was made for it, or None.
        start: the guide whose answers are the first guess. With None, free_form, low_rank,
            gauss_newton, mixture and auto_normal start at draws from the prior.
        images: (B, C, H, W), a split, or whatever `evaluate` reads. Of a plain program its data: a
            tensor, or values by the names of arguments and sites.
        steps: steps of the optimizer; of semi_amortized at most 20 are made.
        seed: seed of the noise.
        settings: further arguments, by kind:
            free_form, corrected, low_rank: `lr`; `method`, "scheduled" or "adam" (at a constant
            rate); of free_form also `distribution`, "normal" or "delta" (points), and `starts`,
            rotations of the image that are tried first (part-whole capsules alone).
            gauss_newton, mixture: `climb`, steps by the Gauss-Newton matrix; `modes`; `climbing`,
            draws of the prior that climb; `blocks`, whether sites are independent.
            widened: `lr`, `scale` at first, `batch_size`, `objective`, `progress`.

    Raises:
        ValueError: an unknown kind, a number out of range, or a model that the kind does not serve.
        UnservedSite: a site that the kind does not serve; the message names it.
        NonFiniteGuide: the guide, or the objective under it, is not finite for some image.
    """
    fitter = _fitter_of(kind, _FITTERS, settings)
    if start is None:
        model, images = model_of_program(model, images)
    else:
        model, images = replace_program(model, start, images)
    if kind != "widened":  # which serves plain programs too
        form = f'fit_guide("{kind}", model, start, images)'
        check_declared(form, {"model": model, "images": images})
    return fitter(model, start, images, steps=steps, seed=seed, **settings)


def _fitter_of(kind: str, fitters: Mapping[str, F], settings: Mapping[str, Any]) -> F:
    """Return the function that fits a kind of guide.

    Raises:
        ValueError: an unknown kind, or a setting that it does not have.
    """
    check_known("kind of guide", kind, fitters)
    parameters = inspect.signature(fitters[kind]).parameters.values()
    if all(p.kind is not p.VAR_KEYWORD for p in parameters):
        names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        for name in settings:
            check_known(f"setting of a {kind} guide", name, names)
    return fitters[kind]


def kinds_for(model: Model, start: Guide) -> list[str]:
    """Return the kinds of fitted guides that serve a model and give a bound."""
    if model.supervised or not model.normalized:
        return []
    try:
        both = families_of(model), families_of(model.discretize())
    except UnservedSite:
        return []
    continuous, discrete = ([isinstance(f, Continuous) for f in form.values()] for form in both)
    exact = any(continuous) and not any(site.enumerated for site in model.sites)
    serves = {
        "corrected": _corrects(start),
        "low_rank": any(continuous),
        "gauss_newton": exact,
        "mixture": exact,
        "auto_normal": exact and all(discrete),
        "widened": False,
    }
    return [kind for kind in _FITTERS if serves.get(kind, True)]


def _corrects(guide: Guide) -> bool:
    """Return whether `Corrected` serves a guide, by a trial on a sampled image."""
    with torch.no_grad(), pyro.validation_enabled(False), use_seed(0), eval_mode(guide.model):
        image = guide.model(batch_size=1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a guide of other images is tried too
                Corrected(guide, image)
        except UnservedSite:
            return False
    return True


class SemiAmortized(Guide):
    """The guide that is fitted, from another guide's posterior, to the images of each call.

    It draws as `fit_guide(kind, ...)` does, and has no parameters. An image that occurs
    several times in a batch is fitted once. One of the last two batches that is passed again, as
    evaluation does for each particle, is not fitted again.

    Args:
        guide: the guide from which each fit starts.
        steps: optimizer steps of each fit.
        kind: "free_form", "corrected", "low_rank", "gauss_newton" or "mixture".
        settings: further arguments of `fit_guide`, such as `seed`.

    Raises:
        ValueError: the guide is not a `Guide`, an unknown kind, or a negative number of steps.
    """

    def __init__(
        self, guide: Guide, steps: int = 20, kind: str = "free_form", **settings: Any
    ) -> None:
        check_whole(0, steps=steps)
        _fitter_of(kind, _PER_IMAGE, settings)
        if not isinstance(guide, Guide):
            raise ValueError(
                f"guide must be a Guide, which knows its model, not {type(guide).__name__}; make a "
                "subclass of Guide whose forward is your guide"
            )
        super().__init__(guide.model)
        self.kind = kind
        self._start = (guide,)  # in a tuple, so that it is not trained with this guide
        self.settings = {"steps": steps, **settings}
        self.discrete = False
        self._last: list[tuple[Tensor, list[int], PerImageGuide]] = []  # a list, shared with copies

    @property
    def covers(self) -> tuple[str, ...]:
        return self._start[0].covers

    def discretize(self) -> "SemiAmortized":
        if self.model.discretize() is self.model:
            return self
        return self.sharing_parameters(discrete=True)

    def with_missing_pixels(self, fill: Tensor | float = 0.0) -> "SemiAmortized":
        """Return the guide for images with missing pixels.

        Only the guide that starts sees `fill`; refinement uses the observed pixels alone.
        """
        start = self._start[0].with_missing_pixels(fill)
        return self.sharing_parameters(_model=(start.model,), _start=(start,), _last=[])

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Fit the guide to the images, sample every site and return the values by name."""
        return self.refined_to(images)(images)

    def refined_to(self, images: Tensor) -> PerImageGuide:
        """Return the guide fitted to these images in their order; equal images are fitted once."""
        rows, places = torch.unique(_comparable(images).flatten(1), dim=0, return_inverse=True)
        rows = rows.masked_fill(rows == _MISSING, math.nan)
        try:
            guide = self.fit_images(rows.view(-1, *images.shape[1:]))
        except NonFiniteGuide as error:  # its indices are of distinct images
            bad = [i for i, place in enumerate(places.tolist()) if place in error.images]
            raise NonFiniteGuide.of(error.subject, bad, len(images), error.site) from None
        guide = guide.select(places)
        return guide.discretize() if self.discrete else guide

    def fit_images(self, images: Tensor) -> PerImageGuide:
        """Return the guide fitted to distinct images, cached for the last two calls."""
        start = self._start[0]
        # torch counts the writes to a tensor: an answer is stale once anything was trained
        writes = [t._version for m in (self.model, start) for t in m.state_dict().values()]
        for last_images, then, free in self._last:
            if then == writes and torch.equal(_comparable(last_images), _comparable(images)):
                return free
        with poutine.block(), torch.inference_mode(False):
            fit_to = _PER_IMAGE[self.kind]
            guide = fit_to(self.model, start, images, check=False, **self.settings)
        # the caller may change the images; evaluation tries two of them before it takes all
        self._last[:] = [(images.clone(), writes, guide), *self._last[:1]]
        return guide


def _comparable(images: Tensor) -> Tensor:
    """Replace NaN pixels by an impossible value, because NaN != NaN."""
    return images.nan_to_num(nan=_MISSING)


def semi_amortized(
    model: Model, start: Guide, images: Images, *, steps: int, seed: int, **settings: Any
) -> SemiAmortized:
    """Return a `SemiAmortized` guide with at most 20 steps, which is fitted when it is called."""
    return SemiAmortized(start, min(steps, _MAX_AMORTIZED_STEPS), seed=seed, **settings)


@torch.inference_mode(False)
def auto_normal(
    model: Model, start: Guide | None, images: Images, *, steps: int, seed: int
) -> AutoNormal:
    """Fit Pyro's `AutoNormal` to the images, starting at another guide's posterior.

    Raises:
        UnservedSite: a site is discrete, also in the discrete form of the model.
    """
    model = model.discretize()
    families = families_of(model).items()
    if discrete := [name for name, family in families if not isinstance(family, Continuous)]:
        raise UnservedSite(
            f"AutoNormal draws no discrete site, and {type(model).__name__} has "
            f"{', '.join(discrete)}; use free_form or semi_amortized"
        )
    images = prepare_images(model, images, start)
    with use_seed(seed):
        points = FreeForm(model, images, start and start.discretize())
        guide = AutoNormal(model, init_loc_fn=init_to_value(values=points.point_values()))
        checks = Checks(progress=is_progress_shown())
        fit_to_images(guide, model, images, steps=steps, seed=seed, checks=checks)
    return guide


def fit_to_images(
    guide: AutoGuide,
    model: Model,
    images: Tensor | Split,
    *,
    steps: int,
    seed: int,
    **settings: Any,
) -> None:
    """Fit one of Pyro's automatic guides to these images in one batch, with a frozen model.

    Args:
        settings: further arguments of `fit`.
    """
    whole: dict[str, Any] = dict(batch_size=len(images), freeze="model", seed=seed)
    fit_to_end(model, guide, images, steps=steps, lr=0.02, pace=Pace("linear"), **whole, **settings)


_FITTERS: dict[str, Callable[..., nn.Module]] = {
    "free_form": _PER_IMAGE["free_form"],
    "semi_amortized": semi_amortized,
    **_PER_IMAGE,
    "auto_normal": auto_normal,
    "widened": widen,
}
