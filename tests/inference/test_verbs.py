"""The verbs return the same kind of result for every model, and leave all else unchanged."""

import itertools
import pickle

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoNormal
from small_entries import images_for, small_entry
from torch.testing import assert_close
from variants import create, list_models, small_settings, takes_images

from capsule_zoo.data import Split
from capsule_zoo.guides import ExactSwitches, FreeForm
from capsule_zoo.inference import (
    classify,
    encode,
    error_rate,
    posterior_predictive,
    reconstruct,
    sample,
)
from capsule_zoo.inference.evaluation.ancestral import infer
from capsule_zoo.inference.probes import latents
from capsule_zoo.models import CapsuleRBM
from capsule_zoo.registry import Entry

NAMES = [name for name in list_models() if takes_images(name)]
PAIRS = [(name, guide) for name in NAMES for guide in create(name, **small_settings(name)).guides]
MODELS = {name: create(name, **small_settings(name)).model for name in NAMES}
CLASSIFIERS = {name for name, model in MODELS.items() if model.supervised}
PAINTERS = [pair for pair in PAIRS if pair[0] not in CLASSIFIERS]
BATCH = 3


def verbs_of(entry: Entry, images: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Return the results of every verb that the entry's model has, by name."""
    pair = entry.model, entry.guide
    results = {f"encode {k}": v for k, v in encode(*pair, images, num_samples=2, seed=seed).items()}
    if entry.name in CLASSIFIERS:
        return results | {"classify": classify(*pair, images)}
    drawn = {
        "reconstruct": reconstruct(*pair, images, num_samples=2, seed=seed),
        "posterior_predictive": posterior_predictive(*pair, images, 4, seed=seed),
        "sample": sample(entry.model, 2, seed=seed),
    }
    return results | drawn


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_what_is_drawn_and_nothing_else_is_touched(name):
    entry = small_entry(name)
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
    entry = small_entry(name, guide)
    images, number = images_for(entry, 1), 250
    draws = posterior_predictive(entry.model, entry.guide, images, number, seed=1)
    mean = reconstruct(entry.model, entry.guide, images, num_samples=number, seed=2)
    error = draws.std(0) * (2 / number) ** 0.5 + 0.004
    assert ((draws.mean(0) - mean).abs() / error).max() < 5


def test_pyros_own_words_predict_the_same():
    entry = small_entry("vae")
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
    entry = small_entry("part-whole")
    images = images_for(entry)
    sites = ["part_presence", "part_pose"]
    codes = encode(entry.model, entry.guide, images)
    rows = torch.cat([codes[site].flatten(1) for site in sites], dim=1).numpy()
    discrete = entry.guide.discretize()
    np.testing.assert_array_equal(rows, latents(discrete, images, sites))
    assert codes["part_presence"].min() > 0 and codes["part_presence"].max() < 1


def test_a_kind_is_encoded_as_the_probabilities_of_its_values():
    entry = small_entry("generative-capsnet", "variational")
    kind = encode(entry.model, entry.guide, images_for(entry))["object_kind"]
    assert_close(kind.sum(-1), torch.ones(BATCH))
    assert (kind > 0).all() and (kind < 1).all()
    drawn = encode(entry.model, entry.guide, images_for(entry), num_samples=3)["object_kind"]
    assert_close(drawn, kind)


def test_a_guide_of_one_batch_gets_all_its_images_in_every_pass():
    entry = small_entry("part-whole")
    images = images_for(entry, 5)
    free = FreeForm(entry.model, images, init=entry.guide)
    codes = encode(entry.model, free, images, num_samples=2, batch_size=2)
    assert codes["part_pose"].shape[0] == 5
    assert infer(free, images, batch_size=2)["part_pose"].shape[0] == 5
    assert latents(free, images, ["part_pose"], batch_size=2).shape[0] == 5
    drawn = posterior_predictive(entry.model, free, images, 3, batch_size=2)
    assert drawn.shape == (3, 5, *entry.model.image_shape)


def test_pyros_autoguides_fit_where_nothing_is_relaxed():
    entry = small_entry("vae")
    images = images_for(entry)
    guide = AutoNormal(entry.model)
    guide(images)
    codes = encode(entry.model, guide, images, num_samples=100)["image_code"]
    assert_close(codes, guide.locs.image_code.detach(), atol=0.06, rtol=0)
    twin = pickle.loads(pickle.dumps(guide))  # in which Pyro forgets the model
    assert_close(encode(entry.model, twin, images, num_samples=100)["image_code"], codes)


def test_models_that_tell_classes_classify():
    entry = small_entry("recurrent-capsules")
    images = images_for(entry, 6)
    with torch.no_grad():
        expected = entry.model.eval().classify(images).argmax(1)
    assert torch.equal(classify(entry.model, entry.guide, images, batch_size=4), expected)


@pytest.mark.parametrize("name", sorted(CLASSIFIERS))
def test_the_class_is_the_likeliest_label(name):
    answers = verbs_of((entry := small_entry(name)), images_for(entry), 0)
    assert_close(answers["classify"], answers["encode label"].argmax(-1))


@pytest.mark.parametrize("name", ["capsule-network", "capsule-network:overlapping"])
def test_a_guide_that_infers_classes_tells_them(name):
    entry = small_entry(name)
    images = images_for(entry, 6)
    labels = entry.guide.eval().predict(images)
    assert torch.equal(classify(entry.model, entry.guide, images, batch_size=4), labels)
    split = Split(images, (labels + torch.tensor([0, 0, 1, 0, 1, 0])) % entry.model.num_classes)
    assert error_rate(entry.model, entry.guide, split).value == pytest.approx(2 / 6)


def test_whole_numbers_are_encoded_in_the_precision_of_the_pair():
    entry = small_entry("constellations")
    points = entry.model(batch_size=3)
    for dtype in (torch.float32, torch.float64):
        pair = entry.model.to(dtype), entry.guide.to(dtype)
        codes = encode(*pair, points, num_samples=2)
        assert {value.dtype for value in codes.values()} == {dtype}


def test_a_batch_of_one_image_keeps_its_dim_where_sites_are_summed_out():
    """Pyro's `infer_discrete` drops the dims of size 1 of what it draws."""
    entry = small_entry("scenes").with_enumerated_presences
    images = images_for(entry)[:3]
    assert reconstruct(entry.model, entry.guide, images, batch_size=2).shape == images.shape
    drawn = posterior_predictive(entry.model, entry.guide, images[:1], 2)
    assert drawn.shape == (2, *images[:1].shape)


def test_what_a_guide_infers_carries_no_gradients():
    """A feature of an absent object is a parameter of the guide itself."""
    entry = small_entry("stacked-capsule-autoencoder", "em")
    images = images_for(entry)
    results = [infer(entry.guide, images), encode(entry.model, entry.guide, images)]
    assert not any(value.requires_grad for values in results for value in values.values())
    assert latents(entry.guide, images, ["object_feature"]).shape[0] == len(images)
