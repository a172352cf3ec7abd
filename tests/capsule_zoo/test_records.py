"""Records say all that is needed to find a number again, and hold nothing that is not finite."""

import json
import re
import shlex
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from capsule_zoo import __version__
from capsule_zoo.experiments import find_experiment, list_experiments
from capsule_zoo.records import (
    FIELDS,
    Table,
    figures_of,
    flatten,
    read_record,
    save_figure,
    write_record,
)

RESULTS = Path(__file__).parents[2] / "results"
METRICS = {"elbo": {"value": -1.5, "se": 0.1, "n": 100}, "exact": {"value": 2, "se": None, "n": 1}}
REST = {"command": "make it", "seed": 0, "data": "digits", "seconds": 1.23456}


def test_a_record_reads_back(tmp_path):
    path = write_record("part-whole/digits", METRICS, folder=tmp_path, **REST)
    assert path == tmp_path / "part-whole" / "digits.json"
    record = read_record("part-whole/digits", tmp_path)
    assert set(record) == {*FIELDS, "tables"} and record["tables"] == {}
    assert record["metrics"] == METRICS
    assert record["versions"]["capsule-zoo"] == __version__
    assert {k: record[k] for k in ("command", "seed", "data")} == {
        k: REST[k] for k in ("command", "seed", "data")
    }


@pytest.mark.parametrize(("kind", "mode"), [("lines", "P"), ("noise", "RGBA")])
def test_figures_have_few_colors_where_no_pixel_shows_it(kind, mode, tmp_path):
    """Lines and gray pictures keep every pixel; photographs of many colors stay as they are."""
    chance, figure = np.random.default_rng(0), plt.figure(figsize=(3, 2))
    if kind == "lines":
        figure.subplots().plot(chance.normal(size=9), "k")
    else:
        picture = chance.random((40, 60, 3)) if kind == "noise" else chance.random((40, 60))
        figure.figimage(picture, resize=False, cmap="gray")
    figure.savefig(tmp_path / "whole.png", dpi=150)
    save_figure(figure, tmp_path / "saved.png")
    with Image.open(tmp_path / "whole.png") as whole, Image.open(tmp_path / "saved.png") as saved:
        assert (saved.mode, saved.info["dpi"]) == (mode, whole.info["dpi"])
        both = [np.asarray(image.convert("RGB")) for image in (whole, saved)]
    assert np.array_equal(*both)
    sizes = [(tmp_path / f"{name}.png").stat().st_size for name in ("saved", "whole")]
    assert sizes[0] <= 0.7 * sizes[1] if mode == "P" else sizes[0] == sizes[1]


def test_figures_lie_beside_the_record_and_are_closed(tmp_path):
    drawn = {
        "one": {"": plt.figure(), "templates": plt.figure(), "guides": plt.figure()},
        "one-shot": {"templates": plt.figure()},
    }
    for name, figures in drawn.items():
        write_record(f"part-whole/{name}", METRICS, figures=figures, folder=tmp_path, **REST)
    names = [path.name for path in figures_of("part-whole/one", tmp_path)]
    assert names == ["one.png", "one_guides.png", "one_templates.png"]
    assert plt.get_fignums() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experiment": "digits"}, "<model>/<name>"),
        ({"experiment": "../part/digits"}, "<model>/<name>"),
        ({"experiment": "Part/digits"}, "<model>/<name>"),
        ({"metrics": {"E L": METRICS["exact"]}}, "lower case"),
        ({"metrics": {"elbo": {"value": float("nan"), "se": None, "n": 1}}}, "value of metric"),
        ({"metrics": {"elbo": {"value": float("inf"), "se": None, "n": 1}}}, "value of metric"),
        ({"metrics": {"elbo": {"value": 1, "se": -1.0, "n": 1}}}, "se of metric elbo"),
        ({"metrics": {"elbo": {"value": 1, "se": float("nan"), "n": 1}}}, "se of metric elbo"),
        ({"metrics": {"elbo": {"value": 1, "se": None, "n": 0}}}, "n of metric elbo"),
        ({"metrics": {"elbo": {"value": 1, "n": 1}}}, "needs value, se and n"),
        ({"seconds": float("nan")}, "seconds"),
        ({"tables": {"": {"elbo": {"normal": "elbow"}}}}, "do not exist: elbow"),
        ({"tables": {"": {"elbo": {"one": "elbo", "two": "elbo"}}}}, "in two cells"),
        ({"machine": "mine"}, "machine cannot be a further field"),
    ],
)
def test_a_bad_record_is_refused_before_anything_is_written(tmp_path, changes, message):
    arguments = {"experiment": "part-whole/digits", "metrics": METRICS, **REST, **changes}
    with pytest.raises(ValueError, match=message):
        write_record(**arguments, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_metrics_keep_quantity_and_variant_and_their_flat_names(tmp_path):
    one, two, three = (1.0, 0.1, 9), (2.0, None, 1), (3.0, 0.5, 9)
    metrics = {
        "steps": two,
        "elbo": {"normal": one, "low_rank": three},
        "ess": {"normal": two},
        "relaxed": Table({"elbo": {"normal": three}}, "{quantity}_{variant}_relaxed"),
        "digits": Table(
            {"speedup": {"upright": two}, "start": {"upright": one}},
            {"speedup": "{quantity}_{variant}", "start": "{variant}_{quantity}"},
        ),
    }
    flat, tables = flatten(metrics)
    assert flat["elbo_low_rank"] == {"value": 3.0, "se": 0.5, "n": 9}
    names = ["steps", "elbo_normal", "elbo_low_rank", "ess_normal", "elbo_normal_relaxed"]
    assert list(flat) == [*names, "speedup_upright", "upright_start"]
    assert tables == {
        "": {
            "elbo": {"normal": "elbo_normal", "low_rank": "elbo_low_rank"},
            "ess": {"normal": "ess_normal"},
        },
        "relaxed": {"elbo": {"normal": "elbo_normal_relaxed"}},
        "digits": {
            "speedup": {"upright": "speedup_upright"},
            "start": {"upright": "upright_start"},
        },
    }
    write_record("part-whole/digits", flat, tables=tables, about="vae", folder=tmp_path, **REST)
    record = read_record("part-whole/digits", tmp_path)
    assert (record["tables"], record["about"]) == (tables, "vae")


def test_two_numbers_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two metrics are named 'elbo_normal'"):
        flatten({"elbo_normal": (1.0, None, 1), "elbo": {"normal": (2.0, None, 1)}})


def test_every_published_record_with_several_variants_has_tables():
    """Of numbers, only those that stand for themselves are in no table."""
    results = Path(__file__).resolve().parents[2] / "results"
    for path in results.glob("*/*.json"):
        record = read_record(f"{path.parent.name}/{path.stem}", results)
        cells = [row for grid in record["tables"].values() for row in grid.values()]
        alone = len(record["metrics"]) - sum(map(len, cells))
        assert alone <= 7, path


def test_what_is_no_record_is_said_to_be_none(tmp_path):
    with pytest.raises(ValueError, match="reproduce part-whole/digits"):
        read_record("part-whole/digits", tmp_path)
    path = write_record("part-whole/digits", METRICS, folder=tmp_path, **REST)
    path.write_text(json.dumps({"experiment": "part-whole/digits"}))
    with pytest.raises(ValueError, match="lacks command"):
        read_record("part-whole/digits", tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not a record"):
        read_record("part-whole/digits", tmp_path)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*.json")), ids=lambda p: p.stem)
def test_a_record_has_an_experiment_here_or_the_commit_that_has_it(path):
    record = json.loads(path.read_text())
    at_head = record["command"].startswith("python benchmarks/")
    at_head |= record["experiment"] in list_experiments()
    assert at_head != bool(re.fullmatch("[0-9a-f]{8}", record.get("commit", "")))
    if record["experiment"] in list_experiments():  # and its command is understood
        arguments = shlex.split(record["command"])
        assert arguments[:3] == ["capsule-zoo", "reproduce", record["experiment"]]
        texts = [arguments[i + 1] for i, argument in enumerate(arguments) if argument == "--set"]
        settings = dict(text.split("=", 1) for text in texts)
        assert set(settings) <= set(find_experiment(record["experiment"]).settings)
