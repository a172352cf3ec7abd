"""The base classes of models and guides: unique name, declared sites, space of observations.

A model is a `pyro.nn.PyroModule` that is called as `model(images=None, labels=None)` and draws
from its prior when `images` is None. It declares its latent sites, so that guides, the pair check
and the contract tests can read them without running anything.
"""

import copy
import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyro
from pyro.distributions import TorchDistribution, is_validation_enabled
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor, nn

from capsule_zoo.models.checks import check_tensor, check_whole
from capsule_zoo.models.common.missing_pixels import (
    ScoreObserved,
    fill_missing,
    refuse_dependent_pixels,
)
from capsule_zoo.models.common.param_store import (
    ReadingContext,
    StoredValues,
    forget_names,
    take_over,
)
from capsule_zoo.models.common.plates import ImageDistribution
from capsule_zoo.models.common.remembering import Remembering, note_changes
from capsule_zoo.models.common.site_values import CheckedValues
from capsule_zoo.models.common.spaces import AnyImages, ImageSpace, ObservationSpace

if TYPE_CHECKING:

    class PyroModule(nn.Module):
        """The part of Pyro's class that type checkers see; setup.cfg hides the rest from them.

        Without `__getattr__` they know the attributes of a model, and refuse all others.
        """

        _pyro_context: Any

        def __init__(self, name: str = "") -> None: ...

        def _pyro_set_supermodule(self, name: str, context: Any) -> None: ...

        def __getstate__(self) -> dict: ...

        __getattr__: None  # type: ignore[misc,assignment]

else:
    from pyro.nn import PyroModule

_instances = itertools.count()


@dataclass(frozen=True)
class Site:
    """A latent site of a model, with plates and properties; it compares equal to its name.

    `poutine.condition(model, {site: value})` therefore takes sites as it takes names.

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

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.name == other
        return isinstance(other, Site) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.name)


class NamedModule(Remembering, PyroModule):
    """A `PyroModule` with a unique name in Pyro's parameter store.

    Pyro keys its global parameter store by name, so two instances of one class would share their
    parameters and the second would never train. Every instance, copies included, gets a new number.
    Values that were loaded into the store under its name are taken over; see `param_store`.
    """

    def __init__(self) -> None:
        super().__init__(self._fresh_name())
        self._pyro_context = ReadingContext()

    @classmethod
    def _fresh_name(cls) -> str:
        return f"{cls.__name__}_{next(_instances)}"

    def __deepcopy__(self, memo: dict) -> "NamedModule":
        take_over(self)
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin._rename()
        return twin

    def __getstate__(self) -> dict:
        take_over(self)
        return super().__getstate__()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's tensors by name; see `torch.nn.Module.state_dict`."""
        take_over(self)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Copy tensors into the module; see `torch.nn.Module.load_state_dict`."""
        take_over(self)  # otherwise values of the store would replace these at the next call
        return super().load_state_dict(*args, **kwargs)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._rename()

    def _rename(self) -> None:
        """Give a copy a unique name; Pyro can rename only a module that has not run yet."""
        forget_names(self)
        for module in self.modules():
            if isinstance(module, PyroModule):
                module._pyro_context.used = False
        self._pyro_set_supermodule(self._fresh_name(), ReadingContext())

    def discretize(self) -> Self:
        """Return the discrete form of the module for reporting; itself if it is not relaxed."""
        return self

    def sharing_parameters(self, **attributes: object) -> Self:
        """Return a module with shared parameters (not copies) and other attributes."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        twin.__dict__.update(attributes)
        note_changes(twin, attributes)
        return twin

    def make_constant(self) -> Self:
        """Convert the parameters to buffers of equal names, in place, and return the module.

        Pyro enables the gradient of every parameter that it meets, so that none can be kept fixed.
        """
        for part in self.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                delattr(part, name)
                part.register_buffer(name, parameter.detach())
        note_changes(self, {"constant": True})
        return self

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


class Program(NamedModule):
    """The base class of models and guides, which are called on a batch of observations.

    While Pyro's validation is on (`pyro.enable_validation`, the default), every call checks its
    batch, once. `fit`, `evaluate` and their like check all data once in any case.

    Attributes:
        observes: the name of the first argument, the batch.
        missing_fill: the value that replaces a missing pixel, NaN; None if no pixel may be missing.
    """

    observes: str = "images"
    missing_fill: Tensor | float | None = None

    @property
    def space(self) -> ObservationSpace | None:
        """The observation space of the batch; None where the program checks its arguments."""
        return None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the program; missing pixels are filled in first and are not scored."""
        batch = arguments[0] if arguments else options.get(self.observes)
        labels = arguments[1] if len(arguments) > 1 else options.get("labels")
        if labels is not None:
            check_tensor("labels", labels, "tensor of integers (B,)")
        for name, value in options.items():
            if name != self.observes and isinstance(value, np.ndarray):
                check_tensor(name, value)
        checking, observed = is_validation_enabled(), None
        if batch is not None:
            if self.space is not None and checking:
                self.space.check(batch)
            if self.missing_fill is not None:
                observed, batch = ~batch.isnan(), fill_missing(batch, self.missing_fill)
                if arguments:
                    arguments = (batch, *arguments[1:])
                else:
                    options = {**options, self.observes: batch}
        part = not isinstance(self._pyro_context, ReadingContext)  # part of a user's PyroModule
        with (
            StoredValues() if part else nullcontext(),
            self._checking(batch) if checking else nullcontext(),
            self._scoring(observed),
        ):
            return super().__call__(*arguments, **options)

    def _checking(self, batch: Any) -> AbstractContextManager:
        """Return the context in which values set from outside are checked, site by site."""
        return CheckedValues(-1, None)

    def _scoring(self, observed: Tensor | None) -> AbstractContextManager:
        """Return the context in which only the observed pixels are scored."""
        return nullcontext()


class Model(Program):
    """The base class of every model in the zoo.

    Attributes:
        sites: every latent site.
        plate_dims: the dim of each plate; `"images"` is always there and always outermost.
        space: the space of what the model observes, such as `ImageSpace((1, 28, 28))`.
        means_in_range: True where the mean of every pixel lies in `pixel_range`.
        supervised: True where the model explains labels. Without labels it has no loss.
        normalized: False where the trace is the joint density only up to a constant, as in an
            energy model. The log weights of such a model are not bounds.
    """

    sites: tuple[Site, ...] = ()
    plate_dims: dict[str, int] = {"images": -1}
    space: ObservationSpace = AnyImages()
    means_in_range: bool = True
    normalized: bool = True
    supervised: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; raise ValueError for a `batch_size` that is not a positive number."""
        check_whole(1, batch_size=kwargs.get("batch_size", 1))
        if not self.normalized and not self.supervised and _is_svi_step():
            raise ValueError(
                f"{type(self).__name__} is an energy model, whose density is known up to log Z "
                "only, so that an ELBO has no floor; give SVI loss=ContrastiveDivergence(), or "
                'hide the parameters, poutine.block(model, hide_types=["param"])'
            )
        return super().__call__(*args, **kwargs)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape (channels, height, width) of the images of the model's `ImageSpace`."""
        return _images_of(self.space).shape

    @property
    def pixel_range(self) -> tuple[float, float]:
        """The smallest and the largest admissible pixel of the model's `ImageSpace`."""
        return _images_of(self.space).pixel_range

    @property
    def latent_sites(self) -> tuple[Site, ...]:
        """The latent sites that a guide must cover: all except the enumerated ones."""
        return tuple(site for site in self.sites if not site.enumerated)

    def with_missing_pixels(self) -> Self:
        """Return the model for images with missing pixels (NaN), with shared parameters.

        The two models share their parameters. The image site of the new model scores only the
        observed pixels. At a missing pixel the value of the site is 0, or the end of
        `pixel_range` that is nearest to 0.

        Raises:
            ValueError: the model has no density of single pixels, like energy models and
                classifiers.
        """
        refuse_dependent_pixels(self)
        if not isinstance(self.space, ImageSpace):
            name = getattr(self, "__name__", type(self).__name__)
            raise ValueError(
                f"{name} observes no images of one shape, so that no pixel can be missing; "
                "give the model an ImageSpace; of a plain program NaN marks missing values, and "
                "reconstruct predicts them"
            )
        space = self.space.with_missing_pixels()
        return self.sharing_parameters(space=space, missing_fill=space.fill)

    def sample_image(self, distribution: TorchDistribution, images: Tensor | None) -> Tensor:
        """Sample or observe the image site in the plate of images, (*outer, B, C, H, W).

        Args:
            distribution: distribution of the images, event shape (C, H, W), whose batch shape ends
                in 1 for each dim to the right of the plate of images.
            images: (B, C, H, W), or None to draw them.
        """
        for _ in range(-1 - self.plate_dims["images"]):
            distribution = ImageDistribution(distribution)
        return pyro.sample(self.space.site, distribution, obs=images)

    def _checking(self, batch: Any) -> AbstractContextManager:
        has_density = self.normalized or self.supervised or batch is not None
        return CheckedValues(self.plate_dims["images"], self.space, has_density)

    def _scoring(self, observed: Tensor | None) -> AbstractContextManager:
        if self.missing_fill is None:
            return nullcontext()
        return ScoreObserved(self.space.site, observed)


def _is_svi_step() -> bool:
    """Return True within `SVI.step`, which records parameters, unless they are blocked."""
    if any(isinstance(handler, BlockMessenger) for handler in _PYRO_STACK):
        return False
    return any(isinstance(h, TraceMessenger) and h.param_only for h in _PYRO_STACK)


def _images_of(space: ObservationSpace) -> ImageSpace:
    if not isinstance(space, ImageSpace):
        raise AttributeError(f"the space {space} is not an ImageSpace, whose images have a shape")
    return space
