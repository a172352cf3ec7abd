"""Time to quality, in miniature: which runs are measured, and which of them reach a goal first."""

import pytest
from miniature import few_digits, names_in_record

from capsule_zoo.experiments import Options
from capsule_zoo.experiments.shape_codes import speed as shape_codes_speed
from capsule_zoo.records import read_record
from capsule_zoo.registry import small_sizes

LENGTHS = {"shape-codes": (0.005, 0.01), "stacked-capsule-autoencoder": (0.005,), "vae": (0.005,)}


def sizes(name):
    own = small_sizes(name)
    own.pop("image_shape", None)
    return own


def test_every_run_is_timed_and_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(shape_codes_speed, "load_dataset", lambda *a, **k: few_digits(60, 12))
    options = Options(progress=False, processes=1, minutes=0.025)
    settings = dict(
        lengths=LENGTHS, probed=40, samples=8, epochs=1, sizes={n: sizes(n) for n in LENGTHS}
    )
    metrics, figures = names_in_record("shape-codes/time-to-quality", options, tmp_path, **settings)
    for name, lengths in LENGTHS.items():
        for quantity in ("core_minutes", "updates", "probe", "frechet"):
            stem = f"{quantity}_{name.replace('-', '_')}"
            assert {f"{stem}_{minutes:g}".replace(".", "_") for minutes in lengths} <= metrics
    assert figures == {""}
    found = read_record("shape-codes/time-to-quality", tmp_path)["metrics"]
    assert all(n["value"] > 0 for name, n in found.items() if name.startswith("core_minutes"))


def row(minutes, probe, distance):
    return dict(core_minutes=(minutes, None, 1), probe=(probe, 0.01, 9), frechet=(distance, 1.0, 9))


def test_the_first_run_that_reaches_a_goal_counts():
    rows = [row(1, 0.90, 90), row(2, 0.96, 55), row(4, 0.94, 61), row(8, 0.96, 45)]
    found = shape_codes_speed.first_times(rows)
    assert found == {"minutes_to_probe_095": (2, None, 1), "minutes_to_frechet_60": (2, None, 1)}


def test_an_unknown_entry_is_refused():
    with pytest.raises(ValueError, match="did you mean 'shape-codes'"):
        wrong = shape_codes_speed.Settings(lengths={"shape-code": (1,)})
        shape_codes_speed.time_to_quality(Options(progress=False), wrong)
