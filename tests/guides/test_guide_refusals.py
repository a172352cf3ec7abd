"""Guides refuse settings, models and images that do not fit, in a line that says what does."""

import inspect
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from small_entries import check_refused, images_for, small_entry
from torch import nn

from capsule_zoo import create, guides, models
from capsule_zoo.data.points import SHAPES
from capsule_zoo.guides.label import ClassPose
from capsule_zoo.guides.parts.routing_slots import RoutingSlots
from capsule_zoo.guides.per_image.site_distributions import UnservedSite, family_of
from capsule_zoo.inference import SleepPhase, infer
from capsule_zoo.inference.objects import find_objects
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.inference.training.starts.kinds import start_kinds
from capsule_zoo.settings import configure


def part_whole(*shape: int) -> models.PartWholeCapsules:
    return models.PartWholeCapsules((1, *(shape or (12, 12))), objects=3, parts=4)


def free_form(**settings) -> guides.FreeForm:
    entry = small_entry("part-whole")
    return guides.FreeForm(
        entry.model, torch.rand(4, *entry.model.image_shape), entry.guide, **settings
    )


def known_latents() -> guides.KnownLatents:
    entry = small_entry("vae")
    return guides.KnownLatents(
        entry.model, infer(entry.guide, torch.zeros(3, *entry.model.image_shape))
    )


def on_request(**settings) -> guides.ConditionalEncoder:
    return guides.ConditionalEncoder(
        models.ConditionalAutoencoder((1, 10, 8), 2, hidden=5), **settings
    )


def class_pose() -> ClassPose:
    classifier = models.MatrixCapsules((1, 17, 17), 3, routing=guides.EMRouting(2), features=3)
    return ClassPose(models.VariationalAutoencoder((1, 17, 17), 47), classifier)


def constellations(*names: str, clutter: int = 0) -> models.Constellations:
    shapes = [torch.tensor(SHAPES[name]) for name in names or ("square", "triangle")]
    return models.Constellations(shapes, 0.1, clutter=clutter)


def shape_codes(**settings) -> models.ShapeCodes:
    sizes = dict(kinds=3, parts=6, codes=2, image_shape=(1, 8, 8), template_size=4)
    return configure(models.ShapeCodes, **sizes | settings)


def autoencoder() -> models.StackedCapsuleAutoencoder:
    return models.StackedCapsuleAutoencoder((1, 8, 8), objects=3, parts=6, template_size=4)


def stacked(**settings) -> guides.StackedCapsuleGuide:
    model = autoencoder()
    reader = partial(guides.PartReader, channels=4)
    return guides.StackedCapsuleGuide(model, **{"reader": reader} | settings)


def recurrent(**settings) -> models.RecurrentCapsules:
    sizes = dict(classes=3, steps=3, latent=2, units=5, channels=(2, 2), types=2, window=4)
    sizes |= dict(image_shape=(1, 17, 18), routing=guides.DynamicRouting(2))
    return configure(models.RecurrentCapsules, **sizes | settings)


def labeled(labels: list[int], **settings) -> None:
    model = recurrent(**settings)
    model(torch.rand(len(labels), *model.image_shape).round(), torch.tensor(labels))


class Shared(models.VariationalAutoencoder):
    """A model with a site of no image."""

    sites = (models.Site("image_code", (), event_dim=1),)


class Empty(guides.Guide):
    """A guide that draws nothing."""

    def forward(self, images, labels=None):
        pass


class Yields(guides.Routing):
    """A routing that yields what `make_beliefs` makes of votes and of a belief."""

    make_beliefs = staticmethod(lambda votes, belief: [])

    def beliefs(self, votes, distribution):
        return self.make_beliefs(votes, guides.best_belief(votes, votes.uniform(), distribution))


def routed(beliefs=None, energies: bool = False) -> None:
    """Route by a routing of a user's own, whose beliefs are `beliefs`; or ask for its energies."""
    kind = (
        type("Own", (Yields,), {"make_beliefs": staticmethod(beliefs)})
        if beliefs
        else guides.Routing
    )
    distribution = guides.routing.ParentDistribution(torch.zeros(4), torch.zeros(4))
    call = kind(2).free_energies if energies else kind(2)
    call(guides.Votes.dense(torch.randn(3, 8, 4, 5)), distribution)


def attended(temperature: float, guide: str) -> None:
    entry = small_entry("scenes", guide)
    find_objects(entry.model, entry.guide, images_for(entry), temperature=temperature)


SWITCHES = "model must have switches; for an RBM use ExactSwitches"
ITERATIONS, WIDTH = "iterations must be at least 1", "width must be at least 1"
SQUARE, UPRIGHT = "need square images, not 12x16", "reader must see each image as it is"
BELIEF = "beliefs of Own must yield a Belief, at least once"
REFUSALS = [
    (
        lambda: guides.AmortizedMatching(constellations()).with_proposals(0),
        "proposals must be at least 1",
    ),
    (
        lambda: SleepPhase().differentiable_loss(
            constellations(), guides.ExactMatching(constellations()), torch.zeros(2, 7, 2)
        ),
        "AmortizedMatching, not ExactMatching",
    ),
    (class_pose, "latent must be 48"),
    (
        lambda: guides.EMObjects(models.PartWholeCapsules(types=2)),
        "parts of this model have 2 types; use SetTransformers",
    ),
    (lambda: guides.PartReader(part_whole(12, 16), 7, rotations=2), SQUARE),
    (lambda: guides.PartWholeGuide(part_whole(), "gamma"), "'delta', 'normal', 'low_rank'"),
    (lambda: on_request(window=(11, 4)), "window must lie in 10x8 pixels, not be 11x4"),
    (lambda: models.Constellations([torch.zeros(1, 2)]), "fewer than two different points"),
    (lambda: models.Constellations([]), "templates is empty"),
    (
        lambda: guides.Corrected(
            small_entry("stacked-capsule-autoencoder").guide, torch.rand(2, 1, 12, 12)
        ),
        r"draws 'object_presence': its distribution NoisyLogit .*FreeF",
        UnservedSite,
    ),
    (
        lambda: guides.Corrected(nn.Conv2d(1, 1, 1), torch.rand(2, 1, 8, 8)),
        "guide must be a Guide, not Conv",
    ),
    (
        lambda: refine(part_whole(), None, torch.rand(2, 1, 12, 12), distribution="corrected"),
        "distribution 'corrected' corrects the distributions of one guide",
    ),
    (lambda: guides.MeanFieldSwitches(models.RBM(4, 2)), SWITCHES),
    (lambda: free_form()(torch.rand(3, 1, 12, 12)), "belongs to 4 images, not 3"),
    (lambda: free_form(distribution="full"), "distribution must be one of 'delta', 'normal', 'low"),
    (
        lambda: guides.FreeForm(Shared((1, 5, 6), 2, channels=2), torch.rand(2, 1, 5, 6)),
        r"'image_code' of Shared lies outside the plate 'images'",
        UnservedSite,
    ),
    (
        lambda: guides.FreeForm(
            small_entry("vae").model, torch.rand(2, 1, 5, 6), Empty(nn.Identity())
        ),
        "init, a Empty, draws no site 'image_code'",
    ),
    (
        lambda: family_of("count", dist.Poisson(torch.ones(2)).to_event(1)),
        "site 'count' has the distribution Poisson, which is discrete",
        UnservedSite,
    ),
    (  # more than its logits
        lambda: family_of("tries", dist.Binomial(3, logits=torch.zeros(2)).to_event(1)),
        "'tries' has the distribution Binomial, which is discrete",
        UnservedSite,
    ),
    (
        lambda: family_of("axis", dist.ProjectedNormal(torch.ones(3))),
        "has no transform from the reals",
        UnservedSite,
    ),
    (lambda: known_latents()(torch.zeros(2, 1, 5, 6)), "this guide has values for 3 images, not 2"),
    (
        lambda: guides.KnownLatents(small_entry("vae").model, {}),
        r"values lacks .*; give a value to each of the latent",
    ),
    (lambda: guides.SelfRouting(2), "iterations must be 1 for SelfRouting"),
    (lambda: create("matrix-capsules", routing=3), "routing of matrix-capsules must be Routing"),
    (
        lambda: create("matrix-capsules", routing={"class": "SelfRouting", "power": 0.5}),
        "unknown setting of SelfRouting 'power'",
    ),
    (
        lambda: small_entry("matrix-capsules").model.with_routing("em"),
        r"routing must be a Routing such as .*, not 'em'",
    ),
    (lambda: guides.EMRouting(1.5), r"iterations must be a whole number, 1 or more, not 1\.5"),
    (lambda: guides.EMRouting(costs="mean"), "costs must be one of 'summed', 'standardized'"),
    (lambda: guides.EMRouting(e_step="fast"), "e_step must be one of 'paper', 'exact'"),
    (lambda: guides.Votes.dense(torch.randn(12, 3, 16)), r"votes are .*, not \(12, 3, 16\)"),
    (routed, "Routing must write beliefs", NotImplementedError),
    (lambda: routed(lambda votes, belief: belief), BELIEF),
    (lambda: routed(lambda votes, belief: []), BELIEF),
    (lambda: routed(lambda votes, belief: [], True), BELIEF),
    (
        lambda: routed(lambda votes, belief: [votes.uniform(), belief], True),
        "of Own .*must yield a Belief",
    ),
    (
        lambda: routed(
            lambda votes, belief: [belief._replace(responsibility=torch.randn(3, 1, 4, 8))], True
        ),
        "of Own .*in .0, 1.",
    ),
    (
        lambda: guides.PartWholeGuide(part_whole(), above=torch.nn.Linear),
        "above must be Submodule, a subclass .*Linear",
    ),
    (
        lambda: guides.PartWholeGuide(part_whole(), above=guides.KindNetwork),
        "above is KindNetwork, which serves ShapeCodes, not PartWholeC",
    ),
    (
        lambda: guides.PartWholeGuide(part_whole(), reader=guides.SetTransformers),
        "reader must be PartReader, .*SetTransformers",
    ),
    (
        lambda: configure(guides.PartWholeGuide, part_whole(), reader=guides.EMObjects),
        r"reader of .* must be a class such as PartReader",
    ),
    (
        lambda: configure(
            guides.PartWholeGuide, part_whole(), reader={"class": "PartReader", "chanels": 3}
        ),
        r"PartReader.*chanels.*channels",
    ),
    (lambda: stacked(pose="low_rank"), "pose must be one of 'delta', 'normal'"),
    (lambda: stacked(reader=partial(guides.PartReader, rotations=2)), UPRIGHT),
    (lambda: stacked(reader=partial(guides.PartReader, centered=True)), UPRIGHT),
    (lambda: RoutingSlots(shape_codes(slots=2), rounds=0), "rounds"),
    (lambda: guides.ShapeCodesGuide(shape_codes(), objects="low_rank"), "objects"),
    (
        lambda: start_kinds(shape_codes().with_scope("objects"), torch.rand(2, 1, 6, 7)),
        "fewer kinds",
    ),
    (lambda: attended(-1.0, "peeling"), "temperature must"),
    (lambda: attended(0.1, "slot-attention"), "leave temperature=None for a SlotAttention"),
    (
        lambda: (e := small_entry("scenes", "recurrent")).guide.on_model(
            e.model.with_canvas(20, 20)
        ),
        "train this guide on that canvas, or use Peeling",
    ),
    (lambda: recurrent(capsules="twice"), "capsules must be one of 'every', 'once', 'none'"),
    (lambda: recurrent(image_shape=(1, 16, 17)), r"image_shape\[1\] must be at least 17"),
    (lambda: labeled([0], capsules="none"), "labels need capsules"),
    (lambda: labeled([0, 1, 2, 3]), "labels must lie in 0 to 2"),
]
REFUSALS += [
    (lambda kind=kind: kind(iterations=0), ITERATIONS)
    for kind in (guides.EMRouting, guides.VBRouting, guides.DynamicRouting)
]
REFUSALS += [
    (lambda kind=kind, wrong={name: value}: kind(**wrong), message)
    for kind in (guides.EMRouting, guides.VBRouting)
    for name, value, message in (
        ("anneal", 1.0, "anneal must lie in"),
        ("anneal", "geometric", "or be 'linear', not 'geom"),
        ("power", 0.0, "power must be positive"),
    )
]
REFUSALS += [
    (
        lambda wrong={name: value}: models.Constellations(
            [torch.tensor(SHAPES["square"])], **wrong
        ),
        name,
    )
    for name, value in dict(sigma=-1.0, presence=1.0, clutter=-1, sigma_floor=0.0).items()
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal[1])
def test_what_does_not_fit_is_refused(refusal):
    check_refused(*refusal)


KINDS = [g for g in vars(guides).values() if inspect.isclass(g) and issubclass(g, guides.Guide)]


@pytest.mark.parametrize(
    "kind", [g for g in KINDS if g not in (guides.Guide, guides.Corrected, guides.GaussNewton)]
)
def test_models_of_another_class_are_refused(kind):
    others = list(inspect.signature(kind).parameters.values())[1:]
    required = {
        p.name: None for p in others if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    }
    needed = kind.model_class.__name__
    with pytest.raises(ValueError, match=f"model must be of class {needed} for .*, not Identity"):
        kind(nn.Identity(), **required)


POINTS = torch.rand(2, 7, 2)
SCENES = {
    r"points\[None\]": (POINTS[0],),
    r"present must be \(2, 7\)": (POINTS, torch.ones(2, 6)),
    "0 and 1": (POINTS, torch.full((2, 7), 0.5)),
    "set present to 0": (POINTS / 0, torch.ones(2, 7)),
    "fewer than two": (POINTS, torch.arange(7).expand(2, 7) < 1),
    "scenes of 5 points": (POINTS, torch.arange(7).expand(2, 7) < 5),
    "at most 7": (torch.rand(1, 30, 2),),
}


@pytest.mark.parametrize(
    "guide",
    [guides.ExactMatching, guides.RansacMatching, guides.SinkhornMatching, guides.MixtureMatching],
)
def test_scenes_that_no_matching_explains_are_refused_with_a_remedy(guide):
    for message, scenes in SCENES.items():
        with pytest.raises(ValueError, match=message):
            guide(constellations()).parse(*scenes)
