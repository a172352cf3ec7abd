"""The study of the prior in miniature, and what its numbers must obey."""

import pytest
import torch

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Options, part_whole_prior, reproduce
from capsule_zoo.records import read_record
from capsule_zoo.registry import create, save

KINDS = ["train", "test", "parts_kept", "objects_kept", "part_whole", "part_whole_fitted"]
KINDS += ["vae", "vae_fitted"]


@pytest.fixture
def small_digits(monkeypatch):
    full = load_dataset("digits")
    few = Dataset("digits", full.train[:120], full.validation[:8], full.test[:60])
    monkeypatch.setattr(part_whole_prior, "load_dataset", lambda *args, **kwargs: few)
    return few


@pytest.fixture
def small_entry():
    torch.manual_seed(0)
    return create("part-whole", objects=3, parts=4)


def test_prior_measures_every_kind_of_sample(small_digits, small_entry, tmp_path):
    save(small_entry, tmp_path / "run", data="digits", seed=0)
    options = Options(minutes=0.01, run=str(tmp_path / "run"), progress=False)
    result, path = reproduce("part-whole/prior", options, folder=tmp_path)
    metrics = read_record("part-whole/prior", tmp_path)["metrics"]
    for kind in KINDS:
        assert metrics[f"frechet_{kind}"]["value"] > 0 and metrics[f"frechet_{kind}"]["se"] > 0
        assert metrics[f"frechet_{kind}"]["n"] == 30
        assert 0 < metrics[f"confidence_{kind}"]["value"] <= 1
        assert 1 <= metrics[f"classes_{kind}"]["value"] <= 10
    for name in ("part_whole", "vae"):
        assert metrics[f"elbo_{name}"]["value"] <= metrics[f"iwae_50_{name}"]["value"]
        assert metrics[f"top_gain_{name}"]["value"] > 0
    assert list(result.table.index) == KINDS
    assert path.with_suffix(".png").is_file()
    latent = 7 * small_entry.model.levels[0].size
    vae = part_whole_prior.autoencoder(small_entry, small_digits, options, 0.005)
    assert vae.model.latent == latent and vae.model.sigma_image == small_entry.model.sigma_image


def test_share_lost_is_of_what_the_parts_explain(small_digits, small_entry):
    images = small_digits.test.images
    found = part_whole_prior.foretold(small_entry, images, seed=0)
    inferred, redrawn, background = (
        found[f"log_likelihood_{name}"][0] for name in ("inferred", "redrawn", "background")
    )
    share, error, count = found["share_lost"]
    assert share == pytest.approx((inferred - redrawn) / (inferred - background), rel=1e-4)
    assert error > 0 and count == len(images)


def test_nothing_is_lost_where_objects_place_their_parts_exactly(small_digits, small_entry):
    """Parts that are always there, with templates too faint to be seen, are not missed."""
    with torch.no_grad():
        small_entry.model.template_logits.fill_(-40.0)
    found = part_whole_prior.foretold(small_entry, small_digits.test.images, seed=0)
    redrawn, background = (found[f"log_likelihood_{n}"][0] for n in ("redrawn", "background"))
    assert redrawn == pytest.approx(background, abs=1e-3)
