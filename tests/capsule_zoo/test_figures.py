"""Pictures show what they claim: colours add up to the image, rows are labeled."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.text import Text
from pyro import poutine
from variants import create, small_settings

from capsule_zoo.data import MissingData
from capsule_zoo.figures import energy, generic, grids
from capsule_zoo.figures.curves import accuracy_curves, number_curves
from capsule_zoo.figures.grids import draw_changes
from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.inference.evaluation.ancestral import mean_images
from capsule_zoo.models import Capsules, PartWholeCapsules
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.runs.folder import draw_of_run
from capsule_zoo.settings import configure
from capsule_zoo.zoo.matrix_capsules import figures as matrix_figures
from capsule_zoo.zoo.part_whole import figures as part_whole


def picture_arrays(figure):
    """Return the pictures of a figure, row by row."""
    return [np.asarray(picture.get_array()) for axis in figure.axes for picture in axis.images]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return PartWholeCapsules(
        (1, 12, 12), objects=3, parts=5, painting=Painting(template_size=5)
    ).discretize()


@pytest.mark.parametrize("likelihood", ["composite", "mixture"])
def test_parts_in_one_color_add_up_to_the_image(model, likelihood, monkeypatch):
    model = model.sharing_parameters(painting=replace(model.painting, likelihood=likelihood))
    nodes = poutine.trace(model).get_trace(batch_size=4).nodes
    parts = Capsules(nodes["part_presence"]["value"], nodes["part_pose"]["value"])
    monkeypatch.setattr(part_whole, "part_colors", lambda number: torch.ones(number, 3))
    painted = part_whole.colored_parts(model, parts)
    expected = model.render(parts).movedim(1, -1).expand_as(painted)
    torch.testing.assert_close(painted, expected)


def test_rows_hold_every_image_once_and_are_named_by_their_numbers():
    rows = grids.split_into_rows("parts", torch.arange(29), 12)
    assert list(rows) == ["parts 1-12", "parts 13-24", "parts 25-29"]
    assert torch.equal(torch.cat(list(rows.values())), torch.arange(29))


def test_changes_are_of_one_number_and_rows_of_those_that_change_most():
    scale = torch.tensor([1.0, 0.1, 3.0])  # how much a pixel changes with each number
    numbers = torch.tensor([0.5, 0.2, 0.3])
    steps = torch.tensor([[-1.0] * 3, [0.0] * 3, [1.0, 1.0, 0.5]])
    drawn = draw_changes(lambda x: (x * scale)[:, None, None], numbers, steps, 2)
    assert list(drawn) == ["number 1", "number 3"]
    for row, index in (("number 1", 0), ("number 3", 2)):
        expected = (numbers * scale).repeat(3, 1)
        expected[:, index] += scale[index] * steps[:, index]
        torch.testing.assert_close(drawn[row][:, 0, 0], expected)


def test_changed_poses_are_of_the_first_image_and_need_a_decoder(monkeypatch):
    drawn = dict[str, torch.Tensor]()
    monkeypatch.setattr(matrix_figures, "image_rows", lambda rows, title: drawn.update(rows))
    entry = create("matrix-capsules", **small_settings("matrix-capsules:decoder"))
    images = torch.rand(5, *entry.model.image_shape)
    matrix_figures.poses(entry, images)
    with torch.no_grad(), eval_mode(entry.model):
        classes = entry.model.capsules(images)[-1]
        label = classes.logits[:1, 0].argmax(-1)
        reconstruction = entry.model.draw(classes.pose[:1, 0].flatten(2), label)[0]
    assert len(drawn) == 8
    for row in drawn.values():
        torch.testing.assert_close(row[5], reconstruction)  # in the middle nothing changes
        assert (row[0] - row[-1]).abs().max() > 1e-4
    plain = create("matrix-capsules", **small_settings("matrix-capsules"))
    with pytest.raises(ValueError, match="--set preset=decoder"):
        matrix_figures.poses(plain, images)


def test_parses_leave_the_guide_in_its_mode_and_label_their_rows(model):
    guide = configure(
        PartWholeGuide, model, channels=4, width=8, heads=2, blocks=1, inducing=2
    ).train()
    figure = part_whole.parses(model, guide, torch.rand(5, 1, 12, 12))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["image", "reconstruction", "parts"] and guide.training


def test_samples_are_seeded_and_leave_the_random_state(model):
    state = torch.get_rng_state()
    one, two, other = (pixels(part_whole.prior_samples(model, seed)) for seed in (1, 1, 2))
    assert np.array_equal(one, two) and not np.array_equal(one, other)
    assert torch.equal(state, torch.get_rng_state())
    assert len(part_whole.learned_templates(model).axes[0].images) == 5


def pixels(figure):
    """Return the pixels of all pictures in a figure of rows."""
    return np.stack([image.get_array() for axis in figure.axes for image in axis.images])


def test_a_name_has_one_color_in_all_panels_whatever_the_order_of_names():
    errors = {
        "em": {"1": (0.1, 0.01, 9), "2": (0.2, None, 9)},
        "own_way": {"1": (0.3, 0.02, 9), "2": (0.4, 0.02, 9)},
    }
    figure = number_curves({"error": errors, "again": dict(reversed(errors.items()))}, "iterations")
    lines = [
        {
            bars.get_label(): (bars[0].get_color(), tuple(bars[0].get_ydata()))
            for bars in axis.containers
        }
        for axis in figure.axes
    ]
    assert lines[0] == lines[1] and set(lines[0]) == {"EM", "own way"}
    assert len({color for color, _ in lines[0].values()}) == 2
    assert [axis.get_ylabel() for axis in figure.axes] == ["error", "again"]
    bars = figure.axes[0].containers[1][2][0].get_segments()
    assert bars[0][:, 1] == pytest.approx([0.28, 0.32])


@pytest.mark.parametrize("columns", [1, 3, 12])
def test_figures_are_as_wide_as_a_page_at_most(columns):
    images, numbers = torch.zeros(columns, 1, 28, 28), {"0": (0.5, 0.1, 9), "1": (0.6, 0.1, 9)}
    panels = {f"error {i}": {"model": numbers} for i in range(columns)}
    for figure in (
        grids.image_rows({"a row with a long name": images}),
        number_curves(panels, "rotation (degrees)"),
    ):
        assert figure.get_size_inches()[0] <= grids.PAGE_WIDTH + 1e-6
        texts = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_text())
        assert min(text.get_fontsize() for text in texts) >= 7
        plt.close(figure)


@pytest.mark.parametrize("title", ["Images and what is found in them", "a long title " * 12])
@pytest.mark.parametrize("number", [1, 4, 12])
def test_titles_and_labels_lie_within_the_figure(number, title):
    images = torch.zeros(number, 1, 6, 8)
    figure = grids.image_rows({"x": images, "a label of six short words": images}, title)
    figure.canvas.draw()
    texts = [figure._suptitle, *figure.axes[0].get_yticklabels()]
    for text in texts:
        assert within(text, figure) and text.get_text().strip()
    assert not overlap(*texts[1:])
    plt.close(figure)


@pytest.mark.parametrize("name", ["capsules", "capsules that were trained on rotated digits"])
def test_a_legend_lies_below_the_curves_and_within_the_figure(name):
    curve = {"0": (0.5, 0.1, 9), "90": (0.6, 0.1, 9)}
    curves = {f"{name} {i}": curve for i in range(7)}
    figure = accuracy_curves(curves, "rotation (degrees)", 0.1)
    figure.canvas.draw()
    (legend,) = figure.legends
    assert within(legend, figure) and len(legend.get_texts()) == 8
    assert legend.get_window_extent().y1 <= figure.axes[0].get_window_extent().y0
    assert figure.axes[0].get_window_extent().height > 2 * figure.dpi  # inches for the curves
    plt.close(figure)


def within(artist, figure):
    """Return whether an artist lies within its figure."""
    box, whole = artist.get_window_extent(), figure.bbox
    return whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1


def overlap(one, other):
    """Return whether two artists overlap."""
    return one.get_window_extent().overlaps(other.get_window_extent())


# Energy models, and reconstructions of all


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, {}) for name in ("capsule-rbm", "capsule-helmholtz", "vae")),
        ("vae", {"likelihood": "bernoulli"}),
        *((name, {}) for name in ("generative-capsnet", "generative-capsnet:continuous")),
        *((name, {}) for name in ("conditional-autoencoder", "conditional-autoencoder:broadcast")),
    ],
)
def test_reconstructions_are_of_what_the_guide_expects_and_samples_of_the_model(name, sizes):
    entry = create(name, **{**small_settings(name), **sizes})
    images = torch.rand(4, *entry.model.image_shape)
    images.view(-1)[:2] = torch.tensor([0.0, 1.0])  # pictures are on the images' own scale
    with torch.no_grad():
        for name, bias in entry.model.named_parameters():
            if name.endswith("paint.bias"):
                bias.zero_()  # some models start dark, and black pictures are all alike
        expected = entry.model.mean_image(entry.guide.expectations(images))[:, 0]
    rows = picture_arrays(entry.figures["reconstructions"](entry, images))
    np.testing.assert_allclose(rows, torch.cat([images[:, 0], expected]).clamp(0, 1), atol=1e-6)
    drawn = picture_arrays(entry.figures["samples"](entry))
    np.testing.assert_allclose(drawn, mean_images(entry.model, 32)[:, 0].clamp(0, 1), atol=1e-6)


def test_pictures_of_standard_scores_are_on_the_scale_of_the_images():
    entry = create("capsule-rbm", **small_settings("capsule-rbm"), visible_family="gaussian")
    pixels = torch.rand(4, *entry.model.image_shape)
    pixels.view(-1)[:2] = torch.tensor([0.0, 1.0])
    rows = picture_arrays(generic.reconstructions(entry, 3 * pixels - 1))
    np.testing.assert_allclose(rows[0], pixels[0, 0], atol=1e-6)
    assert all(row.min() >= 0 and row.max() <= 1 for row in rows)
    drawn = np.stack(picture_arrays(generic.samples(entry)))
    means = mean_images(entry.model, 32)[:, 0]  # pixels without limits, on a scale of their own
    scaled = (means - means.min()) / (means.max() - means.min())
    np.testing.assert_allclose(drawn, scaled, atol=1e-6)


def test_figures_of_trained_weights_that_show_no_images_need_no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("samples", "fields"):
        assert draw_of_run("capsule-rbm-mnist", name, data_root=tmp_path).is_file()
    with pytest.raises(MissingData, match="no readable MNIST"):
        draw_of_run("capsule-rbm-mnist", "reconstructions", data_root=tmp_path)


def test_a_sum_of_all_capsules_is_the_reconstruction():
    torch.manual_seed(0)
    entry = create("capsule-rbm", **small_settings("capsule-rbm"))
    with torch.no_grad():
        for parameter in entry.model.parameters():
            parameter.normal_()
    images = torch.rand(2, *entry.model.image_shape)
    images.view(-1)[:2] = torch.tensor([0.0, 1.0])
    rows = picture_arrays(energy.sums(entry, images))
    assert len(rows) == 2 * 2 * (1 + 3)  # the image or the sum, and three capsules
    expected = entry.model.reconstruct(images)[0, 0].detach().numpy()
    for whole in (rows[4], rows[7]):  # below the image, and after the weakest capsule
        np.testing.assert_allclose(whole, np.repeat(expected[..., None], 3, 2), atol=1e-6)
    np.testing.assert_allclose(rows[0][..., 0], images[0, 0], atol=1e-6)


def test_spectra_hold_each_class_in_a_panel_of_its_own():
    labels = np.array([0, 1, 0, 2, 1, 0])
    features = np.eye(6)
    figure = energy.spectra({"one": features, "five": 5 * features}, labels, images_per_class=2)
    panels = picture_arrays(figure)
    for panel, rows in zip(panels, 2 * ([0, 2], [1, 4], [3]), strict=True):
        np.testing.assert_array_equal(panel > 0, features[rows] > 0)
    limits = [axis.images[0].get_clim() for axis in figure.axes]
    assert limits == 3 * [(0, 1)] + 3 * [(0, 5)]
