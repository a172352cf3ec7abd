"""The bases of all models and guides: a unique name, declared sites and checked images.

A model is a `pyro.nn.PyroModule` that is called as `model(images=None, labels=None)` and draws
from its prior when `images` is None. It declares its latent sites, so that guides, the pair check
and the contract tests can read them without running anything.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from dataclasses import dataclass
from typing import Any, Self

from pyro.nn import PyroModule
from torch import Tensor

from capsule_zoo.models.checks import check_at_least, check_images
from capsule_zoo.models.missing_pixels import ScoreObserved, filled, refuse_dependent_pixels

_instances = itertools.count()


@dataclass(frozen=True)
class Site:
    """A latent random variable of a model.

    Attributes:
        name: the `pyro.sample` name, `<level>_<quantity>`.
        plates: names of the plates around it, outermost first.
        event_dim: rank of one draw's event.
        discrete: True when its support is countable.
        enumerated: True when the model sums it out in parallel, so that no guide may cover it.
    """

    name: str
    plates: tuple[str, ...]
    event_dim: int = 0
    discrete: bool = False
    enumerated: bool = False


class NamedModule(PyroModule):
    """A `PyroModule` with a name of its own.

    Pyro keys its global parameter store by name, so two instances of one class would share their
    parameters and the second would never train. Every instance, copies included, gets a new number.

    Attributes:
        missing_fill: the value that replaces a missing pixel, NaN; None if no pixel may be missing.
    """

    missing_fill: Tensor | float | None = None

    def __init__(self) -> None:
        super().__init__(self._fresh_name())

    @classmethod
    def _fresh_name(cls) -> str:
        return f"{cls.__name__}_{next(_instances)}"

    def __deepcopy__(self, memo: dict) -> NamedModule:
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin._rename()
        return twin

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._rename()

    def _rename(self) -> None:
        """Give a copy its own name; Pyro can rename only a module that has not run yet."""
        for module in self.modules():
            if isinstance(module, PyroModule):
                module._pyro_context.used = False
        self._pyro_set_supermodule(self._fresh_name(), type(self._pyro_context)())

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the module; missing pixels are filled in first and are not scored."""
        images = arguments[0] if arguments else options.get("images")
        if self.missing_fill is None or images is None:
            return super().__call__(*arguments, **options)
        model: Any = getattr(self, "model", self)
        model.check_images(images)
        whole = filled(images, self.missing_fill)
        if arguments:
            arguments = (whole, *arguments[1:])
        else:
            options = {**options, "images": whole}
        with ScoreObserved(~images.isnan(), model.plate_dims["images"]):
            return super().__call__(*arguments, **options)

    def discretized(self) -> Self:
        """Return the module for headline numbers: this module itself unless it is relaxed."""
        return self

    def with_discrete_presences(self) -> Self:
        """Return `discretized()`; the name of version 0.1, which version 0.2 will not have."""
        name = "with_discrete_presences() is called discretized() now; the old name goes in 0.2"
        warnings.warn(name, DeprecationWarning, stacklevel=2)
        return self.discretized()

    def sharing_parameters(self, **attributes: object) -> Self:
        """Return a module with the same parameters (not copies) that differs in some attributes."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        twin.__dict__.update(attributes)
        return twin

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


class Model(NamedModule):
    """The base of every model in the zoo.

    Attributes:
        sites: every latent site.
        plate_dims: the dim of each plate; `"images"` is always there and always outermost.
        image_shape: (channels, height, width) of the images that the model draws.
        pixel_range: smallest and largest admissible pixel.
        means_in_range: True where the mean of every pixel lies in `pixel_range`.
        supervised: True where the model explains labels. Without labels it has no loss.
        normalised: False where the trace is the joint density only up to a constant, as in an
            energy model. The log weights of such a model are not bounds.
    """

    sites: tuple[Site, ...] = ()
    plate_dims: dict[str, int] = {"images": -1}
    image_shape: tuple[int, int, int]
    pixel_range: tuple[float, float] = (0.0, 1.0)
    means_in_range: bool = True
    normalised: bool = True
    supervised: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; raise ValueError for a `batch_size` that is not a positive number."""
        check_at_least(1, batch_size=kwargs.get("batch_size", 1))
        return super().__call__(*args, **kwargs)

    @property
    def latent_sites(self) -> tuple[Site, ...]:
        """The sites that a guide must cover: all except the enumerated ones."""
        return tuple(site for site in self.sites if not site.enumerated)

    def with_missing_pixels(self) -> Self:
        """Return the same model for images in which NaN marks a missing pixel.

        The two models share their parameters. The image site of the new model scores only the
        observed pixels. At a missing pixel the value of the site is 0, or the end of
        `pixel_range` that is nearest to 0.

        Raises:
            ValueError: the model has no density of single pixels, like energy models and
                classifiers.
        """
        refuse_dependent_pixels(self)
        least, most = self.pixel_range
        return self.sharing_parameters(missing_fill=min(max(0.0, least), most))

    def check_images(self, images: Tensor | None) -> None:
        """Raise ValueError unless `images` is a non-empty (B, C, H, W) batch in range.

        NaN is refused, except by `with_missing_pixels()`.
        """
        if images is not None:
            if self.missing_fill is not None and isinstance(images, Tensor):
                images = filled(images, self.missing_fill)
            check_images(images, self.image_shape, self.pixel_range)
