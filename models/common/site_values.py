"""Checks of values that a site gets from outside, as by `pyro.condition`, `pyro.do` or a replay.

Pyro broadcasts a value and its distribution. Where the value has more images than the site, or its
last batch dim is that of the images while the site's is that of capsules, every image is scored
under the latents of every other one, and no error is raised. These checks refuse such a value.
"""

import warnings
from typing import Any

from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.messenger import Messenger
from torch import Size, Tensor

from capsule_zoo.models.checks import check_precision
from capsule_zoo.models.common.spaces import ObservationSpace, PixelsOutOfRange
from capsule_zoo.models.common.trace_density import IMAGES_PLATE


class CheckedValues(Messenger):
    """The effect handler that refuses values that do not fit the sites in the images plate.

    It refuses parameters of 16 bits as well.

    A value fits where it is as large as a draw or broadcasts to one. To the left of the images it
    may have dims that the draw lacks, those of enumeration. An observation by name must also be
    what the model accepts as its argument; pixels out of range, which a Gaussian model itself
    draws, are reported once as a warning.

    Args:
        plate_dim: the dim of the images plate.
        space: the space of the observations of a model; None for a guide.
        batch: the observations that the program was called with, already checked; None if there
            are none.
        has_density: False for an energy model without its argument, which runs a chain.
    """

    def __init__(
        self,
        plate_dim: int,
        space: ObservationSpace | None,
        batch: Tensor | None,
        has_density: bool = True,
    ) -> None:
        super().__init__()
        self.inner = -plate_dim
        self.space = space
        self.batch = batch
        self.has_density = has_density

    def _pyro_param(self, msg: Any) -> None:
        if isinstance(own := msg["args"][-1], Tensor):
            check_precision(f"parameter {msg['name']!r}", own.dtype)

    def _pyro_post_sample(self, msg: Any) -> None:
        law, value = msg["fn"], msg["value"]
        if not isinstance(law, TorchDistributionMixin):  # the indices of a plate
            return
        observed = self.space is not None and msg["name"].removesuffix("__CF") == self.space.site
        if observed and value is self.batch:
            return
        expected = law.shape()
        other = not isinstance(value, Tensor) or value.shape != expected
        if other and any(frame.name == IMAGES_PLATE for frame in msg["cond_indep_stack"]):
            self._check_shape(msg["name"], law, value, expected, observed)
        if observed and msg["is_observed"]:
            self._check_observation(value, intervened=msg["name"] != self.space.site)

    def _check_shape(self, name: str, law: Any, value: Any, expected: Size, observed: bool) -> None:
        """Raise ValueError unless the value of a site broadcasts to the shape of a draw."""
        name = name.removesuffix("__CF")
        if not isinstance(value, Tensor):
            raise ValueError(
                f"site {name!r} takes a torch.Tensor of shape {tuple(expected)} here, not "
                f"{type(value).__name__}; call torch.as_tensor(value)"
            )
        rank, outer = len(expected) - law.event_dim, value.dim() - law.event_dim
        images = self.inner - (len(law.batch_shape) - rank)  # dims up to that of the images
        if observed:  # one observation for each image
            fits = outer >= images and value.shape == expected[rank - outer :] and outer <= rank
        else:
            inner = range(1, 1 + min(outer, images))
            fits = value.shape[outer:] == law.event_shape and all(
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
        """Check an observation by name as the argument of the model is checked."""
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
