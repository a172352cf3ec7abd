"""Check a pair, its images and its labels, and convert them to the form that is evaluated.

A relaxed pair has a log weight too, but it is a bound on the relaxed model only: it may exceed log
p(image) of the model with presences of 0 or 1. Evaluations report which kind they used.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.poutine import Trace
from torch import Tensor, nn

from capsule_zoo._version import __version__
from capsule_zoo.data import Split
from capsule_zoo.data.splits import labels_for
from capsule_zoo.inference.check import (
    IncompatibleGuide,
    check_pair,
    draws_between,
    latent_sites,
    name_of,
)
from capsule_zoo.inference.evaluation.bound import bound_on
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import call_arguments
from capsule_zoo.inference.training.training_data import tensor_of
from capsule_zoo.models.common.modes import in_eval_mode, seeded
from capsule_zoo.models.common.spaces import space_of

P = TypeVar("P", bound=Callable)
Images = Tensor | Split | np.ndarray


class Prepared(NamedTuple):
    """The pair and its data after all checks, in the form that is evaluated.

    Attributes:
        model, guide: the pair, in its discrete form if requested.
        images, labels: the data on the device of the parameters; images have their precision.
        presence: see `evaluate`.
        name: name of the data.
    """

    model: Callable
    guide: Callable
    images: Tensor
    labels: Tensor | None
    presence: str
    name: str

    def attributes(self, trace: Trace, seed: int) -> dict[str, Any]:
        """Return what an evaluation says of the pair, of its data, and of versions.

        Args:
            trace: a trace of the model on the data.
            seed: the seed of the evaluation.
        """
        return {
            "num_images": len(self.images),
            "seed": seed,
            "model": name_of(self.model),
            "guide": name_of(self.guide),
            "data": self.name,
            "units": "nats per image",
            "presence": self.presence,
            "bound_on": bound_on(self.model, trace, self.presence),
            "capsule_zoo": __version__,
            "pyro": pyro.__version__,
            "torch": str(torch.__version__),  # a subclass of str, which netCDF does not take
        }


def prepare(
    model: Callable,
    guide: Callable,
    images: Tensor | Split | np.ndarray,
    *,
    labels: Tensor | np.ndarray | None,
    seed: int,
    discrete: bool,
    prior: bool = False,
) -> Prepared:
    """Check everything about a pair, its images and its labels; see `evaluate`.

    Where the guide is the `prior`, the model itself, there is no pair to check.

    Raises:
        ValueError, IncompatibleGuide: see `evaluate`.
    """
    name = str(images.name) if isinstance(images, Split) else "images"
    pixels = as_wanted(model, images, guide)
    if pixels.dtype.itemsize < 4:
        raise ValueError("log weights round in 16 bits; call float() of model and guide first")
    classes = torch.from_numpy(labels) if isinstance(labels, np.ndarray) else labels
    if classes is not None:
        classes = labels_for(pixels, classes).to(pixels.device)
    if (check := getattr(poutine.unwrap(model), "check_labels", None)) is not None:
        check(classes)
    if classes is None and getattr(model, "supervised", False):
        raise ValueError(
            f"{name_of(model)} explains labels, without which there is no bound; pass labels= for "
            "log p(label | image), or measure capsule_zoo.inference.error_rate(model, guide, split)"
        )
    few = slice(None) if is_per_image(guide) else slice(2)
    shown = pixels[few], None if classes is None else classes[few]
    mode = in_eval_mode(model, guide)
    with isolated_parameters(model, guide), mode, seeded(seed), torch.no_grad():
        if discrete:
            refuse_relaxed_draws(model, discrete_form(guide), *shown)
            model, guide = discrete_form(model), discrete_form(guide)
        if not prior:
            try:
                check_pair(model, guide, *shown)
            except Exception as error:
                number = str(len(pixels))
                if number in str(error) and _fits(model, guide, pixels, classes):
                    error.add_note(
                        "The pair is checked on two images. If model or guide holds values for "
                        f"each of {number} images, set guide.per_image = True: then all "
                        "images are passed at once, in their order"
                    )
                raise
    return Prepared(model, guide, pixels, classes, presence_of(model), name)


def _fits(model: Callable, guide: Callable, images: Tensor, labels: Tensor | None) -> bool:
    """Return True if the check of the pair passes on these images."""
    try:
        check_pair(model, guide, images, labels)
    except Exception:
        return False
    return True


def discrete_form(program: P) -> P:
    """Return `program.discretized()` where it is offered, else the program itself."""
    offered: Callable[[], P] | None = getattr(program, "discretized", None)
    return program if offered is None else offered()


def relaxed_sites(model: Callable) -> tuple[str, ...]:
    """Return the names of sites that are continuous in this model but discrete in evaluation."""
    own, evaluated = (getattr(form, "sites", ()) for form in (model, discrete_form(model)))
    discrete = {site.name for site in evaluated if site.discrete}
    return tuple(site.name for site in own if site.name in discrete and not site.discrete)


def presence_of(model: Callable) -> str:
    """Return "relaxed" or "discrete", as this form is, or "none" if there is nothing to relax."""
    if relaxed_sites(model):
        return "relaxed"
    return "none" if discrete_form(model) is model else "discrete"


def refuse_relaxed_draws(
    model: Callable,
    guide: Callable,
    images: Tensor,
    labels: Tensor | None = None,
    remedy: str = "pass discrete=False, and never rank the result beside discrete numbers",
) -> None:
    """Raise IncompatibleGuide if a guide without a discrete form draws relaxed presences.

    The random state is left as it was.

    Raises:
        IncompatibleGuide: a one-line message that names the remedy.
    """
    sites = relaxed_sites(model)
    if not sites or discrete_form(guide) is not guide:
        return
    try:
        with poutine.block(), torch.random.fork_rng(), torch.no_grad(), in_eval_mode(guide):
            trace = poutine.trace(guide).get_trace(*call_arguments(images, labels))
    except Exception:
        return  # the check of the pair reports it
    drawn = latent_sites(trace)
    relaxed = sorted(name for name in sites if name in drawn and draws_between(drawn[name]))
    if relaxed:
        problem = f"it draws relaxed presences only ({', '.join(relaxed)}); {remedy}"
        raise IncompatibleGuide.of(model, guide, [problem], suggest=False)


def is_per_image(guide: Callable) -> bool:
    """Return True if the guide's parameters belong to one batch of images, in its order."""
    return isinstance(guide, AutoGuide) or getattr(guide, "per_image", False)


def as_wanted(
    model: Callable, images: Images, *programs: Callable | None, check: bool = True
) -> Tensor:
    """Check images, and return them on the device and in the precision of the parameters.

    Args:
        model: says what it takes; its parameters count, and those of the further programs.
        check: whether images that the model does not take are refused.
    """
    images = images.images if isinstance(images, Split) else images
    images = tensor_of(images, "images") if isinstance(images, np.ndarray) else images
    if check:
        space_of(model).check(images)
    modules = [program for program in (model, *programs) if isinstance(program, nn.Module)]
    parameter = next((p for module in modules for p in module.parameters()), images)
    return images.detach().to(parameter.device, parameter.dtype)
