"""What models and their networks refuse, and the telling part of each message."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import init_to_sample
from pyro.nn import PyroSample
from small_shape_codes import drawn, small

from capsule_zoo.guides import (
    ConvolutionalEncoder,
    DynamicRouting,
    EMObjects,
    EMRouting,
    ExactLabel,
    PartWholeGuide,
    Peeling,
    RecognitionMachine,
    RoutedCapsules,
)
from capsule_zoo.guides.capsule_network import SmallPrimary
from capsule_zoo.models import (
    CapsuleHelmholtzMachine,
    CapsuleNetwork,
    CapsuleRBM,
    ConditionalAutoencoder,
    GenerativeCapsNet,
    ImageSpace,
    MatrixCapsules,
    Model,
    PartWholeCapsules,
    Scenes,
    ShapeCodes,
    StackedCapsuleAutoencoder,
    SwitchableGaussians,
    VariationalAutoencoder,
)
from capsule_zoo.models.base import NamedModule
from capsule_zoo.models.common.plates import EnumeratedPresence
from capsule_zoo.models.common.trace_density import plain_log_density, scored_sites
from capsule_zoo.models.constellations.exact_cover import TooManyCovers, plan
from capsule_zoo.models.networks.attention_window import Aim
from capsule_zoo.models.networks.layers import MultiheadAttentionBlock
from capsule_zoo.models.parts.pixel_mixture import PixelMixture
from capsule_zoo.models.routing.capsule_convolution import ClassCapsules
from capsule_zoo.models.routing.vector_capsules import VectorCapsules
from capsule_zoo.models.routing.votes import Windows
from capsule_zoo.models.specification import build, spec
from capsule_zoo.models.units.exponential_family import make_units
from capsule_zoo.registry import create, list_models, small_settings
from capsule_zoo.settings import configure

part_whole = partial(configure, PartWholeCapsules)
stacked = partial(configure, StackedCapsuleAutoencoder)
shape_codes = partial(configure, ShapeCodes)
matrix = partial(MatrixCapsules, image_shape=(1, 17, 17), classes=3, routing=EMRouting(2))
guide_to_network = partial(RoutedCapsules, routing=DynamicRouting(3, fair=False), channels=4)
to_classes = partial(ClassCapsules, 2, 2, (3, 4), EMRouting(3))

ARGUMENTS: list[tuple[Callable, dict[str, Any], str]] = [
    (CapsuleHelmholtzMachine, dict(image_shape=10), "image_shape must be a square number"),
    (CapsuleHelmholtzMachine, dict(capsules=()), "capsules must give the size of one layer or"),
    (CapsuleHelmholtzMachine, dict(capsules=(3, 0)), r"capsules\[1\] must be at least 1"),
    (CapsuleHelmholtzMachine, dict(parents="two"), "parents must be one of 'all', 'one'"),
    (CapsuleRBM, dict(image_shape=(28, 28)), "image_shape must be a square number of pixels"),
    (CapsuleRBM, dict(visible_family="poisson", hidden_family="gaussian"), "no partition func"),
    (CapsuleNetwork, dict(classes=1), "classes"),
    (SmallPrimary, dict(image_shape=(1, 20, 20), channels=3), "channels"),
    (guide_to_network, dict(model=CapsuleNetwork((1, 14, 20))), "image_shape"),
    (guide_to_network, dict(model=CapsuleNetwork((1, 16, 20)), network="paper"), "image_shape"),
    (guide_to_network, dict(model=CapsuleNetwork(), network="large"), "network"),
    (ConditionalAutoencoder, dict(decoder="dense"), "decoder must be one of 'convolutional', 'li"),
    (GenerativeCapsNet, dict(motion="bilinear"), "motion must be one of 'mixed', 'linear'"),
    (matrix, dict(likelihood="gibbs"), "likelihood must be"),
    (matrix, dict(image_shape=(1, 16, 17)), "17x17 pixels or more"),
    (part_whole, dict(layers=(4,)), "layers needs two levels"),
    (part_whole, dict(dummy_presence=1.0), r"dummy_presence must lie inside \(0, 1\)"),
    (part_whole, dict(selection="sum"), "selection must be one of 'marginal', 'enumerate'"),
    (stacked, dict(leak=1.0), r"leak must lie inside \(0, 1\)"),
    (stacked, dict(presence="soft"), "presence must be one of 'relaxed', 'discrete'"),
    (VariationalAutoencoder, dict(image_shape=(1, 0, 28)), r"image_shape\[1\]"),
    (VariationalAutoencoder, dict(likelihood="poisson"), "likelihood must be one of 'normal', 'b"),
    (partial(Aim, 3), dict(size=1, shape=(7, 7)), "window must be at least 2"),
    (MultiheadAttentionBlock, dict(width=10, heads=4), "width must be a multiple of heads"),
    (to_classes, dict(coordinates=((0, 3), (0, 3))), "coordinates must be two different"),
    (to_classes, dict(coordinates=((0, 4), (1, 3))), "coordinates must be two different"),
    (to_classes, dict(coordinates=((0, 3),)), "coordinates must be two different"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), ARGUMENTS, ids=lambda x: str(x)[:40])
def test_a_bad_argument_is_refused_by_name(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def shape_code_scene() -> tuple[ShapeCodes, Any]:
    model = small(kinds=2, parts=3, slots=2)
    return model, drawn(model, 2)


def enumerated(model: Model, guide: Callable, of: str) -> float:
    """Compute a loss for which the presences of model or guide are enumerated."""
    model = config_enumerate(model) if of == "model" else model
    guide = config_enumerate(guide) if of == "guide" else guide
    return TraceEnum_ELBO(max_plate_nesting=2).loss(model, guide, torch.rand(2, 1, 8, 8).double())


def part_whole_pair(**options: Any) -> tuple[PartWholeCapsules, PartWholeGuide]:
    sizes = dict(objects=2, parts=2, image_shape=(1, 8, 8), template_size=3)
    model = configure(PartWholeCapsules, **{**sizes, **options}).double()
    guide = configure(PartWholeGuide, model, channels=4, width=8, heads=2, blocks=1, inducing=2)
    return model, guide.double()


def presence_of_the_guide() -> float:
    return enumerated(*part_whole_pair(presence="discrete"), "guide")


def presence_of_the_model() -> float:
    model, guide = part_whole_pair(presence="discrete")
    return enumerated(model, poutine.block(guide, hide=["object_presence"]), "model")


def switch_of_the_guide() -> float:
    machine = CapsuleHelmholtzMachine((1, 8, 8), (2, 2), 1, hidden_family="gaussian").double()
    return enumerated(machine, RecognitionMachine(machine).double(), "guide")


def nuts_on_parents() -> None:
    model = part_whole_pair(selection="enumerate")[0]
    kernel = NUTS(model, max_tree_depth=2, init_strategy=init_to_sample)
    chain = MCMC(kernel, num_samples=1, warmup_steps=2, disable_progbar=True)
    chain.run(torch.rand(2, 1, 8, 8).double())


def routing_drawn_parameters() -> None:
    model, _ = part_whole_pair()
    owner = model.selections[0]
    owner.transform = PyroSample(dist.Normal(owner.transform.detach(), 0.3).to_event(3))
    guide = configure(PartWholeGuide, model, above=EMObjects, channels=4).double()
    guide(torch.rand(2, 1, 8, 8).double())


def density(program: Callable) -> None:
    plain_log_density(scored_sites(poutine.trace(program).get_trace()), torch.zeros(4, 1, 2, 2))


def of_no_density() -> None:
    with pyro.plate("images", 4, dim=-2):
        pyro.sample("share", dist.Uniform(0.0, 1.0), obs=torch.full((4, 1), 2.0))


def points_space() -> Any:
    return create("constellations", **small_settings("constellations")).model.space


def hidden(number: float) -> None:
    images = torch.ones(2, 1, 2, 3)
    images[0, 0, 0, 0], images[1, 0, 0, 0] = math.nan, number
    ImageSpace((1, 2, 3), (0.5, 2.0)).with_missing_pixels().check(images)


def exhausted(size: int = 6) -> VariationalAutoencoder:
    return VariationalAutoencoder((1, size, size), 2, channels=3)


class OfAnyShape(Model):
    """A model without a space of its own."""


class MadeWithAFunction(NamedModule):
    def __init__(self, function: Callable) -> None:
        super().__init__()


NETWORK = PartWholeCapsules(objects=2, parts=3)
NO_IMAGES = {
    "cnn": "explains labels; choose",
    "capsule-rbm": "has a density up to a constant; choose",
    "constellations": "draws points and no images; choose",
}
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "images, sparse": (
        lambda: NETWORK(torch.zeros(2, 1, 28, 28).to_sparse()),
        r"call images\.to_dense\(\)",
    ),
    "capsule": (lambda: CapsuleRBM(4, 2, 2).projective_field(2), "capsule must be from 0 to 1, no"),
    "request": (
        lambda: ConditionalAutoencoder((1, 9, 6), 3)(
            torch.rand(2, 1, 9, 6), request=torch.zeros(3, 2)
        ),
        r"request must be \(2, 2\) or \(1, 2\), not \(3, 2\)",
    ),
    "covers": (lambda: plan(26, (5, 5, 5), 12), "RANSAC"),
    "family": (
        lambda: make_units("hidden_family", "binary", 2),
        "hidden_family must be one of 'bernoulli', 'gaussian'",
    ),
    "units": (lambda: make_units("family", "bernoulli", 2, 0), r"shape\[1\] must be at least 1"),
    "window": (lambda: Windows.sliding(2, 7, 3, 1), "2x7 grid .* is smaller than the kernel"),
    "vector capsules": (
        lambda: VectorCapsules(torch.nn.Identity(), 2, (8, 9), 2, 3, None),
        r"grid\[0\] must be at least 9, not 8",
    ),
    "votes": (lambda: SwitchableGaussians(5, 3, 4)(torch.zeros(2, 5, 3)), "votes must be"),
    "presence of votes": (
        lambda: SwitchableGaussians(5, 3, 4)(torch.zeros(2, 5, 3, 4), torch.ones(2, 3)),
        "presence must be",
    ),
    "kinds enumerated": (lambda: shape_code_scene()[0].with_enumerated_kinds(), "slots=1"),
    "joint of kinds": (
        lambda: shape_code_scene()[0].log_joint_of_kinds(*shape_code_scene()[1]),
        "slots=1",
    ),
    "scope": (lambda: small(kinds=2, parts=2).with_scope("images"), "scope"),
    "labels of kinds": (
        lambda: small(kinds=3, parts=2)(torch.rand(2, 1, 6, 6).double(), torch.tensor([3, 0])),
        "labels",
    ),
    "part sets, shape": (
        lambda: small(kinds=3, parts=2).with_scope("objects")(torch.rand(3, 1, 6, 6).double()),
        r"part sets must be \(B, 1, 2, 7\), not \(3, 1, 6, 6\)",
    ),
    "missing pixels, no space": (
        lambda: OfAnyShape().with_missing_pixels(),
        "give the model an ImageSpace",
    ),
    "missing pixels, infinite": (lambda: hidden(math.inf), "infinite"),
    "missing pixels, dark": (lambda: hidden(0.4), r"must lie in \[0.5, 2\]"),
    "bright by rounding": (
        lambda: OfAnyShape().space.check(torch.tensor([1, 1.0000002]).view(1, 1, 1, 2)),
        r"in \[0, 1\], but these span \[1, 1.000000238.*\]; .*: images.clamp\(0, 1\)",
    ),
    "points in space": (
        lambda: points_space().check(torch.zeros(3, 7, 3)),
        "points of the plane, neither images nor points in 3-D",
    ),
    "one scene of points": (lambda: points_space().check(torch.zeros(7, 2)), r"points\[None\]"),
    "mixture expanded": (
        lambda: PixelMixture(torch.rand(3, 2, 4, 5, 6), torch.rand(3, 1, 4, 5, 6), 0.2).expand(
            torch.Size([4, 3])
        ),
        "batch_shape",
    ),
    "routing drawn parameters": (routing_drawn_parameters, "PyroSample"),
    "a value without a density": (lambda: density(of_no_density), "site 'share'"),
    "thing, a name": (lambda: Scenes((3, 10, 10), "vae"), "thing must be a Model, such as create"),
    "thing, channels": (
        lambda: Scenes((3, 10, 10), VariationalAutoencoder((2, 6, 6), 2, channels=3)),
        "channels; objects of scenes",
    ),
    "thing, trained": (
        lambda: create("scenes", thing="shape-codes-mnist", thing_settings=dict(kinds=3)),
        "leave out thing_settings",
    ),
    "ground without settings": (
        lambda: create("scenes", ground="learned", ground_settings=dict(latent=3)),
        "ground 'learned' has no settings; leave out ground_settings",
    ),
    "ground, channels": (
        lambda: Scenes((3, 10, 10), exhausted(), ground=exhausted(8)),
        "needs 3 channels, at dim -1",
    ),
    "ground without a reader": (
        lambda: Peeling(
            Scenes((1, 10, 10), exhausted(), ground=exhausted(8)),
            ConvolutionalEncoder(exhausted(), 5),
        ),
        "give its guide as ground_reader",
    ),
    "spec of a function": (
        lambda: spec(MadeWithAFunction(print)),
        "MadeWithAFunction was made with function: builtin.* cannot be written",
    ),
    "no such class": (lambda: build({"class": "PartWholeCapsule"}), "you mean 'PartWholeCapsules'"),
    "a class of no model": (lambda: build({"class": "os.system"}), "module defines os.system, imp"),
    "no such argument": (
        lambda: build({**spec(NETWORK), "objcts": 3}),
        "unknown argument of PartWholeCapsules 'objcts'; did you mean 'objects'",
    ),
    "no such module": (
        lambda: build({"part_of": "guide", "name": ""}, model=NETWORK),
        "unknown module 'guide'",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_refused_in_words(name):
    call, message = CALLS[name]
    with pytest.raises(TooManyCovers if name == "covers" else ValueError, match=message):
        call()


@pytest.mark.parametrize("part", ["thing", "ground"])
@pytest.mark.parametrize("entry", NO_IMAGES)
def test_models_that_draw_no_images_are_no_parts_of_scenes(part, entry):
    with pytest.raises(ValueError, match=f"{part} .*{NO_IMAGES[entry]}"):
        create("scenes", **{part: entry})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (presence_of_the_guide, r"'part_presence'.*TraceEnum_ELBO"),
        (presence_of_the_model, "'object_presence'"),
        (switch_of_the_guide, "'capsule1_switch'"),
        (nuts_on_parents, r'TraceEnum_ELBO with a guide.*with_selection\("marginal"\)'),
    ],
)
def test_an_enumerated_presence_is_refused_by_guide_and_model(call, message):
    """The loss would be wrong: terms outside the plate are not weighted by the probabilities."""
    with pytest.raises(EnumeratedPresence, match=message):
        call()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(4), "labels must be integers"),
        (torch.tensor([0, 1, 2, 3]), r"labels must lie in 0 to 2.*, or build .* classes=4"),
        (torch.tensor([-1, 0, 1, 2]), r"labels must .* number the classes from 0, .*\[1\](?!, or)"),
        (torch.zeros(4, 1, dtype=torch.int64), "labels must be integers of shape"),
    ],
)
def test_bad_labels_are_refused_by_model_and_guide(labels, message):
    model = matrix(features=4, capsules=(2, 2, 2))
    for call in (model, ExactLabel(model)):
        with pytest.raises(ValueError, match=message):
            call(torch.rand(4, 1, 17, 17), labels)


def test_every_guide_says_that_it_needs_images():
    for name in list_models():
        entry = create(name, **small_settings(name))
        for guide in map(entry.make_guide, entry.guides):
            message = f"needs {guide.observes}; for draws from the prior"
            for arguments, keywords in (((None,), {}), ((), {}), ((), {guide.observes: None})):
                with pytest.raises(ValueError, match=message):
                    guide(*arguments, **keywords)
