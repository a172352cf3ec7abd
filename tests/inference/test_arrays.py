"""Arguments given as arrays, lists or numbers in place of tensors: taken, or refused in a line."""

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch.testing import assert_close
from variants import create, list_models, small_settings

from capsule_zoo.data import Binarize, Requests, Rotations, Shifts, Split, Standardize, hide
from capsule_zoo.data.tensors import as_tensor
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
from capsule_zoo.inference.evaluation.ancestral import image_log_likelihood, log_prior
from capsule_zoo.inference.references import load_reference
from capsule_zoo.inference.segmentation import segmentation_accuracy
from capsule_zoo.inference.top_prior import fit_top_prior
from capsule_zoo.inference.transformations import infer_transformation

NAMES = list_models()


def make(name):
    pyro.set_rng_seed(0)
    entry = create(name, **small_settings(name))
    images = entry.model.space.example(4, torch.float32, torch.Generator().manual_seed(1))
    return entry, images


def pair_of(name):
    entry, images = make(name)
    return (entry.model, entry.guide), images


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["array", "list", "number"])
def test_labels_that_are_no_tensor_are_refused_with_a_remedy(name, kind):
    """Pyro's own training hands them on as they are; `labels.repeat` of numpy repeats otherwise."""
    entry, images = make(name)
    labels = {"array": np.arange(4) % 2, "list": [0, 1, 0, 1], "number": 1}[kind]
    pattern = {
        "array": r"not ndarray; call torch.from_numpy\(labels\)",
        "list": r"not list; call torch.tensor\(labels\)",
        "number": r"not int; call torch.tensor\(labels\)",
    }
    match = rf"^labels must be a tensor of integers \(B,\), {pattern[kind]}$"
    with pytest.raises(ValueError, match=match):
        entry.model(images, labels)
    with pytest.raises(ValueError, match=match):
        entry.guide(images, labels=labels)
    for loss in (Trace_ELBO(), ImportanceWeightedELBO(2)):
        if entry.model.normalized:
            svi = SVI(entry.model, entry.guide, pyro.optim.Adam({"lr": 1e-3}), loss)
            with pytest.raises(ValueError, match="labels must be a tensor of integers"):
                svi.step(images, labels)


@pytest.mark.parametrize("name", ["vae", "cnn", "capsule-rbm"])
def test_images_that_are_no_tensor_are_refused_by_a_model_with_a_remedy(name):
    entry, images = make(name)
    for value, kind in ((images.numpy(), "ndarray"), (images.tolist(), "list")):
        with pytest.raises(ValueError, match=rf"images must be .*, not {kind}; call torch\.") as e:
            entry.model(value)
        assert "\n" not in str(e.value)


def test_arrays_of_other_arguments_of_a_model_are_refused():
    entry, images = make("conditional-autoencoder")
    with pytest.raises(ValueError, match=r"request must be a torch.Tensor, not ndarray; call"):
        entry.model(images, request=np.zeros((4, 2)))


def as_list(values: torch.Tensor):
    return values.tolist()


def as_array(values: torch.Tensor):
    return values.double().numpy() if values.is_floating_point() else values.numpy()


def sites_of(name="vae"):
    pair, images = pair_of(name)
    return pair, images, infer(pair[1], images)


def of_a_vae(call):
    """Return a function that calls with the pair, its images and latents, of which some are given.

    `call` gets a function that changes the kind of a tensor, or of the values of a dict.
    """

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
    "log_prior": of_a_vae(lambda p, x, z, dicts, one: log_prior(p[0], dicts(z))),
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
    "top_prior": of_a_vae(
        lambda p, x, z, dicts, one: fit_top_prior(p[0], dicts(z), 2).log_prob(dicts(z))
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


def test_a_grid_of_requests_may_be_a_list():
    pair, images = pair_of("conditional-autoencoder")
    options = dict(starts=1, steps=0, num_particles=2)
    grids = [torch.tensor([0.0, 90.0]), [0.0, 90.0], np.array([0, 90])]
    result = [infer_transformation(*pair, images, Rotations(), grid=x, **options) for x in grids]
    assert all(torch.equal(result[0].best, item.best) for item in result)
    assert isinstance(Rotations(), Requests)


@pytest.mark.parametrize("verb", [encode, reconstruct])
def test_verbs_take_arrays_of_any_precision(verb):
    pair, images = pair_of("vae")
    expected, result = verb(*pair, images), verb(*pair, images.double().numpy())
    if verb is encode:
        expected, result = expected["image_code"], result["image_code"]
    assert torch.equal(expected, result)
    both, pictures = pair_of("cnn")
    assert torch.equal(classify(*both, pictures), classify(*both, pictures.numpy()))


@pytest.mark.parametrize("value", ["word", [[1.0], [1.0, 2.0]], [None], object(), {1: 2}])
def test_what_is_no_array_of_numbers_is_named(value):
    kind = type(value).__name__
    pattern = rf"grid must be a torch.Tensor, a numpy array or a list of numbers .*, not {kind}"
    with pytest.raises(ValueError, match=pattern):
        as_tensor("grid", value)
    pair, _ = pair_of("vae")
    with pytest.raises(ValueError, match=r"given\['image_code'\] must be .*, not str"):
        mean_images(pair[0], 4, {"image_code": "word"})


def test_a_split_takes_arrays_and_lists():
    images, labels = torch.rand(3, 1, 2, 2), torch.tensor([2, 0, 1])
    for value in ((images.numpy(), labels.numpy()), (images, labels.tolist())):
        split = Split(*value)
        assert torch.equal(split.images, images) and torch.equal(split.labels, labels)
        assert split.labels.dtype == torch.int64
    for wrong in (["a", "b", "c"], [0.5, 1.5, 2.5], [[0, 1, 2]], 3, np.array(["a", "b", "c"])):
        with pytest.raises(ValueError, match="labels must be") as caught:
            Split(images, wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(
        ValueError, match=r"images must be a torch.Tensor or a numpy array, not list"
    ):
        Split(images.tolist())
