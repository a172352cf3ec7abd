"""Hidden halves in miniature: what a short run leaves behind, and the baselines by hand."""

import math

import torch
from miniature import few_digits

from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.part_whole import missing as part_whole_missing
from capsule_zoo.experiments.part_whole.missing import (
    from_mean,
    from_training_images,
    hidden_in_turn,
)
from capsule_zoo.records import read_record

ROWS = ("part_whole_amortized", "part_whole", "vae_amortized", "vae", "training_images")
QUANTITIES = ("log_hidden", "squared_error", "squared_error_drawn", "ess")


def test_missing_measures_every_row(tmp_path, monkeypatch, unpainted):
    monkeypatch.setattr(part_whole_missing, "load_dataset", lambda *a, **k: few_digits(40, 4, 12))
    options = Options(minutes=0.01, progress=False)
    reproduce("part-whole/missing", options, folder=tmp_path, particles=3)
    metrics = read_record("part-whole/missing", tmp_path)["metrics"]
    assert set(metrics) == {f"{q}_{row}" for q in QUANTITIES for row in (*ROWS, "mean_image")}
    assert (tmp_path / "part-whole" / "missing.png").is_file()
    for row in ROWS:
        error, drawn = (metrics[f"{q}_{row}"]["value"] for q in QUANTITIES[1:3])
        assert error > 0 and drawn > 0


def test_every_side_is_hidden_in_turn():
    masks = hidden_in_turn(torch.zeros(5, 1, 4, 4))
    assert masks.shape == (5, 1, 4, 4) and (masks.sum((1, 2, 3)) == 8).all()
    assert not masks[0, 0, :, 0].any() and not masks[1, 0, :, 3].any()
    assert not masks[2, 0, 0].any() and not masks[3, 0, 3].any()
    assert torch.equal(masks[4], masks[0])


def test_the_mixture_around_training_images_is_bayes_rule():
    known = torch.rand(3, 1, 2, 2).double()
    images = torch.rand(2, 1, 2, 2).double()
    observed = torch.tensor([[[[True, False], [True, False]]], [[[False, False], [True, True]]]])
    sigma = 0.5
    found = from_training_images(known, images, observed, sigma)

    def density(image: torch.Tensor, center: torch.Tensor, mask: torch.Tensor) -> float:
        off = ((image - center)[mask] / sigma).square().sum().item()
        return math.exp(-off / 2) / (sigma * math.sqrt(2 * math.pi)) ** int(mask.sum())

    whole = torch.ones(1, 2, 2, dtype=torch.bool)
    for i, (image, mask) in enumerate(zip(images, observed, strict=True)):
        joint = sum(density(image, center, whole) for center in known)
        marginal = [density(image, center, mask) for center in known]
        assert math.isclose(found.log_hidden[i].item(), math.log(joint / sum(marginal)))
        mean = sum(w * c for w, c in zip(marginal, known, strict=True)) / sum(marginal)
        torch.testing.assert_close(found.images[i], torch.where(mask, image, mean))
        squares = sum((w / sum(marginal)) ** 2 for w in marginal)
        assert math.isclose(found.ess[i].item(), 1 / squares)
    single = from_training_images(known[:1], images, observed, sigma)
    mean = from_mean(known[:1], images, observed, sigma)
    for field in ("images", "drawn", "log_hidden", "ess"):
        torch.testing.assert_close(getattr(single, field), getattr(mean, field).double())
