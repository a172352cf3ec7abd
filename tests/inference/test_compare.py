"""The table of pairs and its picture."""

import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from toys import Conjugate, ExactGuide, LinearGuide, PointGuide, conjugate_images

from capsule_zoo.guides import Guide
from capsule_zoo.inference import compare, evaluate
from capsule_zoo.inference.posterior.widen import Widened
from capsule_zoo.registry import create, small_settings

matplotlib.use("Agg")


@pytest.fixture
def table():
    torch.manual_seed(1)
    model, images = Conjugate().double(), conjugate_images(30)
    point = PointGuide(model).double()
    pairs = {
        "point": (model, point),
        "exact": (model, ExactGuide(model)),
        "linear": (model, LinearGuide(model).double()),
        "widened": (model, Widened(model, point, images, 0.24)),
    }
    return compare(pairs, images, num_particles=40, seed=2), pairs, images


def test_rows_that_are_no_bound_share_no_column_with_rows_that_are(table):
    table, _, _ = table
    bounds = ["elbo", "elbo_se", "iwae", "iwae_se", "elbo_difference", "elbo_difference_se"]
    assert table.loc["point", bounds].isna().all() and np.isfinite(
        table.loc["point", "map_objective"]
    )
    others = table.drop(index="point")
    assert others[bounds].notna().all(axis=None) and others["map_objective"].isna().all()
    assert list(table["is_bound"]) == [False, True, True, True]


def test_differences_are_paired_and_to_the_first_bound(table):
    table, pairs, images = table
    elbo = {}
    for name in ("exact", "linear"):
        idata = evaluate(*pairs[name], images, num_particles=40, seed=2)
        elbo[name] = idata.sample_stats["log_weight"].values[0].mean(0)
    difference = elbo["linear"] - elbo["exact"]
    assert table.loc["exact", "elbo_difference"] == 0
    assert table.loc["linear", "elbo_difference"] == pytest.approx(difference.mean())
    expected = difference.std(ddof=1) / np.sqrt(30)
    assert table.loc["linear", "elbo_difference_se"] == pytest.approx(expected)


def test_relaxed_rows_are_discrete_unless_they_say_so():
    torch.manual_seed(0)
    entry = create("part-whole", **small_settings("part-whole")).use_guide("normal")
    pair = entry.model, entry.guide
    images = torch.rand(2, *pair[0].image_shape)
    pairs = {"soft": pair, "hard": tuple(program.discretize() for program in pair)}
    both = compare(pairs, images, num_particles=2)  # as they are by default: the same model
    assert both.attrs["presence"] == "discrete" and both["elbo_difference"].tolist() == [0, 0]
    alone = compare({"soft": pair}, images, num_particles=2, discrete=False)
    assert alone.attrs["presence"] == "relaxed"
    assert alone.attrs["bound_on"] == "log p(image) of the relaxed model"
    assert "of the relaxed model" in alone.draw().axes[0].get_xlabel()


def test_one_image_has_no_standard_error():
    model = Conjugate().double()
    table = compare({"exact": (model, ExactGuide(model))}, conjugate_images(1), num_particles=2)
    assert "_se" not in str(table)
    assert table.draw().axes[0].get_xlabel().endswith("nats per image (one image)")


def test_models_of_labels_are_compared_by_the_density_of_labels():
    cnn = create("cnn", **small_settings("cnn"))
    images, labels = torch.rand(4, *cnn.model.image_shape), torch.tensor([0, 1, 0, 1])
    table = compare({"cnn": (cnn.model, cnn.guide)}, images, labels=labels, num_particles=2)
    scores = cnn.model.eval().scores(images).log_softmax(1)[torch.arange(4), labels]
    assert table.loc["cnn", "elbo"] == pytest.approx(scores.mean().item(), rel=1e-5)
    assert table.attrs["bound_on"] == "log p(label | image)"


class Sure(Guide):
    """A guide beside the posterior, and a third as wide, so that a few draws decide the bound."""

    def forward(self, images, labels=None):
        mean, scale = self.model.posterior(images)
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("code", dist.Normal(mean + 4 * scale, scale / 3))


def test_the_table_says_where_few_draws_decide():
    torch.manual_seed(0)
    model, images = Conjugate().double(), conjugate_images(5)
    pairs = {"exact": (model, ExactGuide(model)), "sure": (model, Sure(model))}
    table = compare(pairs, images, num_particles=200)
    assert table["remark"].isna().tolist() == [True, False]
    assert table.loc["sure", "remark"].startswith("few draws decide: ELBO ")
    assert "few draws decide" in str(table) and "few draws" not in str(table.loc[["exact"]])
