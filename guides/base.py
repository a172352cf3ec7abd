"""The base class of the zoo's guides: a guide is made from a model and names the model's sites."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from torch import Tensor, nn

from capsule_zoo.models.base import Model, NamedModule, Program
from capsule_zoo.models.common.param_store import agree
from capsule_zoo.models.common.site_values import CheckedValues
from capsule_zoo.models.common.spaces import ObservationSpace

M = TypeVar("M", bound=Model)

if TYPE_CHECKING:
    _GuideType = type
else:

    class _GuideType(type(Program)):
        """The metaclass of guides, by which `Guide[M]` names the class of the models of a guide.

        For other Pyro modules, `PyroModule[M]` makes a new class that is both.
        """

        def __getitem__(cls, models: Any) -> Any:
            return cls.__class_getitem__(models)


class Guide(Program, Generic[M], metaclass=_GuideType):
    """An approximate posterior over the latent sites of one model.

    A guide is called like its model, `guide(images, labels=None)`. It holds the model without
    owning it: the model's parameters are not parameters of the guide.
    A guide to one class of models names it, `class MyGuide(Guide[MyModel])`. That class is its
    `model_class`, and type checkers know that its `model` is of that class. `observes` is the name
    of its first argument, which is required. `fit_settings` are the default `lr`, `schedule`,
    `warmup` and `clip` of `inference.fit` for this guide. `auxiliary` is True where the density of
    a draw rests on further draws that are not sites: log weights are unbiased, but the density
    cannot be computed again from the sites alone.

    Raises:
        ValueError: the model is of another class, or the guide is called without images.
    """

    model_class: type[nn.Module] = nn.Module
    fit_settings: Mapping[str, Any] = MappingProxyType({})
    auxiliary: bool = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for base in vars(cls).get("__orig_bases__", ()):
            for model_class in getattr(base, "__args__", ()):
                if isinstance(model_class, type):
                    cls.model_class = model_class

    def __init__(self, model: M) -> None:
        if not isinstance(model, self.model_class):
            raise ValueError(
                f"model must be of class {self.model_class.__name__} for {type(self).__name__}, "
                f"not {type(model).__name__}"
            )
        super().__init__()
        self._model = (model,)  # in a tuple, like Pyro's AutoGuides, so that it is not a sub-module

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        observed = arguments[0] if arguments else keywords.get(self.observes)
        if observed is None:
            raise ValueError(
                f"{type(self).__name__} needs {self.observes}; for draws from the prior call the "
                "model, for the posterior predictive see "
                "capsule_zoo.inference.posterior_predictive"
            )
        if isinstance(self.model, NamedModule):
            agree(self.model)
        return super().__call__(*arguments, **keywords)

    def _checking(self, batch: Any) -> AbstractContextManager:
        dims = getattr(self.model, "plate_dims", {"images": -1})
        return CheckedValues(dims["images"], None)

    @property
    def model(self) -> M:
        return self._model[0]

    @property
    def space(self) -> ObservationSpace | None:
        return getattr(self.model, "space", None)

    @property
    def covers(self) -> tuple[str, ...]:
        """The names of the sites that the guide samples: all that the model leaves to guides."""
        return tuple(site.name for site in self.model.latent_sites)

    def with_missing_pixels(self, fill: Tensor | float = 0.0) -> Self:
        """Return the guide for `model.with_missing_pixels()`, with shared parameters.

        A guide that reads the image sees `fill` where a pixel is missing. Its result is then the
        distribution of the filled image. This distribution may be better or worse, but it is always
        a distribution of the latents, so that bounds stay bounds. Guides with their own parameters
        for every image, fitted to the observed pixels, do not use the fill; see `fill_in`.

        Args:
            fill: a number or (C, H, W), such as the mean of the training images.
        """
        return self.sharing_parameters(
            _model=(self.model.with_missing_pixels(),), missing_fill=fill
        )

    def discretize(self) -> Self:
        """Return the guide for `model.discretize()`, with shared parameters."""
        return self.on_model(self.model.discretize())

    def on_model(self, model: Any, **changes: Any) -> Self:
        """Return the guide for another form of the model, with shared parameters.

        Args:
            changes: attributes that differ then.
        """
        if model is self.model:
            return self
        return self.sharing_parameters(_model=(model,), **changes)
