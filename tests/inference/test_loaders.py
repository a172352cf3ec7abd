"""Verbs take what `fit` takes: images that are read in batches give the result of all at once."""

import arviz as az
import numpy as np
import pyro
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from toys import ExactGuide, Items, conjugate_images, pair
from variants import create, list_models, small_settings

from capsule_zoo import data as zoo_data
from capsule_zoo.data import Split
from capsule_zoo.data.readable import rebatch
from capsule_zoo.inference import (
    classify,
    compare,
    encode,
    error_rate,
    evaluate,
    infer,
    posterior_predictive,
    reconstruct,
    summarize,
)
from capsule_zoo.inference.evaluation import inference_data
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.inference.probes import latents

NAMES = list_models()
NUMBER = 5


class Flow(IterableDataset):
    """Images that come one after the other, without a length."""

    def __init__(self, images):
        self.images = images

    def __iter__(self):
        return iter(self.images)


def make(name):
    pyro.set_rng_seed(0)
    entry = create(name, **small_settings(name))
    images = entry.model.space.example(NUMBER, torch.float32, torch.Generator().manual_seed(1))
    return entry, images, torch.arange(NUMBER) % 2


def weights(idata):
    return torch.from_numpy(idata.sample_stats["log_weight"].values)


@pytest.mark.parametrize("name", NAMES)
def test_every_model_gives_the_results_of_all_images_at_once(name):
    entry, images, labels = make(name)
    model, guide = entry.model, entry.guide
    loader = DataLoader(TensorDataset(images, labels), batch_size=2)
    options = dict(num_particles=2, chains=2, batch_size=3, seed=3, draws=2)
    if model.supervised:
        whole = evaluate(model, guide, images, labels=labels, **options)
        parts = evaluate(model, guide, loader, labels=True, **options)
    else:
        whole, parts = (evaluate(model, guide, item, **options) for item in (images, loader))
    for group in whole.groups():
        assert parts[group].identical(whole[group]), group
    timeless = [{**item.attrs, "seconds": 0} for item in (whole, parts)]
    assert timeless[0] == timeless[1] and whole.attrs["num_images"] == NUMBER
    settings = dict(num_samples=2, seed=2, batch_size=3)
    result = [encode(model, guide, item, **settings) for item in (images, loader)]
    for site, values in result[0].items():
        assert torch.equal(values, result[1][site]), site
    if not model.supervised:
        for verb in (reconstruct, posterior_predictive):
            whole, parts = (verb(model, guide, item, **settings) for item in (images, loader))
            assert torch.equal(whole, parts)
    if name != "draw" and any(hasattr(part, "predict") for part in (model, guide)):
        assert torch.equal(*(classify(model, guide, x, batch_size=4) for x in (images, loader)))
        rates = (error_rate(model, guide, x) for x in (Split(images, labels), loader))
        assert len(set(rates)) == 1


@pytest.mark.parametrize(
    "kind",
    [
        lambda images, labels: images.numpy(),
        Split,
        lambda images, labels: zoo_data.Dataset(
            "own", Split(images[:1]), Split(images[:1]), Split(images, labels)
        ),
        TensorDataset,
        Items,
        lambda images, labels: Items(images),
        lambda images, labels: list(images.split(2)),
        lambda images, labels: list(zip(images.split(2), labels.split(2), strict=True)),
        lambda images, labels: [images.numpy(), labels.numpy()],
        lambda images, labels: DataLoader(Items(images.numpy(), labels.tolist()), batch_size=2),
        lambda images, labels: DataLoader(Items(images, labels), batch_size=2, num_workers=1),
        lambda images, labels: DataLoader(Flow(images), batch_size=2),
    ],
)
def test_every_kind_of_data_gives_the_same(kind):
    vae, images, labels = make("vae")
    shape = vae.model.image_shape
    entry = create("cnn", **{**small_settings("cnn"), "image_shape": shape})
    both = vae.model, vae.guide
    data = kind(images, labels)
    options = dict(num_particles=2, batch_size=4)
    assert torch.equal(*(weights(evaluate(*both, x, **options)) for x in (images, data)))
    code = encode(*both, images)["image_code"]
    assert torch.equal(code, encode(*both, data, batch_size=3)["image_code"])
    assert torch.equal(code.flatten(1), torch.from_numpy(latents(both[1], data, ["image_code"])))
    assert torch.equal(infer(vae.guide, images)["image_code"], infer(vae.guide, data)["image_code"])
    refined = [refine(*both, x, steps=2).refinement.end for x in (images, data)]
    assert torch.equal(*refined)
    assert torch.equal(*(classify(entry.model, entry.guide, x) for x in (images, data)))
    pairs = {"one": both, "two": both}
    assert torch.equal(*(torch.tensor(compare(pairs, x)["elbo"].values) for x in (images, data)))


@pytest.mark.parametrize("kind", [Split, TensorDataset, Items])
def test_labels_of_the_data_are_used_where_they_are_wanted(kind):
    entry, images, labels = make("cnn")
    both, data = (entry.model, entry.guide), kind(images, labels)
    expected = (classify(*both, images) != labels).double().mean()
    for item in (data, DataLoader(data, batch_size=3), DataLoader(data, 3, shuffle=True)):
        assert error_rate(*both, item).value == pytest.approx(expected)
        assert error_rate(*both, item).n == NUMBER
    whole = evaluate(*both, images, labels=labels, num_particles=1)
    for item in (data, DataLoader(data, batch_size=3)):
        assert torch.equal(
            weights(whole), weights(evaluate(*both, item, labels=True, num_particles=1))
        )
    value = evaluate(*both, DataLoader(images, 3), labels=labels, num_particles=1, batch_size=2)
    assert_close(weights(whole), weights(value))


def test_images_are_read_batch_by_batch():
    """No more than a batch is read between two calls of the guide, and no image is kept."""
    model, _ = pair()
    number, rows = 60, 4
    data, reads = Items(conjugate_images(number)), []

    class Watching(ExactGuide):
        def forward(self, images, labels=None):
            reads.append(data.read)
            assert len(images) <= rows
            return super().forward(images, labels)

    guide = Watching(model)
    for call in (
        lambda x: evaluate(model, guide, x, num_particles=2, batch_size=rows, draws=0),
        lambda x: encode(model, guide, x, batch_size=rows),
    ):
        for source in (data, DataLoader(data, batch_size=3)):
            data.read, reads[:] = 0, []
            result = call(source)
            assert data.read >= number
            assert max(np.diff(reads[3:])) <= 2 * rows
    part = evaluate(model, guide, data, num_particles=1, draws=0, batch_size=rows)
    assert "observed_data" not in part.groups()
    assert len(result["code"]) == number


def test_reading_leaves_the_random_state_and_the_loader_as_they_were():
    entry, images, labels = make("vae")
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(images, labels), 3, shuffle=True, generator=generator)
    before, state = torch.get_rng_state(), generator.get_state()
    evaluate(entry.model, entry.guide, loader, num_particles=2)
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(state, generator.get_state())


def test_batches_of_any_sizes_become_batches_of_one_size():
    images, labels = torch.arange(11.0)[:, None], torch.arange(11)
    for sizes in ([1] * 11, [11], [4, 4, 3], [2, 9], [7, 1, 3]):
        value = zip(images.split(sizes), labels.split(sizes), strict=True)
        parts = list(rebatch(value, 4))
        assert [len(x) for x, _ in parts] == [4, 4, 3]
        assert torch.equal(torch.cat([x for x, _ in parts]), images)
        assert torch.equal(torch.cat([y for _, y in parts]), labels)
    assert [y for _, y in rebatch([(images, None)], 4)] == [None] * 3


JOINS = pytest.mark.skipif(inference_data._MODERN, reason="arviz.concat and extend are of arviz 0")


@JOINS
def test_parts_of_the_images_are_not_joined_as_draws_of_the_same():
    model, guide = pair()
    images = conjugate_images(10)
    first, second = (evaluate(model, guide, part, seed=i) for i, part in enumerate(images.split(5)))
    with pytest.raises(ValueError, match=r"'checksum' differs.*or evaluate all images at once"):
        summarize(az.concat(first, second, dim="chain"))
    with pytest.raises(ValueError, match=r"extend keeps one of two evaluations.*DataLoader"):
        first.extend(second)
    again = evaluate(model, guide, images[:5], seed=1)
    assert summarize(az.concat(first, again, dim="draw"))["num_particles"] == 100
    with pytest.raises(ValueError, match="'num_images' differs"):
        summarize(az.concat(first, evaluate(model, guide, images[:4], seed=1), dim="chain"))
    prior = az.from_dict(prior={"code": np.zeros((1, 3))})
    first.extend(prior)
    assert "prior" in first.groups() and summarize(first)["num_images"] == 5


@JOINS
def test_draws_that_were_joined_twice_are_refused():
    model, guide = pair()
    images = conjugate_images(4)
    one, two = (evaluate(model, guide, images, seed=seed, chains=2) for seed in range(2))
    for dim in ("chain", "draw"):
        with pytest.raises(ValueError, match="joins 2 evaluations with the seed 0, whose draws"):
            summarize(az.concat(one, one, dim=dim))
        with pytest.raises(ValueError, match="joins 3 evaluations with the seed 0, 1"):
            summarize(az.concat(az.concat(one, two, dim=dim), one, dim=dim))
        assert summarize(az.concat(one, two, dim=dim))["num_particles"] == 200
    assert summarize(one.isel(draw=slice(10)))["num_particles"] == 20
    part = summarize(one.isel(image=slice(2)))
    assert part["num_images"] == 2


def test_images_that_were_put_one_after_the_other_are_refused():
    import xarray

    model, guide = pair()
    first, second = (evaluate(model, guide, part) for part in conjugate_images(10).split(5))
    groups = [first.sample_stats, second.sample_stats]
    joined = xarray.concat([getattr(x, "to_dataset", lambda x=x: x)() for x in groups], "image")
    for numbers in (joined["image"].values, np.arange(10)):
        variables = {"log_weight": (joined["log_weight"].dims, joined["log_weight"].values)}
        idata = inference_data.inference_data({"sample_stats": variables}, dict(first.attrs))
        idata.sample_stats.coords["image"] = numbers
        with pytest.raises(ValueError, match=r"holds 10 images, but .* an evaluation of 5"):
            summarize(idata)
