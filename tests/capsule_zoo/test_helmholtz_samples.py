"""Gibbs chains against ancestral draws, in miniature, and what the numbers must obey."""

import pytest
import torch
from miniature import few_digits

from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.capsule_helmholtz import headline as capsule_helmholtz_samples
from capsule_zoo.experiments.capsule_helmholtz.headline import chains, extremes
from capsule_zoo.records import read_record
from capsule_zoo.registry import create, save

ROWS = ["train", "ancestral", "gibbs_1", "gibbs_3", "from_digits_1", "from_digits_3"]


@pytest.fixture
def small_entry():
    torch.manual_seed(0)
    return create("capsule-helmholtz", image_shape=(1, 8, 8), capsules=(2, 3), units=2)


def test_samples_measures_every_row(monkeypatch, small_entry, tmp_path):
    few = few_digits(120, 60, size=8)
    monkeypatch.setattr(capsule_helmholtz_samples, "load_dataset", lambda *args, **kwargs: few)
    save(small_entry, tmp_path / "run", data="digits", seed=0)
    options = Options(run=str(tmp_path / "run"), progress=False)
    _, path = reproduce("capsule-helmholtz/samples", options, folder=tmp_path, sweeps=(1, 3))
    metrics = read_record("capsule-helmholtz/samples", tmp_path)["metrics"]
    for row in ROWS:
        assert metrics[f"frechet_{row}"]["value"] > 0 and metrics[f"frechet_{row}"]["n"] == 30
        assert 0 <= metrics[f"blank_{row}"]["value"] + metrics[f"full_{row}"]["value"] <= 1
    assert metrics["frechet_train"]["value"] < metrics["frechet_ancestral"]["value"]
    assert path.with_suffix(".png").is_file()


def test_a_chain_forgets_its_start_as_fast_as_its_guide_does(small_entry):
    """With a guide that ignores the image, one sweep already gives draws of the machine's mean."""
    model, guide = small_entry.model, small_entry.guide
    with torch.no_grad():
        for layer in guide.layers:
            layer.coupling.weight.zero_()
            layer.coupling.switch_weight.zero_()
    top = guide.layers[-1]
    with torch.no_grad():  # recognition of the top layer is now its prior
        top.switch_bias.copy_(model.layers[0].switch_bias)
        top.hidden_bias.zero_()
    expected = model(batch_size=4000).mean(0)
    for start in (torch.zeros(4000, 1, 8, 8), torch.ones(4000, 1, 8, 8)):
        for drawn in chains(small_entry, start, (1, 2, 5), seed=0).values():
            assert (drawn.mean(0) - expected).abs().max() < 5.5 * 0.75 / 4000**0.5


def test_sweeps_are_counted(small_entry, monkeypatch):
    """Each chain takes one sweep less with pixels, and the last one for its mean image."""
    taken = []
    monkeypatch.setattr(
        type(small_entry.guide), "gibbs", lambda self, x, steps: taken.append(steps) or x
    )
    found = chains(small_entry, torch.zeros(7, 1, 8, 8), (1, 10, 100), seed=0)
    assert taken == [0, 9, 90] and list(found) == [1, 10, 100]
    assert all(drawn.shape == (7, 1, 8, 8) for drawn in found.values())


def test_blank_and_full_are_relative_to_the_ink_of_digits():
    digits = torch.linspace(0.1, 0.3, 1001).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    drawn = torch.tensor([0.0, 0.05, 0.2, 0.25, 0.31]).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    found = extremes(drawn, digits)
    assert found["blank"][0] == pytest.approx(0.4) and found["full"][0] == pytest.approx(0.2)
    assert extremes(digits, digits)["blank"][0] < 0.002
