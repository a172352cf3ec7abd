"""Constellations on the command line, in pictures and in the experiment."""

import numpy as np
import pytest
import torch

from capsule_zoo.data import draw_scenes, load_dataset
from capsule_zoo.data.points import SHAPES, Scenes
from capsule_zoo.experiments import Options, find_experiment
from capsule_zoo.experiments.constellations import parsing as experiment
from capsule_zoo.guides.constellations.exact import Matchings
from capsule_zoo.inference import SleepPhase
from capsule_zoo.records import flatten
from capsule_zoo.registry import create
from capsule_zoo.runs.objects import parse_file
from capsule_zoo.zoo.constellations.figures import scene_parses, scene_samples, template_rows


@pytest.fixture
def file(tmp_path):
    """Return a file of six scenes of squares and triangles, far from the square [-1, 1]^2."""
    shapes = [SHAPES["square"], SHAPES["triangle"]]
    scenes = draw_scenes(6, 0.02, templates=shapes, seed=1)
    templates = np.full((2, 4, 2), np.nan)
    templates[0], templates[1, :3] = shapes
    path = tmp_path / "scenes.npz"
    np.savez(
        path,
        points=700 + 300 * scenes.points.nan_to_num(),
        present=scenes.present,
        templates=templates,
    )
    return path, scenes


@pytest.mark.parametrize("guide", ["exact", "ransac", "sinkhorn"])
def test_parse_file_writes_the_object_and_corner_of_every_point(file, guide, tmp_path):
    path, scenes = file
    summary = parse_file(path, tmp_path / "parsed.npz", guide, sigma=0.02)
    assert summary["scenes"] == 6 and summary["points"] == int(scenes.present.sum())
    with np.load(tmp_path / "parsed.npz") as archive:
        assert np.array_equal(archive["objects"], scenes.objects)
        assert archive["log_evidence"].mean() == pytest.approx(summary["log_evidence"])
        triangles = (scenes.objects == 1).numpy()
        assert np.array_equal(archive["corners"][triangles], scenes.corners.numpy()[triangles])


def test_scenes_of_a_file_are_trained_on_in_the_square_and_divided_at_random(file, tmp_path):
    path, scenes = file
    with pytest.warns(UserWarning, match=r"templates in .*scenes\.npz are not read.*--set objects"):
        data = load_dataset(f"constellations:{path}", validation=1)
    points = torch.cat([data.train.images, data.validation.images, data.test.images])
    assert (len(data.train), len(data.validation), len(data.test)) == (4, 1, 1)
    assert points.nan_to_num(9).amin((1, 2)).tolist() == [-1] * 6
    assert points.nan_to_num(-9).amax((1, 2)).tolist() == [1] * 6
    expected = scenes.points.float()
    for scene in points:
        distance = (scene - expected).abs().nan_to_num(0).amax((1, 2))
        same = (scene.isnan() == expected.isnan()).all(2).all(1)
        assert distance[same].min() < 1e-5
    ramp = torch.linspace(0, 1, 100)[:, None, None] * torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    ramp[:, 1, 1] = 1
    np.savez(tmp_path / "sorted.npz", points=ramp.numpy())
    test = load_dataset(f"constellations:{tmp_path / 'sorted.npz'}").test.images[:, 0, 0]
    assert len(test) == 20 and test.min() < 0 and (test + 1).mean() < 1.5
    np.savez(tmp_path / "single.npz", points=ramp[:1].numpy())
    with pytest.raises(ValueError, match="holds 1 scene, but 2 or more are needed"):
        load_dataset(f"constellations:{tmp_path / 'single.npz'}")


POINTS, ALL_THERE = np.random.default_rng(0).random((1, 5, 2)), np.ones((1, 5))
FILES = {  # arrays of a file of scenes, and what is said of it
    "five": (dict(points=POINTS, present=ALL_THERE), "scenes of 5 points"),
    "nan": (dict(points=POINTS * np.nan, present=ALL_THERE), "set present to 0"),
    "one": (dict(points=POINTS, present=[[1, 0, 0, 0, 0]]), "fewer than two points"),
    "same": (dict(points=POINTS * 0, present=ALL_THERE), "two points, or all in one place"),
    "mask": (dict(points=POINTS, present=np.ones((1, 4))), r"present must be \(1, 5\)"),
    "corner": (
        dict(points=POINTS, present=ALL_THERE, templates=np.zeros((1, 1, 2))),
        "template 0 has fewer than two different points",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_what_cannot_be_parsed_is_refused_and_writes_nothing(name, tmp_path):
    arrays, command = FILES[name]
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=command):
        parse_file(tmp_path / "x.npz", tmp_path / "out.npz", "exact")
    assert not (tmp_path / "out.npz").exists()


def test_files_and_guides_that_there_are_not_are_named(file, tmp_path):
    path, out = file[0], tmp_path / "out.npz"
    for arguments, message in (
        ((path, out, "exakt"), "did you mean 'exact'"),
        ((path, out, "amortized"), "give a run that was made by"),
        ((tmp_path / "none.npz", out), "there is no file"),
        ((path, path), "out must be a new file"),
        ((path, path.parent), "out must be a new file"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_file(*arguments)
    assert not out.exists()


def test_pictures_show_what_was_found():
    entry = create("constellations", sigma=0.02)
    points = draw_scenes(3, 0.02, seed=2).points
    figure = scene_parses(entry.model, entry.guide, points)
    assert len(figure.axes) == 3
    for axis, scene in zip(figure.axes, points, strict=True):
        dots = [line for line in axis.lines if line.get_marker() == "o"]
        drawn = np.concatenate([line.get_xydata() for line in dots])
        positions = scene[~scene[:, 0].isnan()].numpy()
        assert np.allclose(np.sort(drawn[:, 0]), np.sort(positions[:, 0]))
        for line in axis.lines:  # the corners of every template lie on points
            if line.get_marker() == "None":
                for corner in line.get_xydata():
                    assert np.abs(positions - corner).sum(1).min() < 0.15
    assert len(scene_samples(entry.model).axes) == 6


def test_the_experiment_says_how_good_the_exact_posterior_can_be(monkeypatch):
    monkeypatch.setattr(experiment, "SIGMAS", (0.25,))
    result = find_experiment("constellations/parse")(Options(progress=False), scenes=24)
    flat, _ = flatten(result.metrics)
    metrics = {name: (m["value"], m["se"], m["n"]) for name, m in flat.items()}
    for guide in ("exact", "ransac"):
        assert metrics[f"evidence_{guide}_025"][0] <= metrics["evidence_exact_025"][0] + 1e-6
        assert (
            0.5 < metrics[f"scenes_{guide}_025"][0] <= metrics[f"segmentation_{guide}_025"][0] <= 1
        )
    expected, error, count = metrics["expected_segmentation_025"]
    assert count == 24 and metrics["expected_scenes_025"][0] < expected <= 1
    accuracy = metrics["segmentation_exact_025"]
    assert abs(accuracy[0] - expected) < 5 * (accuracy[1] + error)
    assert {"noise_025", "ambiguous"} == result.figures.keys()
    with pytest.raises(ValueError, match="leave --run out"):
        find_experiment("constellations/parse")(Options(run="any"))
    assert torch.get_default_dtype() == torch.float32


def test_templates_are_drawn_with_their_noise():
    distribution = create("constellations", sigma=0.25).model.distribution()
    figure = template_rows({"one": distribution, "other": distribution})
    assert len(figure.axes) == 6
    for axis, template in zip(figure.axes[:3], distribution.templates, strict=True):
        assert len(axis.patches) == 1 + len(template)
        disk = axis.patches[1]
        assert disk.radius == pytest.approx(0.25 / template.radius)
        dots = axis.lines[0].get_xydata()
        size = np.sort(np.linalg.norm(dots, axis=1))
        assert np.allclose(size, template.corners.abs().sort()[0])


def test_training_of_a_guide_leaves_learned_templates_as_em_found_them():
    entry = create("constellations", learned=True).use_guide("amortized")
    (stage,) = entry.stages(entry)
    assert stage.prepare is not None and stage.settings["freeze"] == "model"
    assert isinstance(stage.settings["objective"], SleepPhase)
    constellations = create("constellations")
    assert constellations.stages(constellations) == []
    (stage,) = constellations.stages(constellations.use_guide("amortized"))
    assert stage.prepare is None and stage.settings["freeze"] == "model"


def one_wrong_of(points: int) -> tuple[Matchings, Scenes]:
    """Return a scene of many points, and a parse that has one of them wrong."""
    true = torch.zeros(1, points, dtype=torch.long)
    true[0, points // 2 :] = 1
    prediction = true.clone()
    prediction[0, 0] = 1
    here = torch.ones(1, points, dtype=torch.bool)
    scenes = Scenes(torch.zeros(1, points, 2), here, true, true)
    return Matchings(prediction, prediction, torch.zeros(1)), scenes


def test_a_scene_with_one_wrong_point_of_many_is_wrong():
    matchings, scenes = one_wrong_of(20)
    measured = experiment.compare_with_truth({"mine": matchings}, scenes, (0, 1), "01").numbers
    assert measured["segmentation"]["mine"][0] == pytest.approx(0.95)
    assert measured["scenes"]["mine"][0] == 0


def test_the_papers_count_absent_corners_as_right():
    accuracy, present = torch.tensor([0.5]), torch.tensor([[True, True, False, False]])
    assert experiment.count_absent_as_right(accuracy, present).item() == pytest.approx(0.75)
