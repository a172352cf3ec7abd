"""Checks of values that are set from outside, by `pyro.condition`, `pyro.do` or a replay.

Pyro broadcasts a value and its distribution. Where the value has more images than the site, or its
last batch dim holds images while the site's last dim holds capsules, every image is scored under
the latents of every other image, and no error is raised. These checks refuse such a value.
"""

import warnings
from collections.abc import Callable
from typing import Any

from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine import Trace
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.messenger import Messenger, _context_wrap
from torch import Size, Tensor
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical

from capsule_zoo.models.checks import check_precision
from capsule_zoo.models.common.spaces import ObservationSpace, PixelsOutOfRange
from capsule_zoo.models.common.trace_density import IMAGES_PLATE

_RELAXED = LogitRelaxedBernoulli, ExpRelaxedCategorical


def _are_indices(value: Any) -> bool:
    """Return True for the indices of a plate in a trace, to which a program may be conditioned."""
    return isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point()


class CheckedValues(Messenger):
    """The effect handler that refuses values that do not fit their site, and 16-bit parameters.

    A value fits a site in the images plate if it has the shape of a sample or broadcasts to it. To
    the left of the images it may have dims of enumeration, which the draw lacks. Values of a
    discrete site lie in its support. An observation by name must also be what the model accepts as
    its argument; pixels out of range, which a Gaussian model itself draws, only give a warning.

    Args:
        plate_dim: the dim of the images plate.
        space: the space of the observations of a model; None for a guide.
        has_density: False for an energy model without its argument, which runs a chain.
    """

    def __init__(
        self, plate_dim: int, space: ObservationSpace | None, has_density: bool = True
    ) -> None:
        super().__init__()
        self.inner = -plate_dim
        self.space = space
        self.has_density = has_density
        self.observed_by_program: dict[str, Any] = {}

    def _process_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["is_observed"]:  # before outer handlers observe it
            self.observed_by_program[msg["name"]] = msg["value"]
        if msg["type"] == "param" and isinstance(parameter := msg["args"][-1], Tensor):
            check_precision("parameter", msg["name"], parameter.dtype)

    def _postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "sample":
            self._check_sample(msg)

    def _check_sample(self, msg: Any) -> None:
        """Check the value of a site after it was set."""
        name, distribution, value = msg["name"].removesuffix("__CF"), msg["fn"], msg["value"]
        if not isinstance(distribution, TorchDistributionMixin):
            if name == IMAGES_PLATE and msg["is_observed"] and not _are_indices(value):
                site = "of the model" if self.space is None else repr(self.space.site)
                raise ValueError(
                    f"{name!r} is the plate of the observations and has no density; observe the "
                    f"site {site}"
                )
            return
        if value is None or (msg["is_observed"] and self.observed_by_program.get(name) is value):
            return  # None if an outer handler samples it later
        observed = self.space is not None and name == self.space.site
        expected = distribution.shape()
        enumerated = msg["infer"].get("enumerate") and not observed
        if enumerated and isinstance(value, Tensor) and value.dim() > len(expected):
            return  # Pyro sums it out, and its values have further dims
        other = not isinstance(value, Tensor) or value.shape != expected
        if other and any(frame.name == IMAGES_PLATE for frame in msg["cond_indep_stack"]):
            self._check_shape(name, distribution, value, expected, observed)
        if not observed:
            _check_form(name, distribution, value)
        elif msg["is_observed"]:
            self._check_observation(value, intervened=msg["name"] != name)

    def _check_shape(
        self, name: str, distribution: Any, value: Any, expected: Size, observed: bool
    ) -> None:
        """Raise ValueError unless the value of a site broadcasts to the shape of a sample."""
        if not isinstance(value, Tensor):
            raise ValueError(
                f"site {name!r} takes a torch.Tensor of shape {tuple(expected)} here, not "
                f"{type(value).__name__}; call torch.as_tensor(value)"
            )
        rank, outer = len(expected) - distribution.event_dim, value.dim() - distribution.event_dim
        images = self.inner - (
            len(distribution.batch_shape) - rank
        )  # dims up to that of the images
        if observed:  # one observation for each image
            fits = outer >= images and value.shape == expected[rank - outer :] and outer <= rank
        else:
            inner = range(1, 1 + min(outer, images))
            fits = value.shape[outer:] == distribution.event_shape and all(
                value.shape[outer - i] in (1, expected[rank - i]) for i in inner
            )
        if not fits:
            remedy = "give one value for each image, or a value that broadcasts to this shape"
            if observed:
                remedy = "give observations as the model takes them, model(observations)"
                if value.shape[1:] == expected[1:]:
                    remedy = f"call the program with batch_size={len(value)}"
            raise ValueError(
                f"site {name!r} takes a value of shape {tuple(expected)} here, not "
                f"{tuple(value.shape)}; {remedy}"
            )

    def _check_observation(self, value: Tensor, intervened: bool) -> None:
        """Check an observation by name, as an argument of the model would be checked."""
        assert self.space is not None
        if not self.has_density and not intervened:
            raise ValueError(
                f"site {self.space.site!r} is observed by name in an energy model, which without "
                "its argument runs a Markov chain and has no density; pass the observations, "
                "model(observations)"
            )
        try:
            self.space.check(self.space.as_batch(value))
        except PixelsOutOfRange:
            low, high = getattr(self.space, "pixel_range", (0.0, 1.0))
            warnings.warn(
                f"site {self.space.site!r} is observed by name with pixels outside of "
                f"[{low:g}, {high:g}], which the model refuses as its argument; rescale the images "
                "(noise of the model's own draws may stay)",
                stacklevel=2,
            )


def _check_form(name: str, distribution: Any, value: Tensor) -> None:
    """Check that a latent value has the form of its site, discrete or relaxed.

    Raises:
        ValueError: a value of a discrete site outside of its support.
    """
    try:
        support = distribution.support
    except NotImplementedError:  # a user's distribution
        return
    if support.is_discrete:
        if not bool(support.check(value).all()):
            raise ValueError(
                f"site {name!r} is discrete and gets values outside of its support, {support}; "
                "where they are those of a relaxed guide, use discretize() of both model and guide"
            )
    elif isinstance(
        getattr(distribution, "component_distribution", distribution), _RELAXED
    ) and bool(
        ((value == 0) | (value == 1)).all() & value.any()  # logits often start at 0
    ):
        warnings.warn(
            f"site {name!r} is relaxed and holds logits, but all values are 0 or 1; for discrete "
            "values use discretize() of both model and guide",
            stacklevel=2,
        )


def observed_names(program: Callable) -> set[str]:
    """Return the names of sites that `pyro.condition` around a program observes."""
    names: set[str] = set()
    while (inner := getattr(program, "func", None)) is not None:
        if inner is _context_wrap:
            handler, program = program.args  # type: ignore[attr-defined]
            if isinstance(handler, ConditionMessenger):
                names |= set(
                    handler.data.nodes if isinstance(handler.data, Trace) else handler.data
                )
        else:
            program = inner
    return names
