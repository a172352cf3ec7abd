"""What does not fit is refused in one line, which names it, says what is allowed, and a remedy."""

import math
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from small_entries import check_refused, images_for, on, small_entry
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from toys import (
    BernoulliMixture,
    Conjugate,
    ExactGuide,
    Labelaw,
    LinearGuide,
    NoGuide,
    conjugate_images,
    on_toys,
    pair,
)

from capsule_zoo import models
from capsule_zoo.data import Split
from capsule_zoo.data.tensors import as_tensor
from capsule_zoo.guides import ExactLabel, GaussNewton
from capsule_zoo.guides.per_image.site_distributions import UnservedSite
from capsule_zoo.inference import (
    Comparison,
    IncompatibleGuide,
    Inputs,
    SemiAmortized,
    classify,
    compare,
    encode,
    error_rate,
    evaluate,
    fgsm,
    fill_in,
    fit,
    fit_guide,
    infer,
    intervene,
    mean_images,
    posterior_predictive,
    reconstruct,
    sample,
)
from capsule_zoo.inference.posterior.gauss_newton import gauss_newton
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.inference.posterior.shared_noise import NoRule, carry
from capsule_zoo.inference.posterior.widen import widen
from capsule_zoo.inference.probes import cluster_accuracy, latents, linear_probe
from capsule_zoo.inference.sample_quality import frechet_distance, train_classifier
from capsule_zoo.inference.segmentation import segmentation_accuracy


class Outside(Conjugate):
    """A model with a site outside the plate of images."""

    def forward(self, images=None, labels=None, batch_size=1):
        pyro.sample("tilt", dist.Normal(0.0, 1.0))
        return super().forward(images, labels, batch_size)


class OutsideGuide(LinearGuide):
    def forward(self, images, labels=None):
        pyro.sample("tilt", dist.Normal(0.0, 1.0))
        super().forward(images, labels)


def classifier() -> tuple[models.ConvolutionalClassifier, ExactLabel]:
    model = models.ConvolutionalClassifier((1, 8, 8), 3, channels=(2, 2), hidden=4)
    return model, ExactLabel(model)


def split(classes: int = 2) -> Split:
    return Split(torch.rand(4, 1, 8, 8), torch.arange(4) % classes)


def outside() -> tuple[Outside, OutsideGuide]:
    model = Outside().double()
    return model, OutsideGuide(model).double()


def labeled_and_not() -> dict:
    models = {"joint": Labelaw().double(), "plain": Conjugate().double()}
    return {name: (model, ExactGuide(model)) for name, model in models.items()}


def soft_and_hard(model, guide) -> dict:
    pair = model, guide.with_poses("normal")
    return {"soft": pair, "hard": tuple(program.discretize() for program in pair)}


def classifier_and_vae(model, guide) -> dict:
    vae = small_entry("vae", image_shape=model.image_shape)
    return {"vae": (vae.model, vae.guide), "cnn": (model, guide)}


def fit_labels(model, guide, images, labels) -> None:
    fit(model, guide, Split(images, labels), inputs=Inputs(labels=True), steps=1)


def plain(images=None, labels=None):
    """A plain program, which declares no site."""


class Flow(IterableDataset):
    """Images that come one after the other."""

    def __iter__(self):
        return iter(torch.rand(3, 1, 2, 2))


HALVES = torch.tensor([[0, 0, 1, 1, 2, 2, -1]])
HERE = torch.ones_like(HALVES, dtype=torch.bool)
LABELS = torch.tensor([0, 1, 1])
ROWS = np.zeros((3, 1))
BYTES = np.zeros((2, 1, 2, 2), np.uint8)
PARTICLES = "num_particles must be at least 1"
REFUSALS = [
    # evaluations
    (lambda: on_toys(evaluate, num_particles=0), PARTICLES),
    (lambda: on_toys(evaluate, seed=-1), "seed must be a whole number from 0"),
    (lambda: on_toys(evaluate, seed=2**63), "seed must be a whole number from 0"),
    (lambda: on_toys(evaluate, labels=LABELS[:2]), r"labels must be \(3,\), .*not \(2,\)"),
    (lambda: on_toys(evaluate, labels=torch.zeros(3)), "labels must be integers.*float32"),
    (lambda: on_toys(evaluate, labels=["a", "b"]), "must be a tensor.*not list; number classes"),
    (lambda: evaluate(*pair(), conjugate_images(3)[:0]), "images is an empty batch"),
    (lambda: evaluate(*pair(), BYTES), "divide bytes by 255"),
    (lambda: on("cnn", evaluate), "ConvolutionalClassifier explains labels.*labels=.*error_rate"),
    # comparisons
    (lambda: compare({}, conjugate_images(3)), "pairs is empty"),
    *(
        (
            lambda kind=kind: compare(kind(pair()), conjugate_images(3)),
            "must be {.name.: .model, guide.}",
        )
        for kind in (tuple, list)
    ),
    (
        lambda: compare({"a": small_entry("vae")}, torch.rand(2, 1, 5, 6)),
        r"'a' must be \(model, guide",
    ),
    (lambda: Comparison({"iwae": [0.0]}).draw(), r"columns are missing: elbo, elbo_se.*plot"),
    # verbs
    *(
        (lambda verb=verb, wrong=wrong: on("vae", verb, **{"num_samples": 1, **wrong}), message)
        for verb in (encode, reconstruct, posterior_predictive)
        for wrong, message in (
            ({"num_samples": 0}, "num_samples must be at least 1"),
            ({"num_samples": 1.5}, "num_samples must be a whole number"),
            ({"seed": -1}, "seed must be a whole number"),
            ({"seed": 2**64}, "seed must be a whole number"),
            ({"batch_size": 2.5}, "batch_size must be a whole number"),
        )
    ),
    *(
        (lambda verb=verb, change=change: verb(*change(small_entry("vae"))), message)
        for verb in (encode, reconstruct, posterior_predictive)
        for change, message in (
            (lambda e: (e.guide, e.model, images_for(e)), r"is a guide; call \w+\(model, guide"),
            (lambda e: (e.model, e.guide, images_for(e)[:, 0]), "images must have shape"),
            (lambda e: (e.model, e.guide, images_for(e).tolist()), "images must be .*not a list"),
            (lambda e: (e.model, lambda images: None, images_for(e)), "as_module"),
        )
    ),
    (lambda: encode(small_entry("vae").model, conjugate_images(3)), "call encode", TypeError),
    (lambda: classify(classifier()[0], conjugate_images(3)), r"call classify\(model", TypeError),
    (lambda: sample(small_entry("vae").model, 0), "number must be at least 1"),
    *(
        (lambda name=name: on(name, classify), "linear probe")
        for name in ("vae", "part-whole", "draw")
    ),
    *(
        (lambda name=name, verb=verb: on(name, verb), r"use classify\(model, guide, images\)")
        for name in ("cnn", "matrix-capsules")
        for verb in (reconstruct, posterior_predictive, lambda model, *_: sample(model, 2))
    ),
    # filling in
    *(
        (lambda wrong=wrong: on("vae", fill_in, torch.ones(5, 6) > 0, **wrong), next(iter(wrong)))
        for wrong in ({"num_particles": 0}, {"steps": -1}, {"batch_size": 0})
    ),
    # counterfactuals
    *(
        (lambda action=action: on("part-whole", intervene, action), message)
        for action, message in (
            ({}, "do is empty"),
            ({"object_poses": 0.0}, "sites of PartWholeCapsules are .*'object_pose'"),
            ({"image": 0.0}, "do sets 'image', but the latent sites"),
            ({"object_pose": torch.zeros(5)}, r"shape \(5,\), but the site has .* \(3, 2, 6\)"),
            ({"object_pose": lambda pose: pose[:2]}, r"shape \(2, 2, 6\), but"),
            ({"object_presence": 0.5}, "'object_presence' to values outside of its support"),
            ({"object_pose": torch.nan}, "'object_pose' to values outside of its support"),
        )
    ),
    (
        lambda: carry(torch.tensor(0.4), dist.Gamma(2.0, 1.0), dist.Gamma(3.0, 1.0)),
        "no rule by which",
        NoRule,
    ),
    # classifiers
    (lambda: error_rate(*classifier(), split().images), "has no labels, which are needed here: gi"),
    (lambda: error_rate(*classifier(), Split(split().images)), "labels, which a classifier needs"),
    (
        lambda: error_rate(*classifier(), Split(split().images, torch.arange(4) + 10)),
        "in 0 to 2, but these span 10",
    ),
    (lambda: fgsm(classifier()[0], split(), -0.1), "epsilon must be at least 0"),
    (lambda: fgsm(classifier()[0], DataLoader(split()), 0.1), "must be a Split, not a DataLoader"),
    (lambda: train_classifier(split(), num_classes=1), "lie in 0 to 0, but these span 0 to 1"),
    (lambda: frechet_distance(np.zeros((1, 3)), np.zeros((5, 3))), "N of at least 2"),
    (lambda: frechet_distance(np.zeros((5, 2)), np.zeros((5, 3))), "equally many features"),
    # probes and segmentations
    (lambda: linear_probe(ROWS, LABELS[:2], ROWS, LABELS), "has 3 rows but 2"),
    (lambda: cluster_accuracy(ROWS, LABELS, ROWS, LABELS[1:]), "test has 3 rows but"),
    (lambda: cluster_accuracy(ROWS[:0], LABELS[:0], ROWS, LABELS), "train has no rows"),
    (lambda: segmentation_accuracy(HALVES[:, 1:], HALVES, HERE), "one shape"),
    (lambda: segmentation_accuracy(HALVES, HALVES, ~HERE), "no point"),
    (lambda: segmentation_accuracy(HALVES, HALVES, HERE, [0, 1]), "kinds names 2"),
    # arrays and labels in place of tensors
    *(
        (
            lambda value=value: as_tensor("grid", value),
            rf"grid must be a torch.Tensor, a numpy array or a .*, not {type(value).__name__}",
        )
        for value in ("word", [[1.0], [1.0, 2.0]], [None], object(), {1: 2})
    ),
    *(
        (lambda labels=labels: Split(torch.rand(3, 1, 2, 2), labels), "labels must be")
        for labels in (["a", "b", "c"], [0.5, 1.5, 2.5], [[0, 1, 2]], 3, np.array(["a"] * 3))
    ),
    (lambda: Split([[0.5]]), "images must be a torch.Tensor or a numpy array, not list"),
]


BITS = BernoulliMixture(False), None, torch.ones(1, 1, 2, 2)
PLAIN = r"a plain Pyro program, and \w+ needs one"
OUTSIDE = r"images must lie in \[0, 1\], but these span"
UNREAD = r"images must be .*; call torch\."
OF_PAIRS = [  # of an entry, or of the linear pair: model, guide and images
    ("toys", lambda m, g, x: evaluate(m, NoGuide(m), x), "'code' is missing", IncompatibleGuide),
    ("toys", lambda m, g, x: evaluate(m, m, x), "'image' is observed in th", IncompatibleGuide),
    ("toys", lambda m, g, x: evaluate(m, AutoMultivariateNormal(m), x), "one image at a time"),
    ("toys", lambda m, g, x: evaluate(*outside(), x), "'tilt' lies outside the plate 'images'"),
    ("vae", lambda m, g, x: evaluate(m.half(), g.half(), x), "log weights round in 16 bits; call"),
    ("toys", lambda m, g, x: compare({"a": (m, g), "b": (m, NoGuide(m))}, x), "'code' is missing"),
    ("cnn", lambda m, g, x: compare(classifier_and_vae(m, g), x), "labels .'cnn'.*labels=.*error"),
    ("toys", lambda m, g, x: compare(labeled_and_not(), x, labels=LABELS), "'joint' bounds log"),
    ("cnn", lambda m, g, x: evaluate(m, g, x, labels=LABELS + 9), "build the model with classes="),
    ("cnn", lambda m, g, x: fit_labels(m, g, x, LABELS + 9), "build the model with classes="),
    ("cnn", lambda m, g, x: fit_labels(m, g, x, None), r"has no labels.*PATH/CLASS/PICTURE"),
    ("part-whole", lambda m, g, x: compare(soft_and_hard(m, g), x, discrete=False), "not in 'h"),
    ("vae", lambda m, g, x: mean_images(m, 2, {"image_codes": x}), "'image_codes'; did you mean"),
    ("vae", lambda m, g, x: mean_images(m, 4, {"image_code": "word"}), "image_code.* must be"),
    ("part-whole", lambda m, g, x: reconstruct(m, AutoNormal(m), x), "relaxed presences only"),
    ("vae", lambda m, g, x: m(batch_size=2.5), "batch_size must be a whole number, 1 or more"),
    ("vae", lambda m, g, x: m(x.numpy()), UNREAD),
    ("conditional-autoencoder", lambda m, g, x: m(x, request=BYTES), "request must be a to"),
    ("vae", lambda m, g, x: latents(g, x, ["wing"]), r"holds \['wing'\]"),
    ("vae", lambda m, g, x: encode(plain, g, x), PLAIN),
    ("vae", lambda m, g, x: gauss_newton(plain, g, x), PLAIN),
    ("vae", lambda m, g, x: sample(plain, 2), PLAIN),
    ("vae", lambda m, g, x: sample("vae", 2), "model is a str, which is no capsule_zoo.models.Mod"),
    ("toys", lambda m, g, x: evaluate(m, g, 4 * x - 2), OUTSIDE),
    ("vae", lambda m, g, x: intervene(plain, g, x, {"image_code": 0.0}), PLAIN),
    ("vae", lambda m, g, x: intervene(m, g, x[0], {}), "images must have shape"),
    ("vae", lambda m, g, x: fill_in(m, g, x * math.nan, x[0, 0] > -1), "NaN at observed pixels"),
    ("vae", lambda m, g, x: fill_in(m, AutoNormal(m), x), "must be a Guide, .* not AutoNorma"),
    (
        "part-whole",
        lambda m, g, x: evaluate(m, AutoNormal(m), x),
        "pass discrete=Fal",
        IncompatibleGuide,
    ),
    # guides that are fitted to given images
    (
        "part-whole",
        lambda m, g, x: refine(m, g, x, method="newton"),
        "method must be one of 'sched",
    ),
    ("part-whole", lambda m, g, x: refine(m, g, x, starts=0), "starts must be at least 1"),
    ("vae", lambda m, g, x: refine(m, g, x, starts=2), "starts must be 1 for VariationalAutoencod"),
    ("vae", lambda m, g, x: SemiAmortized(lambda images: None), "must be a Guide, .* not function"),
    ("vae", lambda m, g, x: SemiAmortized(g, kind="widened"), "unknown kind of guide 'widened'"),
    ("vae", lambda m, g, x: SemiAmortized(g, stars=2), "'stars'; did you mean 'starts'"),
    ("toys", lambda m, g, x: widen(m, ExactGuide(m), x), "ExactGuide has no Delta over a continuo"),
    (
        "toys",
        lambda m, g, x: fit_guide("freeform", m, g, x),
        "'freeform'; did you mean 'free_form'",
    ),
    ("toys", lambda m, g, x: fit_guide("mixture", m, g, x, mods=3), "'mods'; did you mean 'modes'"),
    (
        "toys",
        lambda m, g, x: fit_guide("low_rank", *BITS, steps=1),
        "could be correlated",
        UnservedSite,
    ),
    ("toys", lambda m, g, x: gauss_newton(*BITS, steps=0), "has no continuous site", UnservedSite),
    ("toys", lambda m, g, x: GaussNewton(g, {}), "points must be a FreeForm guide, not Linear"),
    (
        "capsule-rbm",
        lambda m, g, x: gauss_newton(m, None, x),
        "CapsuleRBM gives its images no mean",
    ),
    (
        "part-whole",
        lambda m, g, x: gauss_newton(m.with_selection("enumerate"), None, x, steps=0),
        "sums out .*_parent.* by enumeration",
        UnservedSite,
    ),
    (
        "capsule-helmholtz",
        lambda m, g, x: fit_guide("auto_normal", m, g, x, steps=1),
        "capsule1_switch, capsule1_hidden.*free_form",
        UnservedSite,
    ),
]


@pytest.mark.parametrize("refusal", OF_PAIRS, ids=lambda refusal: refusal[2])
def test_what_does_not_fit_a_pair_is_refused(refusal):
    name, call, message, *error = refusal
    verb = on_toys if name == "toys" else partial(on, name)
    check_refused(lambda: verb(call), message, *error)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal[1])
def test_what_does_not_fit_is_refused(refusal):
    check_refused(*refusal)


LOADER = DataLoader(TensorDataset(torch.rand(5, 1, 2, 2), torch.arange(5)), 3, shuffle=True)
DATA = [
    (None, "not None"),
    ("digits", r"not a str; see load_dataset\(name\)"),
    ([], "not a list"),
    ([torch.rand(1, 2, 2)] * 3, "not a list; .*numpy.stack for a list of images"),
    ([[0.5, 0.5]], "not a list"),
    (0.5, "not a float"),
    (DataLoader([], batch_size=2), "without a batch; give at least one image"),
    (DataLoader(torch.rand(3, 1, 3, 3), batch_size=2), r"images must be \(B, 1, 2, 2\)"),
    (Flow(), "wrap it in a torch.utils.data.DataLoader"),
]


@pytest.mark.parametrize(("data", "message"), DATA, ids=[message for _, message in DATA])
@pytest.mark.parametrize("verb", [evaluate, encode, reconstruct, refine])
def test_other_data_are_refused_in_one_line(verb, data, message):
    check_refused(lambda: verb(*pair(), data), message)


@pytest.mark.parametrize("verb", [encode, reconstruct, posterior_predictive, refine, infer])
def test_a_loader_that_shuffles_is_refused_where_rows_are_those_of_images(verb):
    call = verb if verb is not infer else lambda model, *others: infer(*others)
    check_refused(lambda: call(*pair(), LOADER), r"shuffles.*give DataLoader\(..., shuffle=False\)")
