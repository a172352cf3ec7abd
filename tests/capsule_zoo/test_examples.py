"""The eight textbook programs: short, taken as they are, and with the evidence that they state."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from miniature import names_in_record

from capsule_zoo import examples
from capsule_zoo.experiments import Options
from capsule_zoo.experiments.zoo import examine as experiment
from capsule_zoo.experiments.zoo.examine import EXACT, NAMES
from capsule_zoo.inference.annealing.path import score_latents
from capsule_zoo.inference.examination.program import as_model
from capsule_zoo.inference.log_weight import log_density
from capsule_zoo.models.common.spaces import tile_batch
from capsule_zoo.records import read_record

BY_ROW = {"probabilistic_pca", "poisson_factors", "vae_digits"}
ON_GRID = {"poisson_factors": 6.0, "gaussian_mixture": 12.0, "probabilistic_pca": 6.0}


def test_there_are_eight_of_at_most_forty_lines():
    files = {path.stem: path for path in Path(examples.__file__).parent.glob("[a-z]*.py")}
    assert {*files} == {*NAMES} == {*EXACT} and len(files) == 8
    assert all(len(path.read_text().splitlines()) <= 40 for path in files.values())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "vae_digits"])
def test_a_program_is_taken_as_it_is(name):
    program, arguments, observed = import_module(f"capsule_zoo.examples.{name}").example()
    model, rows = as_model(program, *arguments, observed=observed)
    assert model.by_row == (name in BY_ROW) and rows.isfinite().all()


@pytest.mark.parametrize("name", ON_GRID)
def test_the_exact_evidence_is_that_of_the_program_on_a_grid(name):
    module = import_module(f"capsule_zoo.examples.{name}")
    program, arguments, observed = module.example()
    model, rows = as_model(program, *arguments, observed=observed)
    line = torch.linspace(-ON_GRID[name], ON_GRID[name], 101)
    grid = torch.cartesian_prod(line, line)
    site, row = model.latent_sites[0], rows[:1]
    shape = (len(grid), 1, 2) if site.event_dim else (len(grid), 2)
    values, copies = {site.name: grid.view(shape)}, tile_batch(row, len(grid))
    joint = log_density(score_latents(model, values, copies), copies).double()
    log_evidence = joint.logsumexp(0).item() + 2 * np.log((line[1] - line[0]).item())
    assert log_evidence == pytest.approx(EXACT[name](module, program, row.double()), abs=2e-3)


def test_eight_schools_have_the_evidence_of_quadrature():
    module = import_module("capsule_zoo.examples.eight_schools")
    rows = module.effects[None].double()
    assert EXACT["eight_schools"](module, module.program, rows) == pytest.approx(-31.3113, abs=1e-4)


@pytest.mark.long
def test_the_record_has_errors_gaps_and_seconds(tmp_path, monkeypatch):
    settings = dict(guides=("encoder",), rows=2, steps=20, fitting=5, temperatures=8, particles=100)
    monkeypatch.setattr(experiment, "NAMES", ("probabilistic_pca", "robust_regression"))
    monkeypatch.setattr(experiment, "SETTINGS", settings)
    options = Options(progress=False, processes=1)
    metric_names, figures = names_in_record("zoo/examine", options, tmp_path)
    measured = ("error", "gap_median", "seconds", "lower", "exact")
    names = ("ppca", "robust_regression")
    assert {f"{metric}_{name}" for metric in measured for name in names} <= metric_names
    assert {"gaps_below_half", "lost_elbo_ppca_encoder"} <= metric_names and figures == {""}
    metrics = read_record("zoo/examine", tmp_path)["metrics"]
    assert metrics["error_ppca"]["value"] < 0.5
