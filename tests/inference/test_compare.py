"""The table of pairs and its picture."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from toys import Conjugate, ExactGuide, LinearGuide, PointGuide, conjugate_images

from capsule_zoo.inference import Comparison, compare, evaluate
from capsule_zoo.inference.widen import Widened

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


def test_it_is_a_dataframe_and_stays_one_of_its_kind(table):
    table, _, _ = table
    assert isinstance(table, pd.DataFrame)
    assert isinstance(table[table["is_bound"]], Comparison)
    assert "linear" in table.to_string()


@pytest.mark.parametrize("rows", [["point"], ["exact", "linear"], ["point", "exact", "widened"]])
def test_the_picture_has_a_panel_for_bounds_and_one_for_points(table, rows, tmp_path):
    table, _, _ = table
    chosen = table.loc[rows]
    figure = chosen.plot()
    assert len(figure.axes) == ("point" in rows) + any(row != "point" for row in rows)
    shown = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    assert sorted(shown) == sorted(rows)
    figure.savefig(tmp_path / "comparison.png")
    matplotlib.pyplot.close(figure)


def test_no_pair_is_refused():
    with pytest.raises(ValueError, match="pairs is empty"):
        compare({}, conjugate_images(3))
