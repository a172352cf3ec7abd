"""All guides refuse models that they do not fit."""

import inspect

import pytest
from torch import nn

from capsule_zoo import guides
from capsule_zoo.guides import Corrected, GaussNewton, Guide

KINDS = [g for g in vars(guides).values() if inspect.isclass(g) and issubclass(g, Guide)]


@pytest.mark.parametrize("kind", [g for g in KINDS if g not in (Guide, Corrected, GaussNewton)])
def test_models_of_another_class_are_refused(kind):
    others = list(inspect.signature(kind).parameters.values())[1:]
    required = {
        p.name: None for p in others if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    }
    needed = kind.model_class.__name__
    with pytest.raises(ValueError, match=f"model must be of class {needed} for .*, not Identity"):
        kind(nn.Identity(), **required)
