"""The experiments on recurrent capsules run in miniature and name what they promise."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from miniature import change_defaults, few_digits
from PIL import Image, ImageSequence

from capsule_zoo.experiments import Job, Options
from capsule_zoo.experiments.capsule_network import overlaps
from capsule_zoo.experiments.capsule_network.overlaps import Pairs, different_pairs
from capsule_zoo.experiments.recurrent_capsules import strokes as recurrent_capsules
from capsule_zoo.experiments.zoo.equal_network import Task
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.guides.recurrent import OverlappingEncoder
from capsule_zoo.models.networks.leading import with_previous
from capsule_zoo.models.recurrent_capsules import Canvas
from capsule_zoo.registry import create, small_settings
from capsule_zoo.zoo.recurrent_capsules import figures as recurrent_figures

QUICK = Options(minutes=1e-4, progress=False, processes=1)
TINY = dict(steps=2, latent=2, units=4, channels=(2, 2), types=2, canvas=Canvas(window=3))


@pytest.fixture(autouse=True)
def miniature(monkeypatch, unpainted):
    """Use few small digits for every data set, and a tiny preset."""
    few = few_digits(60, 30, size=17)
    binary = few.binarized()
    monkeypatch.setattr(recurrent_capsules, "binary_mnist", lambda options: binary)
    change_defaults(monkeypatch, "recurrent-capsules", **TINY)
    return binary


def test_a_pair_shows_both_and_knows_both_classes(miniature):
    images, labels = miniature.test.images, miniature.test.labels
    pairs = with_previous(images)
    assert torch.equal(pairs[3] > 0, (images[3] > 0) | (images[2] > 0))
    pairs = different_pairs(miniature.test, seed=0)
    differ = labels != labels.roll(1)
    assert pairs.images.shape == pairs.others.shape == images[differ].shape
    assert torch.equal(pairs.labels, labels[differ])
    assert torch.equal(pairs.other_labels, labels.roll(1)[differ])


def test_both_classes_are_right_where_they_have_the_two_highest_scores():
    image = torch.zeros(3, 1, 2, 2)
    pairs = Pairs(
        image, torch.tensor([0, 2, 1]), image, torch.tensor([1, 0, 0])
    )  # one is half right
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.9, 0.8, 0.1], [0.2, 0.9, 0.1]])
    assert pairs.missed(scores)[0] == pytest.approx(1 / 3)


@pytest.mark.parametrize("network", ["capsules", "plain"])
def test_settings_are_tried_on_pairs_of_validation_images(network, miniature, monkeypatch):
    read, pair = [], overlaps.different_pairs
    monkeypatch.setattr(
        overlaps, "different_pairs", lambda split, seed: read.append(split) or pair(split, seed)
    )
    monkeypatch.setattr(overlaps, "load_padded", lambda options: miniature)
    sizes = dict(preset="overlapping", guide=dict(channels=4), hidden=(12, 12))
    settings = overlaps.Overlaid(sizes=sizes, images=7)
    found = []
    for is_try in (True, False):
        task = Task("capsule-network", network, "mnist", 0.01, 0.1, settings, 2, is_try)
        found.append(overlaps.learn_pairs(Job(network, task, QUICK)))
    assert torch.equal(read[0].images, miniature.validation.images)
    assert torch.equal(read[1].images, miniature.test.images[:7])
    assert [*found[0]] == ["validation_error"]
    assert {"error", "weights"} < {*found[1]} and found[1]["updates"][0] == 2


def test_the_guide_to_pairs_sees_the_pair_and_nothing_of_which_is_which(miniature):
    """The capsule of the other digit gives the drawing of the other digit."""
    sizes = dict(image_shape=miniature.image_shape, classes=miniature.num_classes)
    entry = create("recurrent-capsules", preset="overlapping", **sizes)
    assert isinstance(entry.guide, OverlappingEncoder)
    images, labels = miniature.test.images[:6], miniature.test.labels[:6]
    torch.manual_seed(0)
    trained = entry.guide(images, labels)[-1].mean
    torch.manual_seed(0)
    torch.testing.assert_close(entry.guide.take_out(with_previous(images), labels), trained)
    torch.manual_seed(0)
    other = entry.guide.take_out(with_previous(images), (labels + 1) % 10)
    assert not torch.allclose(other, trained)


def test_strokes_show_images_canvases_and_windows():
    torch.manual_seed(0)
    entry = create("recurrent-capsules", **small_settings("recurrent-capsules"))
    images = torch.rand(3, *entry.model.image_shape).round()
    figure = entry.figures["strokes"](entry, images)
    drawings = recurrent_figures.drawings_of(entry, images)
    (axis,) = figure.axes
    pictures = np.array(axis.images).reshape(3, -1)
    assert pictures.shape[1] == entry.model.steps + 2
    for row, image in enumerate(images):
        np.testing.assert_allclose(pictures[row, 0].get_array(), image[0])
        for t, drawing in enumerate(drawings):
            shown = pictures[row, 1 + t].get_array()
            np.testing.assert_allclose(shown, drawing.mean[row, 0], atol=1e-6)
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
        shown = [np.asarray(frame.convert("L")) for frame in ImageSequence.Iterator(film)]
    assert len(shown) == entry.model.steps + 1
    assert all((a != b).any() for a, b in pairwise(shown))
