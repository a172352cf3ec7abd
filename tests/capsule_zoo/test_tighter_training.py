"""Training under Gauss-Newton laws: whose bound teaches the model, and whose the guide."""

import pytest
import torch
from miniature import few_digits

from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.zoo import tighter_training
from capsule_zoo.experiments.zoo.tighter_training import Tightened
from capsule_zoo.inference import ImportanceWeightedELBO, gauss_newton
from capsule_zoo.inference.objectives.base import loss_per_image
from capsule_zoo.records import read_record
from capsule_zoo.registry import create

TINY = dict(images=2, simulated=2, chains=1, temperatures=2, particles=2, refinement=1, modes=1)
SMALL = dict(batch_size=8, particles=2, sizes=dict(latent=2, channels=3, hidden=6))
ROWS = "encoder", "importance_weighted", "gauss_newton", "weighted_newton", "throughout"


def gradients(module):
    """Return the gradients of all parameters as one vector, and delete them."""
    found = torch.cat([p.grad.flatten() for p in module.parameters()])
    module.zero_grad()
    return found


def test_the_model_learns_under_the_laws_and_the_guide_under_its_own_bound():
    torch.manual_seed(0)
    entry = create("vae", image_shape=(1, 8, 8), latent=2, channels=3, hidden=6)
    pair, images = (entry.model, entry.guide), torch.rand(5, 1, 8, 8)
    torch.manual_seed(1)
    loss = loss_per_image(Tightened(entry.objective, 3), *pair, images)
    loss.backward()
    of_model, of_guide = map(gradients, pair)
    assert all(p.requires_grad for module in pair for p in module.parameters())
    torch.manual_seed(1)
    laws = gauss_newton(*pair, images, steps=0, climb=1)
    tighter = loss_per_image(ImportanceWeightedELBO(3), entry.model, laws, images)
    tighter.backward()
    torch.testing.assert_close(of_model, gradients(entry.model))
    assert all(p.grad is None or not p.grad.any() for p in entry.guide.parameters())
    own = loss_per_image(entry.objective, *pair, images)
    own.backward()
    torch.testing.assert_close(of_guide, gradients(entry.guide))
    torch.testing.assert_close(loss, tighter + own)
    assert tighter < own  # the laws are tighter than an encoder that has learned nothing


def test_all_rows_are_annealed_and_gains_are_over_the_encoder(monkeypatch, tmp_path):
    few = few_digits(32, 8, size=12)
    monkeypatch.setattr(tighter_training, "load_dataset", lambda name, root: few)
    options = Options(progress=False, processes=1, minutes=0.004)
    reproduce("zoo/tighter-training", options, folder=tmp_path, seeds=2, annealing=TINY, **SMALL)
    found = read_record("zoo/tighter-training", tmp_path)["metrics"]
    kinds = "lower", "gap", "lost_elbo", "updates", "gain"
    assert set(found) == {f"{k}_{row}" for k in kinds for row in ROWS} - {"gain_encoder"}
    for row in ROWS[1:]:
        over = found[f"lower_{row}"]["value"] - found["lower_encoder"]["value"]
        assert found[f"gain_{row}"]["value"] == pytest.approx(over)
        assert found[f"gain_{row}"]["n"] == 2 and found[f"gain_{row}"]["se"] > 0
