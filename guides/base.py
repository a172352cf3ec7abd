"""What every guide of the zoo shares: it is made from a model and says which sites it covers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Self

from torch import Tensor, nn

from capsule_zoo.models.base import Model, NamedModule


@contextmanager
def in_eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Modules in evaluation mode (running statistics), and back as they were at the end."""
    before = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


class Guide(NamedModule):
    """An approximate posterior over the latent sites of one model.

    A guide is called as its model is, `guide(images, labels=None)`. It holds the model without
    owning it: the model's parameters are not the guide's. Its `model_class` is that of the models
    that it fits, `observes` is the name of its first argument, which it cannot do without, and
    `fit_settings` are the `lr`, `schedule`, `warmup` and `clip` of `inference.fit` that suit it,
    where the caller gives none.

    Raises:
        ValueError: the model is of another class, or the guide is called without images.
    """

    model_class: type[nn.Module] = nn.Module
    observes: str = "images"
    fit_settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, model: Model) -> None:
        if not isinstance(model, self.model_class):
            raise ValueError(
                f"model must be of class {self.model_class.__name__} for {type(self).__name__}, "
                f"not {type(model).__name__}"
            )
        super().__init__()
        self._model = (model,)  # in a tuple, as Pyro's AutoGuides do, so that it is no sub-module

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        observed = arguments[0] if arguments else keywords.get(self.observes)
        if observed is None:
            raise ValueError(
                f"{type(self).__name__} needs {self.observes}; for draws from the prior call the "
                "model, for the posterior predictive see "
                "capsule_zoo.inference.posterior_predictive"
            )
        return super().__call__(*arguments, **keywords)

    @property
    def model(self) -> Model:
        return self._model[0]

    @property
    def covers(self) -> tuple[str, ...]:
        """Names of the sites that the guide draws: all that the model leaves to guides."""
        return tuple(site.name for site in self.model.latent_sites)

    def with_missing_pixels(self, fill: Tensor | float = 0.0) -> Self:
        """Return the same guide, with the same parameters, to `model.with_missing_pixels()`.

        A guide that reads the image sees `fill` where a pixel is missing. It then answers as if it
        had been shown the filled image: an answer that is better or worse but always a law over the
        latents, so that bounds stay bounds. Laws with parameters for every image, fitted to the
        observed pixels, see nothing of the fill; see `fill_in`.

        Args:
            fill: a number or (C, H, W), such as the mean of the training images.
        """
        return self.sharing_parameters(
            _model=(self.model.with_missing_pixels(),), missing_fill=fill
        )

    def with_discrete_presences(self) -> Self:
        """The same parameters in a guide to the model's `with_discrete_presences()`."""
        model = self.model.with_discrete_presences()
        return self if model is self.model else self.sharing_parameters(_model=(model,))
