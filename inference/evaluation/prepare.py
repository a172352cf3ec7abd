"""Check a pair, its images and its labels, and convert them to the form that is evaluated.

A relaxed pair has a log weight too, but it is a bound on the relaxed model only: it may exceed log
p(image) of the model with presences of 0 or 1. Evaluations report which kind they used.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.poutine import Trace
from torch import Tensor, nn

from capsule_zoo._version import __version__
from capsule_zoo.data import Dataset, Split
from capsule_zoo.data.batches import Batch
from capsule_zoo.data.readable import Data, ImageStream, as_source, is_shuffled, join_batches
from capsule_zoo.data.splits import labels_for
from capsule_zoo.inference.check import (
    IncompatibleGuide,
    check_pair,
    draws_between,
    latent_sites,
    name_of,
    refuse_non_finite_parameters,
)
from capsule_zoo.inference.evaluation.bound import bound_on
from capsule_zoo.inference.examination.pairs import replace_program
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import call_arguments
from capsule_zoo.models.common.modes import eval_mode, use_seed
from capsule_zoo.models.common.spaces import space_of

P = TypeVar("P", bound=Callable)
Images = Data | ImageStream
Labels = Tensor | np.ndarray | Sequence[int] | bool | None
_READ_AT_ONCE = 1000  # images loaded at once, where all are needed


class Prepared(NamedTuple):
    """The pair and its data after all checks, in the form that is evaluated.

    Attributes:
        model, guide: the pair, in its discrete form if requested.
        images, labels: the data on the device of the parameters; images have their precision. A
            stream has its labels itself.
        presence: see `evaluate`.
        name: name of the data.
    """

    model: Callable
    guide: Callable
    images: Any  # a Tensor or an ImageStream
    labels: Tensor | None
    presence: str
    name: str

    def attributes(self, trace: Trace, seed: int) -> dict[str, Any]:
        """Return the attributes of an evaluation: pair, data, settings and versions.

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
    images: Images,
    *,
    labels: Labels,
    seed: int,
    discrete: bool,
    prior: bool = False,
    streamed: bool = False,
) -> Prepared:
    """Check everything about a pair, its images and its labels; see `evaluate`.

    Where the guide is the `prior`, the model itself, there is no pair to check. Images that are not
    in memory become a stream if it may be `streamed`, and else are read.

    Raises:
        ValueError, IncompatibleGuide: see `evaluate`.
    """
    images = images.test if isinstance(images, Dataset) else images
    model, images = replace_program(model, guide, images)
    name = str(images.name) if isinstance(images, Split) else "images"
    whole = is_per_image(guide)
    pixels, classes = open_images(model, images, guide, labels=labels is True, ordered=whole)
    if whole or not streamed:
        pixels, classes = read_images(pixels, classes)
    if pixels.dtype.itemsize < 4:
        raise ValueError("log weights round in 16 bits; call float() of model and guide first")
    if not isinstance(labels, bool | None):
        classes = labels_for(pixels, labels).to(pixels.device)
        getattr(poutine.unwrap(model), "check_labels", _accept)(classes)
    elif not labels and getattr(model, "supervised", False):
        raise ValueError(
            f"{name_of(model)} explains labels, without which there is no bound; pass labels=, or "
            "labels=True for those of the data, for log p(label | image), or measure "
            "capsule_zoo.inference.error_rate(model, guide, split)"
        )
    example = next(split_batches(pixels, classes, len(pixels) if whole else 2))
    mode = eval_mode(model, guide)
    with isolated_parameters(model, guide), mode, use_seed(seed), torch.no_grad():
        if discrete:
            refuse_relaxed_draws(model, discrete_form(guide), *example)
            model, guide = discrete_form(model), discrete_form(guide)
        if not prior:
            try:
                check_pair(model, guide, *example)
            except Exception as error:
                number = str(len(pixels))
                named = isinstance(pixels, Tensor) and number in str(error)
                if named and _fits(model, guide, cast(Tensor, pixels), classes):
                    error.add_note(
                        "The pair is checked on two images. If model or guide holds values for "
                        f"each of {number} images, set guide.per_image = True: then all "
                        "images are passed at once, in their order"
                    )
                raise
    return Prepared(model, guide, pixels, classes, presence_of(model), name)


def _fits(model: Callable, guide: Callable, images: Tensor, labels: Tensor | None) -> bool:
    """Return True if the pair passes the check on these images."""
    try:
        check_pair(model, guide, images, labels)
    except Exception:
        return False
    return True


def discrete_form(program: P) -> P:
    """Return `program.discretize()` if the program has it, else the program itself."""
    offered: Callable[[], P] | None = getattr(program, "discretize", None)
    return program if offered is None else offered()


def relaxed_sites(model: Callable) -> tuple[str, ...]:
    """Return the names of sites that are continuous in this model but discrete in evaluation."""
    model_sites, evaluated = (getattr(form, "sites", ()) for form in (model, discrete_form(model)))
    discrete = {site.name for site in evaluated if site.discrete}
    return tuple(site.name for site in model_sites if site.name in discrete and not site.discrete)


def presence_of(model: Callable) -> str:
    """Return the form of presences: "relaxed", "discrete", or "none" if nothing can be relaxed."""
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
        with poutine.block(), torch.random.fork_rng(), torch.no_grad(), eval_mode(guide):
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


def prepare_images(
    model: Callable, data: Images, *programs: Callable | None, check: bool = True
) -> Tensor:
    """Check images, and move them to the device and dtype of the parameters.

    Args:
        model: its space checks the images; its parameters, and the parameters of further
            programs, give device and dtype.
        data: anything that `fit` takes; all its images are loaded.
        check: whether images that the model does not take are refused.
    """
    return read_images(*open_images(model, data, *programs, check=check))[0]


def stream_images(
    model: Callable, data: Images, *programs: Callable | None, rows: int, check: bool = True
) -> Tensor | ImageStream:
    """Prepare images as `prepare_images` does, but as a stream if there are more than `rows`.

    Images that are in memory already stay a tensor.
    """
    images, _ = open_images(model, data, *programs, check=check)
    if isinstance(images, Tensor):
        return images
    first = images[: rows + 1]
    return first if len(first) <= rows else images


def open_images(
    model: Callable,
    data: Images,
    *programs: Callable | None,
    check: bool = True,
    labels: bool = False,
    ordered: bool = True,
) -> tuple[Tensor | ImageStream, Tensor | None]:
    """Check images and labels; return them, or a stream that holds both.

    Args:
        model, data, programs, check: see `prepare_images`.
        labels: whether the labels of the data are wanted.
        ordered: whether a `DataLoader` that draws its order is refused, because the rows of the
            result are to follow the order of the images.
    """
    if isinstance(data, ImageStream):
        return data, None
    if ordered and is_shuffled(data):
        raise ValueError(
            "images is a DataLoader that shuffles, so that rows of the result would not be those "
            "of its data set; give DataLoader(..., shuffle=False)"
        )
    accept = space_of(model).check if check else _accept
    source = as_source(data.test if isinstance(data, Dataset) else data, "images", accept, labels)
    modules = [program for program in (model, *programs) if isinstance(program, nn.Module)]
    refuse_non_finite_parameters(*modules)
    parameter = next((p for module in modules for p in module.parameters()), None)
    check_labels = getattr(poutine.unwrap(model), "check_labels", _accept)

    def convert(batch: Batch) -> Batch:
        images, numbers = batch
        at = images if parameter is None else parameter
        images = images.detach().to(at.device, at.dtype)
        check_labels(numbers)
        return images, None if numbers is None else numbers.to(images.device)

    if isinstance(source, Split):
        return convert((source.images, source.labels if labels else None))
    return ImageStream(source, accept, convert, labels), None


def read_images(
    images: Tensor | ImageStream, labels: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return all images and labels as tensors; a stream is loaded."""
    if isinstance(images, Tensor):
        return images, labels
    return join_batches(list(images.batches(_READ_AT_ONCE)))


def split_batches(
    images: Tensor | ImageStream, labels: Tensor | None, rows: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield images and labels in parts of `rows`; given labels replace a stream's."""
    if isinstance(images, Tensor):
        numbers = repeat(None) if labels is None else labels.split(rows)
        yield from zip(images.split(rows), numbers, strict=False)
        return
    begin = 0
    for part, numbers in images.batches(rows):
        yield part, numbers if labels is None else labels[begin : begin + len(part)]
        begin += len(part)


def _accept(values: Any) -> None:
    """Do nothing: a check that accepts everything."""
