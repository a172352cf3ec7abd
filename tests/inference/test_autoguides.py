"""Pyro's automatic guides are evaluated on the relaxed model."""

import pytest
import torch
from pyro.infer import autoguide

from capsule_zoo.inference import evaluate
from capsule_zoo.registry import create, small_settings

IMAGE_BY_IMAGE = ["AutoNormal", "AutoDelta"]
ONE_IMAGE = [
    "AutoDiagonalNormal",
    "AutoMultivariateNormal",
    "AutoLowRankMultivariateNormal",
    "AutoIAFNormal",
    "AutoLaplaceApproximation",
    "AutoStructured",
]
POINTS = {"AutoDelta", "AutoLaplaceApproximation"}


def fitted(name, number):
    model = create("part-whole", **small_settings("part-whole")).model
    images = torch.rand(number, *model.image_shape)
    guide = getattr(autoguide, name)(model)
    guide(images)
    return model, guide, images


@pytest.mark.parametrize("name", IMAGE_BY_IMAGE + ONE_IMAGE)
def test_they_are_evaluated_on_the_relaxed_model(name):
    number = 3 if name in IMAGE_BY_IMAGE else 1
    idata = evaluate(*fitted(name, number), discrete=False, num_particles=2)
    weights = torch.from_numpy(idata.sample_stats.log_weight.values)
    assert weights.shape == (1, 2, number) and torch.isfinite(weights).all()
    assert idata.attrs["presence"] == "relaxed"
    assert idata.attrs["is_bound"] == (name not in POINTS)
    assert idata.attrs["bound_on"] == "log p(image) of the relaxed model"
