"""The verbs return the same kind of result for every model, and leave all else unchanged."""

import itertools
import pickle
from dataclasses import replace

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch.testing import assert_close
from variants import create, list_models, small_settings, takes_images

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.guides import ExactSwitches, FreeForm
from capsule_zoo.inference import (
    ImportanceWeightedELBO,
    ReweightedWakeSleep,
    classify,
    encode,
    error_rate,
    fgsm,
    fill_in,
    intervene,
    posterior_predictive,
    reconstruct,
    sample,
)
from capsule_zoo.inference.calibration import check_calibration
from capsule_zoo.inference.evaluation.ancestral import infer, mean_images
from capsule_zoo.inference.evaluation.vote_history import vote_history
from capsule_zoo.inference.objectives.score_function import ScoreFunctionELBO
from capsule_zoo.inference.objects import boxes, count, segment
from capsule_zoo.inference.posterior.gauss_newton import gauss_newton
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.inference.posterior.widen import widen
from capsule_zoo.inference.probes import latents
from capsule_zoo.models import CapsuleRBM
from capsule_zoo.registry import Entry

NAMES = [name for name in list_models() if takes_images(name)]
PAIRS = [(name, guide) for name in NAMES for guide in create(name, **small_settings(name)).guides]
MODELS = {name: create(name, **small_settings(name)).model for name in NAMES}
CLASSIFIERS = {name for name, model in MODELS.items() if model.supervised}
TELLS = {
    name: next((part for part in (entry.model, entry.guide) if hasattr(part, "predict")), None)
    for name, entry in ((name, create(name, **small_settings(name))) for name in NAMES)
}
TELLS_NO_CLASSES = [*(name for name, part in TELLS.items() if part is None), "draw"]
PAINTERS = [pair for pair in PAIRS if pair[0] not in CLASSIFIERS]
BATCH = 3


def make(name: str, guide: str | None = None) -> Entry:
    pyro.set_rng_seed(0)
    entry = create(name, **small_settings(name))
    return entry.use_guide(guide or entry.default_guide)


def images_for(entry: Entry, number: int = BATCH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(number, *entry.model.image_shape, generator=generator)


def verbs_of(entry: Entry, images: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Return the results of every verb that the entry's model has, by name."""
    pair = entry.model, entry.guide
    found = {f"encode {k}": v for k, v in encode(*pair, images, num_samples=2, seed=seed).items()}
    if entry.name in CLASSIFIERS:
        return found | {"classify": classify(*pair, images)}
    drawn = {
        "reconstruct": reconstruct(*pair, images, num_samples=2, seed=seed),
        "posterior_predictive": posterior_predictive(*pair, images, 4, seed=seed),
        "sample": sample(entry.model, 2, seed=seed),
    }
    return found | drawn


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_shapes_are_those_of_the_images_and_of_one_draw(name, guide):
    entry = make(name, guide)
    images = images_for(entry)
    found = verbs_of(entry, images, 0)
    shape = entry.model.image_shape
    drawn = infer(entry.guide, images)
    for site in entry.guide.covers:
        whole = not drawn[site].is_floating_point()  # the number of a class: a probability each
        number = getattr(entry.model, "kinds" if site == "object_kind" else "num_classes", 0)
        classes = (number,) if whole else ()
        assert found[f"encode {site}"].shape == (*drawn[site].shape, *classes)
    if name in CLASSIFIERS:
        assert_close(found["classify"], found["encode label"].argmax(-1))
        return
    assert found["reconstruct"].shape == (BATCH, *shape)
    assert found["posterior_predictive"].shape == (4, BATCH, *shape)
    assert found["sample"].shape == (2, *shape)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_what_is_drawn_and_nothing_else_is_touched(name):
    entry = make(name)
    images = images_for(entry)
    for part in (entry.model, entry.guide):
        part.train()
        next(iter(part.children()), part).eval()  # modes may differ from part to part
    before = [part.training for module in (entry.model, entry.guide) for part in module.modules()]
    weights = {k: v.clone() for k, v in entry.guide.state_dict().items()}
    state = torch.get_rng_state()
    first = verbs_of(entry, images, 5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    again, other = verbs_of(entry, images, 5), verbs_of(entry, images, 6)
    assert all(torch.equal(first[verb], again[verb]) for verb in first)
    if name not in CLASSIFIERS:
        assert not torch.equal(first["sample"], other["sample"])
        assert not torch.equal(first["posterior_predictive"], other["posterior_predictive"])
    after = [part.training for module in (entry.model, entry.guide) for part in module.modules()]
    assert after == before
    assert all(torch.equal(v, weights[k]) for k, v in entry.guide.state_dict().items())
    assert not any(value.requires_grad for value in first.values())
    assert len(pyro.get_param_store()) == 0


@pytest.mark.parametrize(("name", "guide"), PAINTERS)
def test_what_is_predicted_is_on_average_what_is_reconstructed(name, guide):
    """E[image' | image] is the mean of E[image' | latents] over the guide's draws."""
    entry = make(name, guide)
    images, number = images_for(entry, 1), 250
    draws = posterior_predictive(entry.model, entry.guide, images, number, seed=1)
    mean = reconstruct(entry.model, entry.guide, images, num_samples=number, seed=2)
    error = draws.std(0) * (2 / number) ** 0.5 + 0.004
    assert ((draws.mean(0) - mean).abs() / error).max() < 5


def test_pyros_own_words_predict_the_same():
    entry = make("vae")
    images, count = images_for(entry, 2), 1500
    unobserved = poutine.uncondition(entry.model)
    pyro.set_rng_seed(3)
    predictive = Predictive(unobserved, guide=entry.guide, num_samples=count, parallel=True)
    theirs = predictive(images)["image"]
    theirs = theirs.view(count, *images.shape).detach()
    ours = posterior_predictive(entry.model, entry.guide, images, count, seed=4)
    error = (ours.var(0) / count + theirs.var(0) / count).sqrt() + 1e-4
    assert ((ours.mean(0) - theirs.mean(0)).abs() / error).max() < 5
    assert_close(ours.std(0), theirs.std(0), atol=0.02, rtol=0.15)


def exact_posterior(model: CapsuleRBM, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return posterior means by brute force: the energy of every state of switches and units."""
    capsules, units = model.num_capsules, model.num_units
    states = torch.tensor(list(itertools.product([0.0, 1.0], repeat=capsules * (1 + units))))
    z, h = states[:, :capsules], states[:, capsules:].view(-1, capsules, units)
    x = images.flatten(1)
    energy = (model.hidden.bias * h).sum((1, 2)) + z @ model.switch_bias
    coupled = torch.einsum("bp,pkj,skj,sk->bs", x, model.weight, h, z)
    energy = energy + coupled + x @ model.switch_weight @ z.T
    weight = energy.softmax(-1)  # (B, states)
    hidden = torch.einsum("bs,skj->bkj", weight, h)
    return {"capsule_switch": weight @ z, "capsule_hidden": hidden}


def test_the_encoding_of_an_exact_guide_is_the_exact_posterior_mean():
    pyro.set_rng_seed(0)
    model = CapsuleRBM((1, 3, 3), capsules=2, units=2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    images, guide = (torch.rand(3, 1, 3, 3) > 0.5).float(), ExactSwitches(model)
    with torch.no_grad():
        exact = exact_posterior(model, images)
    once = encode(model, guide, images)
    assert_close(once["capsule_switch"], exact["capsule_switch"], atol=1e-5, rtol=0)
    averaged = encode(model, guide, images, num_samples=8000, batch_size=6000)
    assert_close(averaged["capsule_hidden"], exact["capsule_hidden"], atol=0.02, rtol=0)
    assert (once["capsule_hidden"] - exact["capsule_hidden"]).abs().max() > 0.05


def test_one_draw_encodes_what_the_probe_reads():
    entry = make("part-whole")
    images = images_for(entry)
    sites = ["part_presence", "part_pose"]
    found = encode(entry.model, entry.guide, images)
    rows = torch.cat([found[site].flatten(1) for site in sites], dim=1).numpy()
    discrete = entry.guide.discretized()
    np.testing.assert_array_equal(rows, latents(discrete, images, sites))
    assert found["part_presence"].min() > 0 and found["part_presence"].max() < 1


def test_a_kind_is_encoded_as_the_probabilities_of_its_values():
    entry = make("generative-capsnet", "variational")
    kind = encode(entry.model, entry.guide, images_for(entry))["object_kind"]
    assert_close(kind.sum(-1), torch.ones(BATCH))
    assert (kind > 0).all() and (kind < 1).all()
    drawn = encode(entry.model, entry.guide, images_for(entry), num_samples=3)["object_kind"]
    assert_close(drawn, kind)


def test_a_reconstruction_is_the_mean_image_of_one_draw():
    entry = make("part-whole", "normal")
    images = images_for(entry)
    drawn = infer(entry.guide, images, seed=3)
    expected = mean_images(entry.model, BATCH, drawn, images=images)
    assert torch.equal(reconstruct(entry.model, entry.guide, images, seed=3), expected)


def test_batches_and_splits_change_nothing():
    digits = load_dataset("digits", size=(12, 12)).test[:7]
    entry = make("vae")
    entry = create("vae", image_shape=(1, 12, 12), latent=2, channels=4, guide=dict(hidden=6))
    whole = encode(entry.model, entry.guide, digits)["image_code"]
    parts = encode(entry.model, entry.guide, digits.images.numpy(), batch_size=2)["image_code"]
    assert_close(whole, parts)


def test_a_guide_of_one_batch_gets_all_its_images_in_every_pass():
    entry = make("part-whole")
    images = images_for(entry, 5)
    free = FreeForm(entry.model, images, init=entry.guide)
    found = encode(entry.model, free, images, num_samples=2, batch_size=2)
    assert found["part_pose"].shape[0] == 5
    assert infer(free, images, batch_size=2)["part_pose"].shape[0] == 5
    assert latents(free, images, ["part_pose"], batch_size=2).shape[0] == 5
    drawn = posterior_predictive(entry.model, free, images, 3, batch_size=2)
    assert drawn.shape == (3, 5, *entry.model.image_shape)


def test_pyros_autoguides_fit_where_nothing_is_relaxed():
    entry = make("vae")
    images = images_for(entry)
    guide = AutoNormal(entry.model)
    guide(images)
    found = encode(entry.model, guide, images, num_samples=100)["image_code"]
    assert_close(found, guide.locs.image_code.detach(), atol=0.06, rtol=0)
    twin = pickle.loads(pickle.dumps(guide))  # in which Pyro forgets the model
    assert_close(encode(entry.model, twin, images, num_samples=100)["image_code"], found)
    entry = make("part-whole")
    images = images_for(entry)
    guide = AutoNormal(entry.model)
    guide(images)
    with pytest.raises(ValueError, match=r"AutoNormal .* relaxed presences only .* use a guide of"):
        reconstruct(entry.model, guide, images)


def test_models_that_tell_classes_classify():
    entry = make("recurrent-capsules")
    images = images_for(entry, 6)
    with torch.no_grad():
        expected = entry.model.eval().classify(images).argmax(1)
    assert torch.equal(classify(entry.model, entry.guide, images, batch_size=4), expected)


@pytest.mark.parametrize("name", ["capsule-network", "capsule-network:overlapping"])
def test_a_guide_that_infers_classes_tells_them(name):
    entry = make(name)
    images = images_for(entry, 6)
    labels = entry.guide.eval().predict(images)
    assert torch.equal(classify(entry.model, entry.guide, images, batch_size=4), labels)
    split = Split(images, (labels + torch.tensor([0, 0, 1, 0, 1, 0])) % entry.model.num_classes)
    assert error_rate(entry.model, entry.guide, split).value == pytest.approx(2 / 6)


def test_a_verb_without_its_guide_says_how_it_is_called():
    """`classify` and `error_rate` once took only that of the two which predicts."""
    entry = make("cnn")
    images = images_for(entry)
    with pytest.raises(TypeError, match=r"call classify\(model, guide, images\)"):
        classify(entry.model, images)
    with pytest.raises(TypeError, match=r"call error_rate\(model, guide, split\)"):
        error_rate(entry.guide, Split(images, torch.zeros(BATCH).long()))
    with pytest.raises(TypeError, match=r"call encode\(model, guide, images\)"):
        encode(entry.model, images)


def test_a_model_that_names_no_sites_is_refused_by_what_reads_them():
    entry = make("vae")
    images, guide = images_for(entry), entry.guide

    class Plain(PyroModule):
        def forward(self, images=None, labels=None, batch_size=1):
            return entry.model(images, labels, batch_size)

    for model in (Plain(), lambda images=None, labels=None: entry.model(images)):
        for use in (
            lambda model: encode(model, guide, images),
            lambda model: reconstruct(model, guide, images),
            lambda model: sample(model, 2),
            lambda model: mean_images(model, 2),
            lambda model: refine(model, guide, images),
            lambda model: gauss_newton(model, guide, images),
            lambda model: intervene(model, guide, images, {"image_code": 0.0}),
            lambda model: fill_in(model, guide, images),
        ):
            with pytest.raises(ValueError, match=r"a plain Pyro program, and \w+ needs one"):
                use(model)


@pytest.mark.parametrize("name", TELLS_NO_CLASSES)
def test_models_that_tell_no_classes_name_the_linear_probe(name):
    entry = make(name)
    with pytest.raises(ValueError, match="linear probe"):
        classify(entry.model, entry.guide, images_for(entry))


@pytest.mark.parametrize("name", sorted(CLASSIFIERS))
def test_models_of_labels_paint_nothing(name):
    entry = make(name)
    images = images_for(entry)
    calls = [
        lambda: reconstruct(entry.model, entry.guide, images),
        lambda: posterior_predictive(entry.model, entry.guide, images),
        lambda: sample(entry.model, 2),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"use classify\(model, guide, images\)"):
            call()


def test_what_is_wrong_is_named():
    entry = make("vae")
    pair, images = (entry.model, entry.guide), images_for(entry)
    for verb in (encode, reconstruct, posterior_predictive):
        with pytest.raises(ValueError, match="num_samples"):
            verb(*pair, images, num_samples=0)
        with pytest.raises(ValueError, match="seed"):
            verb(*pair, images, num_samples=1, seed=-1)
        for wrong in ({"num_samples": 1.5}, {"seed": 1.5}, {"seed": 2**64}, {"batch_size": 2.5}):
            with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a whole number"):
                verb(*pair, images, **wrong)
        with pytest.raises(ValueError, match=rf"is a guide; call {verb.__name__}\(model, guide"):
            verb(*reversed(pair), images)
        with pytest.raises(ValueError, match="images"):
            verb(*pair, images[:, 0])
        with pytest.raises(ValueError, match=r"images must be .*not a list"):
            verb(*pair, images.tolist())
        with pytest.raises(ValueError, match="as_module"):
            verb(entry.model, lambda images: None, images)
    for draw in (sample, mean_images):
        with pytest.raises(ValueError, match="number"):
            draw(entry.model, 0)
    with pytest.raises(ValueError, match="batch_size"):
        infer(entry.guide, images, batch_size=0)
    with pytest.raises(ValueError, match=r"guide must be a Guide, .* not AutoNormal"):
        fill_in(entry.model, AutoNormal(entry.model), images)
    for objective in (ImportanceWeightedELBO, ReweightedWakeSleep, ScoreFunctionELBO):
        with pytest.raises(ValueError, match="num_particles must be a whole number"):
            objective(2.5)
    with pytest.raises(ValueError, match="draws must be a whole number"):
        check_calibration(*pair, 100, draws=3.5)
    with pytest.raises(ValueError, match=r"steps must be a whole number, 0 or more, not 2\.5"):
        refine(*pair, images, steps=2.5)
    with pytest.raises(ValueError, match=r"batch_size must be a whole number, 1 or more, not 2\.5"):
        entry.model(batch_size=2.5)
    with pytest.raises(ValueError, match="images"):
        classify(make("cnn").model, make("cnn").guide, images)


def test_whole_numbers_are_encoded_in_the_precision_of_the_pair():
    entry = make("constellations")
    points = entry.model(batch_size=3)
    for dtype in (torch.float32, torch.float64):
        pair = entry.model.to(dtype), entry.guide.to(dtype)
        found = encode(*pair, points, num_samples=2)
        assert {value.dtype for value in found.values()} == {dtype}


@pytest.mark.parametrize("kind", ["reversed", "big-endian", "double", "split"])
def test_every_function_of_images_takes_them_in_every_form(kind):
    def form(images: torch.Tensor) -> object:
        if kind == "split":
            return Split(images)
        if kind == "double":
            return images.double()
        mirrored = images.numpy()[::-1].copy()[::-1]
        return mirrored if kind == "reversed" else images.numpy().astype(">f4")

    def equal(of, images: torch.Tensor) -> None:
        one, other = of(images), of(form(images))
        pairs = zip(one, other, strict=True) if isinstance(one, list) else [(one, other)]
        for a, b in pairs:
            assert_close(torch.as_tensor(a), torch.as_tensor(b))

    vae = make("vae")
    pair, images, (site,) = (vae.model, vae.guide), images_for(vae), vae.guide.covers
    equal(lambda x: encode(*pair, x)[site], images)
    equal(lambda x: infer(vae.guide, x)[site], images)
    equal(lambda x: latents(vae.guide, x, [site]), images)
    equal(lambda x: refine(*pair, x, steps=1).refinement.end, images)
    equal(lambda x: fill_in(*pair, x, num_particles=2).images, images)
    points = make("part-whole", "delta")
    wide = [
        widen(points.model, points.guide, f(images_for(points)), steps=1)
        for f in (form, lambda x: x)
    ]
    states = [guide.state_dict() for guide in wide]
    assert all(value.equal(states[1][name]) for name, value in states[0].items())
    scenes = make("scenes")
    for verb in (count, boxes, segment):
        equal(lambda x, verb=verb: verb(scenes.model, scenes.guide, x), images_for(scenes))
    matrix = make("matrix-capsules")
    equal(lambda x: vote_history(matrix.model, x).distance, images_for(matrix))
    if kind in ("double", "split"):  # an attack needs labels
        split = Split(images_for(matrix), torch.arange(BATCH) % 2)
        given = replace(split, images=split.images.double()) if kind == "double" else split
        assert_close(fgsm(matrix.model, given, 0.1).images, fgsm(matrix.model, split, 0.1).images)


def test_a_batch_of_one_image_keeps_its_dim_where_sites_are_summed_out():
    """Pyro's `infer_discrete` drops the dims of size 1 of what it draws."""
    entry = make("scenes").summed
    images = images_for(entry)[:3]
    assert reconstruct(entry.model, entry.guide, images, batch_size=2).shape == images.shape
    drawn = posterior_predictive(entry.model, entry.guide, images[:1], 2)
    assert drawn.shape == (2, *images[:1].shape)


def test_what_a_guide_infers_carries_no_gradients():
    """A feature of an absent object is a parameter of the guide itself."""
    entry = make("stacked-capsule-autoencoder", "em")
    images = images_for(entry)
    found = [infer(entry.guide, images), encode(entry.model, entry.guide, images)]
    assert not any(value.requires_grad for values in found for value in values.values())
    assert latents(entry.guide, images, ["object_feature"]).shape[0] == len(images)
