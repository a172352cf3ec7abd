"""General guides, which are fitted to the very images whose posterior is wanted.

    free_form        parameters of their own for every image, optimized from another guide's answer;
                     for a model of bits alone this is mean field
    corrected        the other guide's own laws, with corrections for every image; sites that it
                     draws given others, as along the strokes of a drawing, remain so
    low_rank         as free_form, with one normal law of low rank for all continuous sites
    gauss_newton     a normal law with all correlations, by the model's curvature at a refined point
    mixture          several such laws, at the modes that several refined points reach
    semi_amortized   a few such steps from another guide's answer, whenever the guide is called
    auto_normal      Pyro's AutoNormal; for models whose latents are all continuous

Each serves every directed model with a density whose sites it can draw, and none is trained before:
`general_guides(model, start)` returns those that serve a model.

>>> guide = fit_guide("free_form", model, encoder, images, steps=100)
>>> compare({"encoder": (model, encoder), "free form": (model, guide)}, images)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide, AutoNormal, init_to_value
from torch import Tensor, nn

from capsule_zoo.data import Split
from capsule_zoo.data.progress import is_progress_shown
from capsule_zoo.guides import Corrected, FreeForm, Guide
from capsule_zoo.guides.per_image.base import families_of
from capsule_zoo.guides.per_image.site_laws import Continuous, UnservedSite
from capsule_zoo.inference.evaluation.prepare import Images, as_wanted
from capsule_zoo.inference.posterior.gauss_newton import gauss_newton
from capsule_zoo.inference.posterior.refine import SemiAmortized, refined_guide
from capsule_zoo.inference.training.fit import fit
from capsule_zoo.inference.training.settings import Checks, Pace
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_known
from capsule_zoo.models.common.modes import in_eval_mode, seeded

_FEW = 20  # steps of the semi-amortized guide, at most
_MODES = 4  # points of a mixture
Fitter = Callable[..., nn.Module]  # of model, start, images, steps=, seed=; see `general_guides`


def semi_amortized(
    model: Model, start: Guide, images: Tensor, *, steps: int, seed: int
) -> SemiAmortized:
    """Return a `SemiAmortized` guide of at most 20 steps; nothing is fitted before it is called."""
    return SemiAmortized(start, min(steps, _FEW), law="normal", seed=seed)


@torch.inference_mode(False)
def auto_normal(model: Model, start: Guide, images: Images, *, steps: int, seed: int) -> AutoNormal:
    """Return Pyro's `AutoNormal`, fitted to the images from another guide's answer.

    Raises:
        UnservedSite: a site is discrete, also in the discrete form of the model.
    """
    model = model.discretized()
    families = families_of(model).items()
    if discrete := [name for name, each in families if not isinstance(each, Continuous)]:
        raise UnservedSite(
            f"AutoNormal draws no discrete site, and {type(model).__name__} has "
            f"{', '.join(discrete)}; use free_form or semi_amortized"
        )
    images = as_wanted(model, images, start)
    with seeded(seed):
        begun = FreeForm(model, images, start.discretized())
        values = {name: begun.continuous(name).transform(loc) for name, loc in begun.locs.items()}
        guide = AutoNormal(model, init_loc_fn=init_to_value(values=values))
        fit_to_images(
            guide,
            model,
            images,
            steps=steps,
            seed=seed,
            checks=Checks(progress=is_progress_shown()),
        )
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
    """Fit one of Pyro's automatic guides to these images, all in one batch, by a frozen model.

    Args:
        settings: further arguments of `fit`.
    """
    whole: dict[str, Any] = dict(batch_size=len(images), freeze="model", seed=seed)
    fit(model, guide, images, steps=steps, lr=0.02, pace=Pace("linear"), **whole, **settings)


_FITTERS: dict[str, Fitter] = {
    "free_form": partial(refined_guide, law="normal"),
    "semi_amortized": semi_amortized,
    "corrected": partial(refined_guide, law="corrected"),
    "low_rank": partial(refined_guide, law="low_rank"),  # of rank 10
    "gauss_newton": gauss_newton,
    "mixture": partial(gauss_newton, modes=_MODES),
    "auto_normal": auto_normal,
}


def general_guides(model: Model, start: Guide) -> dict[str, Fitter]:
    """Return the general guides that serve a model, by name; none where it has no density.

    Each is a function of the model, a guide whose answer is the first guess, images (B, C, H, W),
    and the keywords `steps` of the optimizer and `seed` of the noise.

    Args:
        start: the guide whose answers they begin at; `corrected` depends on its laws.
    """
    if model.supervised or not model.normalized:
        return {}
    try:
        both = families_of(model), families_of(model.discretized())
    except UnservedSite:
        return {}
    own, discrete = ([isinstance(f, Continuous) for f in form.values()] for form in both)
    exact = any(own) and not any(site.enumerated for site in model.sites)
    serves = {
        "corrected": _corrects(start),
        "low_rank": any(own),
        "gauss_newton": exact,
        "mixture": exact,
        "auto_normal": exact and all(discrete),
    }
    return {name: fitter for name, fitter in _FITTERS.items() if serves.get(name, True)}


def fit_guide(
    kind: str,
    model: Model,
    start: Guide,
    images: Images,
    *,
    steps: int = 100,
    seed: int = 0,
    **settings: Any,
) -> nn.Module:
    """Return a general guide of a kind, fitted to images from another guide's answer.

    Args:
        kind: one of the names at the top of this module.
        start: the guide whose answers are the first guess.
        images: (B, C, H, W), a split, or whatever `evaluate` reads.
        steps: steps of the optimizer.
        seed: seed of the noise.
        settings: further arguments of what fits the kind, such as `modes` of a mixture.

    Raises:
        ValueError: no general guide of that kind serves the model; the message names those that do.
    """
    fitters = general_guides(model, start)
    check_known("general guide", kind, fitters)
    return fitters[kind](model, start, images, steps=steps, seed=seed, **settings)


def _corrects(guide: Guide) -> bool:
    """Return True if the laws of a guide can be corrected, for an image that the model draws."""
    with torch.no_grad(), pyro.validation_enabled(False), seeded(0), in_eval_mode(guide.model):
        image = guide.model(batch_size=1)
        try:
            Corrected(guide, image)
        except UnservedSite:
            return False
    return True
