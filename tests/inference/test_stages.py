"""Training in stages: as one run, resumed wherever it was stopped, and through the command line."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyro
import pytest
import torch
from toys import grouped, states

from capsule_zoo.data import Dataset, Split
from capsule_zoo.inference import CheckpointError
from capsule_zoo.inference.training.checkpoint import load_checkpoint, save_checkpoint
from capsule_zoo.inference.training.stages import Stage
from capsule_zoo.inference.training.stages import fit_stages as run_stages
from capsule_zoo.registry import Entry, create, small_settings


def fit_stages(stages, data, **settings):
    return run_stages(stages, data, **grouped(settings))


LIMITS = dict(steps=40, batch_size=10, progress=False)


def some_data(number: int = 30) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(number, 1, 12, 12, generator=generator)
    labels = torch.arange(number) % 3
    splits = (slice(0, 20), slice(20, 25), slice(25, number))
    return Dataset("noise", *(Split(images[s], labels[s]) for s in splits))


def made(seed: int = 0) -> Entry:
    pyro.set_rng_seed(seed)
    return create("shape-codes", **small_settings("shape-codes"))


def values(entry: Entry) -> dict[str, torch.Tensor]:
    return states(entry.model, entry.guide)


def changed(before: dict, after: dict) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_each_stage_trains_its_own_level():
    """Parts are not moved while objects learn, and the reverse; together both move."""
    entry, data = made(), some_data()
    stages = entry.stages(entry)
    lower = {n for n in values(entry) if any(w in n for w in ("template", "encoder", "pool"))}
    moved = []
    for stage in stages:
        before = values(entry)
        fit_stages([stage], data, **LIMITS | {"steps": 12})
        moved.append(changed(before, values(entry)))
    parts, objects, together, anew = moved
    assert parts >= lower
    above = ("1.infer_objects.body", "1.infer_objects.center", "0.kind_logits")
    assert not any(name.startswith(above) for name in parts)
    assert not (objects | anew) & lower
    assert objects >= {"0.shapes.pose_codes", "1.infer_objects.body.0.weight"}
    assert together >= lower | {"0.shapes.pose_codes", "1.infer_objects.body.0.weight"}


def test_a_run_has_the_steps_of_all_its_stages():
    entry = made()
    run = fit_stages(entry.stages(entry), some_data(), **LIMITS)
    needs = [stage.steps for stage in entry.stages(entry)]
    expected = sum(max(1, round(40 * steps / sum(needs))) for steps in needs)
    assert run.steps == len(run.history) == expected
    assert run.history["step"].tolist() == list(range(1, expected + 1))
    assert run.history["seconds"].is_monotonic_increasing
    assert run.stopped.startswith("reached")


def test_later_stages_get_the_steps_that_a_stage_leaves():
    entry = made()
    parts, objects, together, _ = entry.stages(entry)
    plan = [parts, replace(objects, steps=parts.steps, most=3), together]
    needs = [stage.steps for stage in plan]
    first = round(40 * needs[0] / sum(needs))
    run = fit_stages(plan, some_data(), **LIMITS)
    assert run.steps == 40
    epochs = run.history["epoch"].diff()  # a stage begins at epoch 0, of which each has two steps
    begins = [0, *epochs.index[epochs < 0].tolist()]
    assert begins == [0, first, first + 3]


class Stopped(Exception):
    """Raised by a checkpoint place, as if the machine had been turned off."""


def stopping(path: Path, stage: int) -> Callable[[dict], None]:
    """Return a place that writes checkpoints and raises `Stopped` in a stage."""

    def place(tree: dict) -> None:
        save_checkpoint(path, tree)
        if tree["config"]["stage"] == stage:
            raise Stopped

    return place


@pytest.fixture(scope="module")
def whole():
    """Return the values and losses of a run without a stop."""
    pyro.clear_param_store()
    entry = made()
    run = fit_stages(entry.stages(entry), some_data(), every=4, **LIMITS)
    return values(entry), run.history["loss"].tolist()


@pytest.mark.parametrize("stage", range(4))
def test_a_run_resumed_in_any_stage_ends_like_one_without_a_stop(stage, whole, tmp_path):
    path, entry, limits = tmp_path / "run.safetensors", made(), dict(every=4, **LIMITS)
    with pytest.raises(Stopped):
        place = stopping(path, stage)
        fit_stages(entry.stages(entry), some_data(), checkpoint=place, **limits)
    assert load_checkpoint(path)["config"]["stage"] == stage
    twin = made(seed=9)
    run = fit_stages(twin.stages(twin), some_data(), resume=path, checkpoint=path, **limits)
    assert not changed(whole[0], values(twin))
    assert run.history["loss"].tolist() == whole[1]


def test_a_checkpoint_of_other_stages_is_refused(tmp_path):
    entry = made()
    stages = entry.stages(entry)
    path = tmp_path / "run.safetensors"
    fit_stages(stages, some_data(), checkpoint=path, **LIMITS)
    with pytest.raises(CheckpointError, match="with these 2 stages"):
        fit_stages(stages[:2], some_data(), resume=path, **LIMITS)


def stages_of(entry: Entry, *needs: int) -> list[Stage]:
    """Return as many stages as `needs`, in which a whole pair is trained."""
    return [Stage(f"stage {n}", n, entry.model, entry.guide) for n in needs]


def test_a_run_with_the_steps_that_its_stages_need_is_divided_exactly_and_says_nothing():
    entry = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = fit_stages(stages_of(entry, 9, 3, 5), some_data(), **LIMITS | {"steps": 17})
    epochs = run.history["epoch"].diff()
    assert epochs.index[epochs < 0].tolist() == [9, 12]


def test_stages_that_were_cut_short_are_named_once_with_what_they_need():
    text = r"3 were cut short \(4 of 9; 1 of 2; 3 of 5 steps\).* --minutes 21 --steps 16"
    with pytest.warns(UserWarning, match=text) as caught:
        limits = LIMITS | {"steps": 8, "minutes": 9}
        fit_stages(stages_of(made(), 9, 2, 5), some_data(), **limits)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


def test_a_resumed_run_still_names_a_stage_that_was_cut_short_before(tmp_path):
    path, entry = tmp_path / "run.safetensors", made()
    settings = dict(every=1, batch_size=10, progress=False, steps=8)
    with pytest.raises(Stopped):
        place = stopping(path, 1)
        fit_stages(stages_of(entry, 12, 4), some_data(), checkpoint=place, **settings)
    with pytest.warns(UserWarning, match=r"^stage 1 of 2 was cut short \(6 of 12 steps\)"):
        fit_stages(stages_of(entry, 12, 4), some_data(), resume=path, **settings | {"steps": 20})


def test_a_stage_that_ends_for_lack_of_gain_is_not_called_short():
    entry = made()
    stages = [replace(s, settings={"lr": 1e-12}) for s in stages_of(entry, 30, 30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = dict(every=1, patience=1, steps=50, batch_size=10, progress=False)
        run = fit_stages(stages, some_data(), **options)
    assert run.steps < 50
