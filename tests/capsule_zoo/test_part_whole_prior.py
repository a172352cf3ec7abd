"""The study of the prior in miniature, and what its numbers must obey."""

import pytest
import torch
from miniature import few_digits

from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.common.findings import ratio
from capsule_zoo.experiments.part_whole import prior as part_whole_prior
from capsule_zoo.models import Capsules
from capsule_zoo.models.parts import poses
from capsule_zoo.records import read_record
from capsule_zoo.registry import create, save

KINDS = ["train", "test", "parts_kept", "parents_kept", "objects_kept"]
KINDS += ["part_whole", "part_whole_fitted", "vae", "vae_fitted"]


@pytest.fixture
def small_digits(monkeypatch):
    few = few_digits(120, 60)
    monkeypatch.setattr(part_whole_prior, "load_dataset", lambda *args, **kwargs: few)
    return few


@pytest.fixture
def small_entry():
    torch.manual_seed(0)
    sizes = dict(channels=6, width=8, heads=2, blocks=1, inducing=3)
    return create("part-whole", objects=3, parts=4, guide=sizes)


def test_prior_measures_every_kind_of_sample(small_digits, small_entry, tmp_path):
    save(small_entry, tmp_path / "run", data="digits", seed=0)
    options = Options(minutes=0.01, run=str(tmp_path / "run"), progress=False)
    _, path = reproduce("part-whole/prior", options, folder=tmp_path)
    metrics = read_record("part-whole/prior", tmp_path)["metrics"]
    for kind in KINDS:
        assert metrics[f"frechet_{kind}"]["value"] > 0 and metrics[f"frechet_{kind}"]["se"] > 0
        assert metrics[f"frechet_{kind}"]["n"] == 30
        assert 0 < metrics[f"confidence_{kind}"]["value"] <= 1
        assert 1 <= metrics[f"classes_{kind}"]["value"] <= 10
    for name in ("part_whole", "vae"):
        assert metrics[f"elbo_{name}"]["value"] < metrics[f"iwae_50_{name}"]["value"]
        assert metrics[f"top_gain_{name}"]["value"] > 0
    assert path.with_suffix(".png").is_file()
    latent = 7 * small_entry.model.levels[0].size
    vae = part_whole_prior.autoencoder(small_entry, small_digits, options, minutes=0.005)
    assert vae.model.latent == latent and vae.model.sigma_image == small_entry.model.sigma_image


def test_share_lost_is_of_what_the_parts_explain(small_digits, small_entry):
    images = small_digits.test.images
    found = part_whole_prior.predicted(small_entry, images, seed=0, redraws=10)
    inferred, redrawn, background = (
        found[f"log_likelihood_{name}"][0] for name in ("inferred", "redrawn", "background")
    )
    share, error, count = found["share_lost"]
    assert share == pytest.approx((inferred - redrawn) / (inferred - background), rel=1e-4)
    assert error > 0 and count == len(images)


def test_ratio_of_means_has_the_spread_of_repeated_samples():
    torch.manual_seed(0)
    whole = 5 + torch.randn(500, 400)
    part = 0.3 * whole + torch.randn(500, 400)
    found = [ratio(*pair) for pair in zip(part, whole, strict=True)]
    shares, errors, _ = (torch.tensor(column) for column in zip(*found, strict=True))
    assert shares.mean().item() == pytest.approx(0.3, abs=0.003)
    assert errors.mean().item() == pytest.approx(shares.std().item(), rel=0.2)  # known to 3 %


def test_a_part_drawn_from_its_parent_lies_at_the_parent_s_vote(small_entry):
    """Where deviations vanish, redrawing keeps what the votes say and leaves objects alone."""
    model = small_entry.model
    selection = model.selections[0]
    with torch.no_grad():
        selection.raw_scale.fill_(-40.0)
        selection.presence_logits.fill_(40.0)
    selection.sigma_min = 1e-4
    objects = Capsules(torch.ones(5, 3), poses.identity_like(torch.zeros(1)) + torch.randn(5, 3, 6))
    with torch.no_grad():
        votes = selection(objects, relaxed=False).vote[:, :, 1:]
    parents = torch.randint(3, (5, 4))
    placed = votes.gather(2, parents[..., None, None].expand(5, 4, 1, 6)).squeeze(2)
    parsed = {
        "object_presence": objects.presence,
        "object_pose": objects.pose,
        "part_presence": torch.ones(5, 4),
        "part_pose": placed,
    }
    redrawn = part_whole_prior.redrawn_from_parents(model, parsed, seed=1)
    assert torch.equal(redrawn["part_parent"], parents + 1)
    torch.testing.assert_close(redrawn["part_pose"], placed, atol=1e-3, rtol=0)
    assert torch.equal(redrawn["object_pose"], objects.pose)
