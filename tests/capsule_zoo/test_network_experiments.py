"""Experiments on networks of capsules: what is compared, tried, matched and drawn."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from miniature import few_digits, few_views
from PIL import Image, ImageSequence
from pyro import poutine

from capsule_zoo.data import Dataset
from capsule_zoo.experiments import Job, Options
from capsule_zoo.experiments.capsule_network import overlaps
from capsule_zoo.experiments.capsule_network.classification import create_row
from capsule_zoo.experiments.capsule_network.overlaps import Pairs, different_pairs
from capsule_zoo.experiments.matrix_capsules import viewpoints
from capsule_zoo.experiments.matrix_capsules.viewpoints import match, novel_values
from capsule_zoo.experiments.zoo.equal_network import Task
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.guides.recurrent import OverlappingEncoder
from capsule_zoo.models.networks.leading import with_previous
from capsule_zoo.registry import create, small_settings
from capsule_zoo.zoo.recurrent_capsules import figures as recurrent_figures

QUICK = Options(minutes=0.003, progress=False, processes=1)


@pytest.fixture
def digits() -> Dataset:
    return few_digits(60, 30, size=17)


def test_a_blind_network_learns_nothing_from_the_image_that_it_should_draw(digits):
    """The gradient of its capsules is the same whichever image is observed."""
    labels = digits.train.labels[:8]
    pose = torch.randn(8, 10, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    slopes = {}
    for draws in (False, True):
        model = create_row("three_drawing" if draws else "three_blind", digits.image_shape).model
        for image in (digits.train.images[:8], digits.train.images[8:16]):
            conditioned = poutine.condition(model, {"class_pose": pose})
            loss = -poutine.trace(conditioned).get_trace(image, labels).log_prob_sum()
            (slope,) = torch.autograd.grad(loss, pose)
            slopes.setdefault(draws, []).append(slope)
    change = {draws: (a - b).norm() / a.norm() for draws, (a, b) in slopes.items()}
    assert change[False] < 1e-6 < 1e-5 < change[True]


# Viewpoints


def points(*errors):
    return [{"familiar": familiar, "novel": novel} for familiar, novel in errors]


def test_networks_are_matched_where_the_worse_one_is_best():
    paths = {
        "capsules": points((0.5, 0.6), (0.2, 0.3), (0.05, 0.2)),
        "cnn": points((0.4, 0.7), (0.18, 0.5), (0.3, 0.4)),
    }
    errors = match(paths)
    assert errors["cnn"] == {"familiar": 0.18, "novel": 0.5}
    fraction = (0.2 - 0.18) / (0.2 - 0.05)
    assert errors["capsules"]["familiar"] == pytest.approx(0.18)
    assert errors["capsules"]["novel"] == pytest.approx(0.3 + fraction * (0.2 - 0.3))
    late = {"capsules": points((0.5, 0.6)), "cnn": points((0.1, 0.7), (0.05, 0.5))}
    assert match(late)["cnn"] == {"familiar": 0.1, "novel": 0.7}  # judged at its start


def test_a_try_is_judged_by_views_that_it_was_not_trained_on(monkeypatch):
    arguments, both = {}, (few_views(), few_views())
    for factor, familiar in viewpoints.FAMILIAR["toys3d"].items():
        assert novel_values(both[0], factor, familiar) == [3]
    monkeypatch.setattr(viewpoints, "load_views", lambda _: both)
    monkeypatch.setattr(
        viewpoints, "train", lambda e, split, *_, **settings: arguments.update(settings, of=split)
    )
    monkeypatch.setattr(viewpoints, "error_rate", lambda _, __, split: split)
    monkeypatch.setattr(viewpoints, "SIZE", 17)
    monkeypatch.setattr(viewpoints, "NUM_VIEWS", {"toys3d": 5})
    sizes = dict(features=4, capsules=(2, 2, 2))
    task = Task("matrix-capsules", "plain", "azimuth", 0.02, 0.1, sizes, is_try=True)
    judged = viewpoints.learn(Job("", task, QUICK), data="toys3d")["validation_error"]
    whole = viewpoints.split_views(task, "toys3d")[0]
    assert len(judged) == 5 and len(arguments["of"]) == len(whole) - 5 and arguments["lr"] == 0.02
    brightness = [split.images.sum((1, 2, 3)) for split in (judged, arguments["of"], whole)]
    torch.testing.assert_close(torch.cat(brightness[:2]).sort()[0], brightness[2].sort()[0])


# Overlapping digits


def test_a_pair_shows_both_and_knows_both_classes(digits):
    images, labels = digits.test.images, digits.test.labels
    pairs = with_previous(images)
    assert torch.equal(pairs[3] > 0, (images[3] > 0) | (images[2] > 0))
    pairs = different_pairs(digits.test, seed=0)
    differ = labels != labels.roll(1)
    assert pairs.images.shape == pairs.others.shape == images[differ].shape
    assert torch.equal(pairs.labels, labels[differ])
    assert torch.equal(pairs.other_labels, labels.roll(1)[differ])


def test_both_classes_are_right_where_they_have_the_two_highest_scores():
    image = torch.zeros(3, 1, 2, 2)
    pairs = Pairs(image, torch.tensor([0, 2, 1]), image, torch.tensor([1, 0, 0]))
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.9, 0.8, 0.1], [0.2, 0.9, 0.1]])
    assert pairs.missed_fraction(scores)[0] == pytest.approx(1 / 3)  # one is half right


@pytest.mark.parametrize("network", ["capsules", "plain"])
def test_settings_are_tried_on_pairs_of_validation_images(network, digits, monkeypatch):
    read, pair = [], overlaps.different_pairs
    monkeypatch.setattr(
        overlaps, "different_pairs", lambda split, seed: read.append(split) or pair(split, seed)
    )
    monkeypatch.setattr(overlaps, "load_padded", lambda options: digits)
    sizes = dict(preset="overlapping", guide=dict(channels=4), hidden=(12, 12))
    results = []
    for is_try in (True, False):
        task = Task("capsule-network", network, "mnist", 0.01, 0.1, sizes, 2, is_try)
        results.append(overlaps.learn_pairs(Job(network, task, QUICK)))
    assert torch.equal(read[0].images, digits.validation.images)
    assert torch.equal(read[1].images, digits.test.images)
    assert [*results[0]] == ["validation_error"] and results[1]["updates"][0] == 2


def test_the_guide_to_pairs_sees_the_pair_and_nothing_of_which_is_which(digits):
    """The capsule of the other digit gives the drawing of the other digit."""
    sizes = dict(steps=2, latent=2, units=4, channels=(2, 2), types=2)
    shape = dict(image_shape=digits.image_shape, classes=digits.num_classes)
    entry = create("recurrent-capsules", preset="overlapping", **shape, **sizes)
    assert isinstance(entry.guide, OverlappingEncoder)
    images, labels = digits.test.images[:6], digits.test.labels[:6]
    torch.manual_seed(0)
    trained = entry.guide(images, labels)[-1].mean
    torch.manual_seed(0)
    torch.testing.assert_close(entry.guide.take_out(with_previous(images), labels), trained)
    torch.manual_seed(0)
    other = entry.guide.take_out(with_previous(images), (labels + 1) % 10)
    assert not torch.allclose(other, trained)


# Strokes


def test_strokes_show_images_canvases_and_windows():
    torch.manual_seed(0)
    entry = create("recurrent-capsules", **small_settings("recurrent-capsules"))
    images = torch.rand(3, *entry.model.image_shape).round()
    (axis,) = entry.figures["strokes"](entry, images).axes
    drawings = recurrent_figures.drawings_of(entry, images)
    pictures = np.array(axis.images).reshape(3, -1)
    assert pictures.shape[1] == entry.model.steps + 2
    for row, image in enumerate(images):
        np.testing.assert_allclose(pictures[row, 0].get_array(), image[0])
        for t, drawing in enumerate(drawings):
            canvas = pictures[row, 1 + t].get_array()
            np.testing.assert_allclose(canvas, drawing.mean[row, 0], atol=1e-6)
    for frame, picture in zip(axis.patches, pictures[:, 2:].T.flat, strict=True):
        left, right, bottom, top = picture.get_extent()
        box, most = frame.get_bbox(), 1e-5
        assert left - most < box.x0 < box.x1 < right + most
        assert top - most < box.y0 < box.y1 < bottom + most


def test_the_frame_of_an_untrained_window_is_the_image():
    entry = create("draw", **small_settings("draw"))
    (axis,) = image_rows({"blank": torch.zeros(1, *entry.model.image_shape)}).axes
    recurrent_figures.add_frames(axis.images, entry.model, entry.model.begin(1))
    (frame,), (left, right, bottom, top) = axis.patches, axis.images[0].get_extent()
    centers = 16 / 17 * np.array([left, top, right, bottom])  # of the outer of 17 pixels
    assert frame.get_bbox().extents == pytest.approx(centers)


def test_the_animation_has_a_frame_for_every_step(tmp_path):
    entry = create("draw", **small_settings("draw"))
    images = torch.rand(2, *entry.model.image_shape).round()
    recurrent_figures.animation(entry, images).save(tmp_path / "drawing.gif", writer="pillow")
    with Image.open(tmp_path / "drawing.gif") as film:
        frames = [np.asarray(frame.convert("L")) for frame in ImageSequence.Iterator(film)]
    assert len(frames) == entry.model.steps + 1
    assert all((a != b).any() for a, b in pairwise(frames))
