"""The entry shape-codes: training in stages through a run folder, and its experiment's measures."""

import json

import numpy as np
import pandas as pd
import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_sample

from capsule_zoo.data import Dataset, Split, load_dataset
from capsule_zoo.experiments.shape_codes import from_images as letters
from capsule_zoo.experiments.shape_codes.clusters import cluster
from capsule_zoo.experiments.shape_codes.objects import (
    encode_at_best_rotation,
    lost,
    mean_and_worst,
    measure_clusters,
    read_objects,
    sets_at_rotations,
)
from capsule_zoo.inference import Checks, evaluate, fit
from capsule_zoo.models import Capsules
from capsule_zoo.models.parts.part_sets import as_part_sets, from_part_sets
from capsule_zoo.registry import Entry, create, load, small_settings
from capsule_zoo.runs import folder as runs


def made(**sizes) -> Entry:
    pyro.set_rng_seed(0)
    return create("shape-codes", **{**small_settings("shape-codes"), **sizes})


def test_one_command_trains_all_stages_and_a_resumed_one_goes_on(tmp_path):
    sizes = small_settings("shape-codes")
    config = dict(data="digits", settings=sizes, batch_size=50, limits={"steps": 20})
    entry, run = runs.train("shape-codes", tmp_path / "run", config, progress=False)
    history = pd.read_csv(tmp_path / "run" / "history.csv")
    assert len(history) == run.steps > 4
    assert json.loads((tmp_path / "run" / "config.json").read_text())["entry"] == "shape-codes"
    twin = load(tmp_path / "run")
    assert torch.equal(twin.model.kind_logits, entry.model.kind_logits)
    assert entry.model.kind_logits.std() > 0  # the kinds started from what was parsed
    longer = {"limits": {"steps": 60}}
    _, more = runs.train("shape-codes", tmp_path / "run", longer, resume=True, progress=False)
    assert more.steps > run.steps


def test_automatic_guides_fit_the_model_that_enumerates_its_kinds():
    model = made().model.with_enumerated_kinds()
    images = torch.rand(3, *model.image_shape, generator=torch.Generator().manual_seed(0))
    guide = AutoNormal(poutine.block(model, hide=["object_kind"]), init_loc_fn=init_to_sample)
    objective = TraceEnum_ELBO(max_plate_nesting=2)
    settings = dict(steps=30, lr=0.02, batch_size=3, freeze="model", checks=Checks(progress=False))
    run = fit(model, guide, images, objective=objective, **settings)
    assert run.history.loss.iloc[-5:].mean() < run.history.loss.iloc[:5].mean()
    idata = evaluate(model, guide, images, num_particles=3, discrete=False)
    assert torch.isfinite(torch.as_tensor(idata.sample_stats["log_weight"].values)).all()
    assert "object_kind" not in idata.posterior


def labeled_sets(entry: Entry, number: int = 90) -> Split:
    """Part sets of two kinds, far apart, whose kind is the class."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(number) % 2
    place = torch.randn(2, 3, 6, generator=generator)
    with torch.no_grad():
        entry.model.shapes.transform.copy_(place - torch.tensor([1.0, 0, 0, 0, 1, 0]))
        entry.model.shapes.presence_logits.fill_(4)
        entry.model.shapes.raw_scale.fill_(-2)
    noise = 0.05 * torch.randn(number, 3, 6, generator=generator)
    parts = Capsules(torch.ones(number, 3), place[labels] + noise)
    return Split(as_part_sets(parts), labels)


def test_kinds_that_are_classes_are_found_to_be_classes():
    entry = made(kinds=2, sigma_top=0.1)
    sets = labeled_sets(entry)
    belief = read_objects(entry.guide, sets.images).belief
    metrics = measure_clusters([belief, belief], [sets.labels, sets.labels])
    assert metrics["cluster_accuracy"][0] == metrics["cluster_accuracy_one_to_one"][0] == 1
    assert metrics["kinds_in_use"][0] == 2
    assert metrics["kinds_perplexity"][0] == pytest.approx(2, abs=0.05)
    mixed = torch.zeros_like(sets.labels)
    assert measure_clusters([belief, belief], [mixed, mixed])["cluster_accuracy"][0] == 1
    swapped = [sets.labels, 1 - sets.labels]
    assert measure_clusters([belief, belief], swapped)["cluster_accuracy"][0] == 0


def test_nothing_is_lost_where_objects_tell_their_parts_exactly():
    """And all of it where the object says that no part is there."""
    entry = made()
    with torch.no_grad():
        entry.guide.read_parts.pool.read.bias.unflatten(0, (3, -1))[:, 0] = (
            9  # every part is present
        )
        entry.model.template_logits.fill_(3)
        entry.model.shapes.presence_logits.fill_(-9)
        entry.model.shapes.presence_codes.zero_()
        entry.model.shapes.log_affinity.fill_(20)
    images = torch.rand(4, *entry.model.image_shape, generator=torch.Generator().manual_seed(0))
    fraction, _, count = lost(entry, images, seed=0)["fraction_lost"]
    assert fraction == pytest.approx(1, abs=0.02)
    assert count == 4


def test_the_turn_that_explains_the_parts_best_is_chosen():
    entry = made()
    images = torch.rand(6, *entry.model.image_shape, generator=torch.Generator().manual_seed(0))
    split = Split(images, torch.zeros(6, dtype=torch.long))
    rotations = [
        read_objects(entry.guide, sets) for sets in sets_at_rotations(entry.guide, split, 5)
    ]
    explained = torch.stack([reading.explained for reading in rotations])
    best, indices = encode_at_best_rotation(entry.guide, split, 5)
    assert torch.equal(best.explained, explained.amax(0))
    assert torch.equal(indices.long(), explained.argmax(0))
    assert len(indices.unique()) > 1
    features = torch.stack([torch.from_numpy(reading.features()) for reading in rotations])
    expected = features[indices.long(), torch.arange(6)]
    torch.testing.assert_close(torch.from_numpy(best.features()), expected)


def test_features_weigh_codes_and_poses_by_the_tempered_belief():
    entry = made()
    sets = labeled_sets(entry, 20).images
    guide = entry.guide.with_scope("objects")
    parts = from_part_sets(sets)
    with torch.no_grad():
        proposals = guide.propose(parts)
        logits = guide.kind_logits(parts, proposals)
    odds = ((logits - logits[:, :1]) / 50).exp()
    weight = odds / odds.sum(-1, keepdim=True)
    codes = [weight[:, k, None] * proposals.code[:, k] for k in range(2)]
    pose = sum(weight[:, k, None] * proposals.pose[:, k] for k in range(2))
    objects = read_objects(entry.guide, sets, 50.0)
    expected = torch.cat([weight, *codes, pose], dim=-1)
    torch.testing.assert_close(torch.from_numpy(objects.features()), expected)
    sharp = read_objects(entry.guide, sets)
    assert torch.equal(sharp.tempered, sharp.belief)
    assert torch.equal(objects.belief, sharp.belief)  # the belief itself is not tempered
    assert (objects.tempered.amax(-1) < sharp.belief.amax(-1)).all()


def test_clusters_are_made_by_training_rows_alone():
    train = np.array([[0.0], [0.1], [5.0], [5.1]])
    train_clusters, test_clusters = cluster(train, np.array([[0.2], *[[50.0]] * 9]), 2, seed=0)
    assert torch.equal(test_clusters[0], train_clusters[0]) and torch.equal(
        test_clusters[1], train_clusters[2]
    )
    assert torch.equal(train_clusters.sum(0), torch.tensor([2.0, 2.0]))


def test_worst_and_mean_of_the_seeds():
    rows = [
        {
            "cluster_accuracy": 0.9,
            "cluster_accuracy_sampled": 0.9,
            "probe": 0.9,
            "probe_all": 0.9,
            "frechet": 20.0,
        },
        {
            "cluster_accuracy": 0.6,
            "cluster_accuracy_sampled": 0.9,
            "probe": 0.9,
            "probe_all": 0.9,
            "frechet": 26.0,
        },
    ]
    first, again = ({name: (value, None, 1) for name, value in row.items()} for row in rows)
    metrics = mean_and_worst([first, again])
    assert metrics["over_seeds"]["cluster_accuracy"] == pytest.approx((0.75, 0.15, 2))
    assert metrics["worst"]["cluster_accuracy"] == (0.6, None, 2)
    assert metrics["worst"]["frechet"] == (26.0, None, 2)  # lower is better


@pytest.mark.long
def test_letters_are_clear_and_a_blur_of_all_is_not(monkeypatch):
    monkeypatch.setattr(letters, "EPOCHS", 20)
    data = load_dataset("font-letters")
    judge = letters.train_judge(data)
    real = letters.judge_letters(judge, data.test.images)
    blurred = letters.judge_letters(judge, data.train.images.mean(0, keepdim=True))
    assert real["confidence"][0] > 0.7 and real["clear"][0] > blurred["clear"][0] == 0
    assert real["classes"][0] > 9 and blurred["classes"][0] == 1


@pytest.mark.parametrize(
    ("name", "per_epoch", "length"),
    [
        ("shape-codes", 38, {"epochs": None, "steps": 4000}),
        ("shape-codes", 500, {"epochs": 10}),
        ("vae", 38, {"epochs": 10}),
    ],
)
def test_without_a_limit_every_stage_has_the_steps_that_it_needs(name, per_epoch, length):
    entry = create(name, **small_settings(name))
    split = Split(torch.zeros(per_epoch * 32, 1, 1, 1))
    data = Dataset("some", split, split, split, ())
    arguments = {"epochs": 10, "batch_size": 32}
    assert runs.with_needed_steps(arguments, entry, data) == {**arguments, **length}
