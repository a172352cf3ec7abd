"""What every guide of the zoo shares: it is made from a model and says which sites it covers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

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
    owning it: the model's parameters are not the guide's.

    Attributes:
        covers: names of the sites that the guide draws.
    """

    covers: tuple[str, ...] = ()

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, as Pyro's AutoGuides do, so that it is no sub-module

    @property
    def model(self) -> Model:
        return self._model[0]

    def with_discrete_presences(self) -> Guide:
        """The guide to the model's `with_discrete_presences()`; itself unless it is relaxed."""
        return self
