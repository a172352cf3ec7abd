"""Specifications: objects that differ by their arguments, copies, parts; and clear refusals."""

import json
from functools import partial

import pytest
import torch

from capsule_zoo.guides import EMObjects, EMRouting, PartReader, PartWholeGuide, Peeling
from capsule_zoo.guides.vae import ConvolutionalEncoder
from capsule_zoo.models import (
    MatrixCapsules,
    PartWholeCapsules,
    Scenes,
    ShapeCodes,
    VariationalAutoencoder,
)
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.models.specification import build, spec

SHAPE = (1, 12, 12)


def again(value, **owners):
    """Return the object that is built from the JSON of another."""
    text = json.dumps(spec(value, **owners), allow_nan=False)
    return build(json.loads(text), **owners)


def small(**arguments) -> PartWholeCapsules:
    return PartWholeCapsules(SHAPE, 2, 3, painting=Painting(template_size=5), **arguments)


def test_defaults_are_written_down():
    assert spec(small())["painting"]["sigma_image"] == Painting().sigma_image


def test_a_guide_that_was_put_together_by_hand_is_rebuilt():
    model = small()
    reader, above = partial(PartReader, channels=6), partial(EMObjects, iterations=2)
    guide = PartWholeGuide(model, reader=reader).with_above(above).with_poses("normal")
    written = spec(guide, model=model)
    assert written["above"] == {"class": "EMObjects", "iterations": 2}
    assert written["reader"]["channels"] == 6 and written["reader"]["max_scale"] == 0.8
    twin = again(guide, model=model)
    assert (twin.infer_objects.iterations, twin.pose, twin.model) == (2, "normal", model)
    assert twin.read_parts.encoder[0].out_channels == 6


@pytest.mark.parametrize(
    "vary",
    [
        lambda model: model.discretize(),
        lambda model: model.with_selection("enumerate"),
        lambda model: model.with_missing_pixels(),
        lambda model: model.with_missing_pixels().discretize(),
    ],
)
def test_a_copy_that_differs_is_rebuilt_as_it_is(vary):
    model = vary(small())
    twin = again(model)
    assert spec(twin) == spec(model)
    for name in ("presence", "selection", "space", "missing_fill"):
        assert getattr(twin, name) == getattr(model, name), name


@pytest.mark.parametrize("scope", ["parts", "objects"])
def test_a_scope_is_rebuilt(scope):
    model = ShapeCodes(SHAPE, 2, 3, 2, painting=Painting(template_size=5)).with_scope(scope)
    twin = again(model)
    assert (twin.scope, twin.space) == (scope, model.space)


def test_the_routing_of_a_copy_is_rebuilt():
    model = MatrixCapsules((1, 17, 17), 2, routing=EMRouting(1), features=3, capsules=(2, 2, 2))
    routed = model.with_routing(EMRouting(3, power=0.5))
    twin = again(routed)
    assert twin.classes.routing == twin.layers[0].routing == EMRouting(3, power=0.5)


@pytest.mark.parametrize("constant", [False, True])
def test_scenes_are_rebuilt_with_their_object_model_inside(constant):
    thing = VariationalAutoencoder((1, 5, 5), 2, channels=3)
    reader = ConvolutionalEncoder(thing, 5, 1)
    if constant:
        thing.make_constant(), reader.make_constant()
    model = Scenes((1, 12, 10), thing, slots=2, size=6.0)
    guide = Peeling(model, reader, glimpse=4, hidden=6)
    twin = again(model)
    read = build(spec(guide, model=model), model=twin)
    assert read.reader.model is twin.thing
    assert len(list(twin.parameters())) == len(list(model.parameters()))
    assert len(list(read.parameters())) == len(list(guide.parameters()))
    twin.load_state_dict(model.state_dict())
    read.load_state_dict(guide.state_dict())


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([0.1, 1 / 3], dtype=torch.float64),
        torch.tensor([[2.0, -torch.inf], [torch.inf, torch.nan]]),
        torch.tensor([True, False]),
        torch.tensor(-torch.inf),
    ],
)
def test_tensors_keep_their_values_and_precision(values):
    twin = again(values)
    assert twin.dtype == values.dtype
    torch.testing.assert_close(twin, values, rtol=0, atol=0, equal_nan=True)
