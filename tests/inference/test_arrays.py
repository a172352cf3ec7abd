"""Arguments given as arrays, lists or numbers in place of tensors: taken, or refused in a line."""

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from small_entries import check_refused, images_for, small_entry
from torch.testing import assert_close
from variants import list_models

from capsule_zoo.data import Binarize, Rotations, Shifts, Split, Standardize, hide
from capsule_zoo.data.transforms import motion, shift_pixels, warp_images
from capsule_zoo.guides import FreeForm, KnownLatents
from capsule_zoo.inference import (
    ImportanceWeightedELBO,
    check_pair,
    classify,
    encode,
    error_rate,
    evaluate,
    fill_in,
    infer,
    intervene,
    log_partition,
    loss_per_image,
    mean_images,
    reconstruct,
)
from capsule_zoo.inference.calibration import rank_uniformity, sbc_ranks
from capsule_zoo.inference.evaluation.ancestral import image_log_likelihood
from capsule_zoo.inference.objects import boxes, count, segment
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.inference.posterior.widen import widen
from capsule_zoo.inference.probes import latents
from capsule_zoo.inference.references import load_reference
from capsule_zoo.inference.segmentation import segmentation_accuracy


def make(name):
    entry = small_entry(name)
    return entry, images_for(entry, 4)


def pair_of(name):
    entry, images = make(name)
    return (entry.model, entry.guide), images


LABELS = {
    r"not ndarray; call torch.from_numpy\(labels\)": np.arange(4) % 2,
    r"not list; call torch.tensor\(labels\)": [0, 1, 0, 1],
    r"not int; call torch.tensor\(labels\)": 1,
}


@pytest.mark.parametrize("name", list_models())
@pytest.mark.parametrize("message", LABELS)
def test_labels_that_are_no_tensor_are_refused_with_a_remedy(name, message):
    """Pyro's own training hands them on as they are; `labels.repeat` of numpy repeats otherwise."""
    (entry, images), labels = make(name), LABELS[message]
    calls = [lambda: entry.model(images, labels), lambda: entry.guide(images, labels=labels)]
    for call in calls:
        check_refused(call, rf"^labels must be a tensor of integers \(B,\), {message}$")
    for loss in [Trace_ELBO(), ImportanceWeightedELBO(2)] if entry.model.normalized else []:
        svi = SVI(entry.model, entry.guide, pyro.optim.Adam({"lr": 1e-3}), loss)
        with pytest.raises(ValueError, match="labels must be a tensor of integers"):
            svi.step(images, labels)


def as_list(values: torch.Tensor):
    return values.tolist()


def as_array(values: torch.Tensor):
    return values.double().numpy() if values.is_floating_point() else values.numpy()


def sites_of(name="vae"):
    pair, images = pair_of(name)
    return pair, images, infer(pair[1], images)


def of_a_vae(call):
    """Return a function that calls with the pair, images, latents, and what changes them."""

    def called(change):
        pair, images, latents = sites_of()
        return call(pair, images, latents, lambda x: {k: change(v) for k, v in x.items()}, change)

    return called


RANKS = torch.arange(200)[:, None] % 8
PARTS = torch.tensor([[0, 0, 1, 1], [1, 0, 1, 0]])
CALLS = {
    "mean_images": of_a_vae(lambda p, x, z, dicts, one: mean_images(p[0], 4, dicts(z))),
    "image_log_likelihood": of_a_vae(
        lambda p, x, z, dicts, one: image_log_likelihood(p[0], one(x), dicts(z))
    ),
    "intervene": of_a_vae(
        lambda p, x, z, dicts, one: intervene(*p, x, {k: one(v) for k, v in z.items()}).images
    ),
    "KnownLatents": of_a_vae(
        lambda p, x, z, dicts, one: KnownLatents(p[0], dicts(z)).values["image_code"]
    ),
    "FreeForm": of_a_vae(lambda p, x, z, dicts, one: FreeForm(p[0], one(x), p[1])(x)["image_code"]),
    "check_pair": of_a_vae(lambda p, x, z, dicts, one: check_pair(*p, one(x), one(PARTS[0]))),
    "loss_per_image": of_a_vae(
        lambda p, x, z, dicts, one: loss_per_image(ImportanceWeightedELBO(2), *p, one(x))
    ),
    "fill_in": of_a_vae(
        lambda p, x, z, dicts, one: fill_in(*p, x, one(x > 0.3), fill=one(x[0])).images
    ),
    "evaluate": lambda change: torch.from_numpy(
        evaluate(*pair_of("cnn")[0], pair_of("cnn")[1], labels=change(torch.arange(4) % 2))
        .sample_stats["log_weight"]
        .values
    ),
    "error_rate": lambda change: torch.tensor(
        error_rate(*pair_of("cnn")[0], Split(pair_of("cnn")[1], change(torch.arange(4) % 2))).value
    ),
    "log_partition": lambda change: torch.tensor(
        log_partition(
            pair_of("rbm")[0][0], "ais", images=change(pair_of("rbm")[1]), temperatures=5
        )[0]
    ),
    "reference": lambda change: load_reference("constellation").log_prob(
        change(load_reference("constellation").draws[:3])
    ),
    "score": lambda change: torch.tensor(
        load_reference("constellation")
        .score(change(load_reference("constellation").draws))
        .mean_error
    ),
    "rank_uniformity": lambda change: torch.tensor(rank_uniformity(change(RANKS), 7)[0]),
    "sbc_ranks": lambda change: sbc_ranks(change(torch.ones(2, 3)), change(torch.zeros(5, 2, 3))),
    "segmentation": lambda change: segmentation_accuracy(
        change(PARTS), change(PARTS.flip(0)), change(PARTS >= 0)
    ),
    "hide": lambda change: hide(change(torch.ones(2, 1, 2, 2)), change(torch.eye(2) > 0)).nansum(),
    "motion": lambda change: motion(change(torch.tensor([10.0, 20.0])), shear=0.1),
    "warp_images": lambda change: warp_images(
        change(torch.eye(4)[None, None]), change(motion(30.0))
    ),
    "shift_pixels": lambda change: shift_pixels(
        change(torch.eye(4)[None, None]), change(torch.tensor([1])), change(torch.tensor([2]))
    ),
    "binarize": lambda change: Binarize()(
        change(torch.full((1, 1, 4, 4), 0.5)), generator=torch.Generator().manual_seed(0)
    ),
    "standardize": lambda change: Standardize.of(change(torch.eye(4)))(change(torch.eye(4))),
    "rotations": lambda change: Rotations().move(
        change(torch.eye(4)[None, None]), change(torch.tensor([[30.0]]))
    ),
    "shifts": lambda change: Shifts().numbers(change(torch.tensor([[2.0, 3.0]]))),
}


@pytest.mark.parametrize("change", [as_array, as_list])
@pytest.mark.parametrize("name", CALLS)
def test_public_functions_take_arrays_and_lists(name, change):
    torch.manual_seed(0)
    expected = CALLS[name](lambda tensor: tensor)
    torch.manual_seed(0)
    result = CALLS[name](change)
    if expected is not None:
        assert_close(result, expected, check_dtype=False, rtol=1e-4, atol=1e-5)


FORMS = {
    "double": lambda images: images.double().numpy(),
    "reversed": lambda images: images.numpy()[::-1].copy()[::-1],
    "big-endian": lambda images: images.numpy().astype(">f4"),
    "split": Split,
}
OF_IMAGES = {
    "encode": ("vae", lambda m, g, x: encode(m, g, x)["image_code"]),
    "reconstruct": ("vae", reconstruct),
    "infer": ("vae", lambda m, g, x: infer(g, x)["image_code"]),
    "latents": ("vae", lambda m, g, x: latents(g, x, ["image_code"])),
    "refine": ("vae", lambda m, g, x: refine(m, g, x, steps=1).refinement.end),
    "fill_in": ("vae", lambda m, g, x: fill_in(m, g, x, num_particles=2).images),
    "widen": ("part-whole", lambda m, g, x: widen(m, g, x, steps=1).scale("part_pose")),
    "classify": ("cnn", classify),
    "count": ("scenes", count),
    "segment": ("scenes", segment),
    "boxes": ("scenes", lambda m, g, x: torch.cat([torch.as_tensor(b) for b in boxes(m, g, x)])),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verb", OF_IMAGES)
def test_every_function_of_images_takes_them_in_every_form(verb, form):
    name, call = OF_IMAGES[verb]
    entry, images = make(name)
    expected, result = (call(entry.model, entry.guide, x) for x in (images, FORMS[form](images)))
    assert_close(torch.as_tensor(result).detach(), torch.as_tensor(expected).detach())


def test_a_split_takes_arrays_and_lists():
    images, labels = torch.rand(3, 1, 2, 2), torch.tensor([2, 0, 1])
    for value in ((images.numpy(), labels.numpy()), (images, labels.tolist())):
        split = Split(*value)
        assert torch.equal(split.images, images) and torch.equal(split.labels, labels)
        assert split.labels.dtype == torch.int64
