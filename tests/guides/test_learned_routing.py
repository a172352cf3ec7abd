"""Routings that learn: the formulas of the papers, what a layer owns, what connections cost."""

from dataclasses import dataclass

import pytest
import torch
from pyro.infer import Trace_ELBO
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import normalize

from capsule_zoo import create, load
from capsule_zoo.guides import (
    DynamicRouting,
    Routing,
    SelfAttentionRouting,
    SelfRouting,
    UncertainRouting,
    Votes,
    best_belief,
)
from capsule_zoo.guides.learned_routing import LEARNED
from capsule_zoo.inference import CheckpointError
from capsule_zoo.inference.objectives.base import loss_per_image
from capsule_zoo.models import MatrixCapsules, specification
from capsule_zoo.models.routing.parent_distribution import ParentDistribution
from capsule_zoo.models.routing.votes import Windows
from capsule_zoo.registry import save_entry, small_settings

B, I, J, D = 3, 8, 4, 5  # noqa: E741
SIZES = {name: small_settings(name) for name in ("capsule-network", "matrix-capsules")}


def with_routing(name: str, routing: Routing) -> dict[str, object]:
    """Return small settings of an entry with a routing, which the model or the guide holds."""
    if name == "matrix-capsules":
        return {**SIZES[name], "routing": routing}
    return {**SIZES[name], "guide": {**SIZES[name]["guide"], "routing": routing}}


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def distribution(connections=None):
    betas = (torch.full((J,), beta).double() for beta in (0.2, -6.0))
    return ParentDistribution(*betas, 1.0, 0.05, connections)


def test_self_attention_is_the_papers():
    """C is the softmax over parents of the column sums of V V^T / sqrt(D), and s = V^T (C + B)."""
    values, added = rand(B, I, J, D), rand(1, J, I)
    scores = torch.einsum("bijd,bkjd->bjik", values, values).sum(3) / D**0.5  # (B, J, I)
    total = torch.einsum("bji,bijd->bjd", scores.softmax(1) + added, values)
    length = total.norm(dim=-1)
    belief = SelfAttentionRouting(fair=False)(Votes.dense(values), distribution(added))
    torch.testing.assert_close(belief.presence[:, 0], 1 - (-length).exp())
    torch.testing.assert_close(normalize(belief.mean[:, 0], dim=2), normalize(total, dim=2))
    torch.testing.assert_close(belief.responsibility[:, 0], scores.softmax(1))


def test_in_self_routing_a_child_chooses_by_its_own_vote():
    values, presence, gate = rand(B, I, J, D), torch.rand(B, I).double(), rand(D + 1, J, I)
    logits = torch.einsum("bijd,dji->bji", values, gate[:-1]) + gate[-1]
    fraction = (presence[:, None] * logits.softmax(1)).sum(2) / presence.sum(1, keepdim=True)
    belief = SelfRouting()(Votes.dense(values, presence), distribution(gate))
    torch.testing.assert_close(belief.responsibility[:, 0], logits.softmax(1))
    torch.testing.assert_close(belief.presence[:, 0], fraction)
    moved = values.clone()
    moved[:, 0] += 1
    other = SelfRouting()(Votes.dense(moved, presence), distribution(gate)).responsibility[:, 0]
    torch.testing.assert_close(other[..., 1:], belief.responsibility[:, 0, :, 1:])
    assert not torch.allclose(other[..., 0], belief.responsibility[:, 0, :, 0])


def test_uncertain_connections_are_the_prior_of_the_mixture():
    values, connections = rand(B, I, J, D), rand(2, J, I)
    votes = Votes.dense(values)
    belief = UncertainRouting()(votes, distribution(connections))
    coupling = connections[0].softmax(0).expand(B, 1, J, I)
    torch.testing.assert_close(belief, best_belief(votes, coupling, distribution()))


def test_the_cost_of_connections_is_the_divergence_from_their_prior():
    mean, log_scale = connections = rand(2, J, I)
    expected = kl_divergence(Normal(mean, log_scale.exp()), Normal(0.0, 1.0)).sum()
    torch.testing.assert_close(UncertainRouting(images=7).cost(connections), expected / 7)
    draw_connections = torch.stack(
        [UncertainRouting().draw_connections(connections)[0] for _ in range(4000)]
    )
    torch.testing.assert_close(draw_connections.mean(0), mean, rtol=0, atol=0.3)
    torch.testing.assert_close(draw_connections.std(0), log_scale.exp(), rtol=0.1, atol=0)


@pytest.mark.parametrize("name", SIZES)
def test_every_image_pays_its_part_of_the_connections_once(name):
    def loss(images):
        torch.manual_seed(0)
        entry = create(name, **with_routing(name, UncertainRouting(images=images)))
        entry.guide.eval()
        entry.model.eval()
        pictures = torch.rand(4, *entry.model.image_shape)
        labels = torch.tensor([0, 1, 0, 1])
        cost = loss_per_image(Trace_ELBO(), entry.model, entry.guide, pictures, labels)
        owner = [m for m in (*entry.model.modules(), entry.guide) if hasattr(m, "connections")]
        owned = [m.connections for m in owner if m.connections is not None]
        return cost, sum(UncertainRouting(images=images).cost(connection) for connection in owned)

    (dear, paid), (cheap, _) = loss(1), loss(10**9)
    assert paid > 1
    torch.testing.assert_close(dear - cheap, paid, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", LEARNED.values())
def test_connections_get_the_same_gradients_when_votes_are_computed_again(kind):
    def slopes(recompute):
        torch.manual_seed(0)
        sizes = {**SIZES["matrix-capsules"], "recompute": recompute}
        model = MatrixCapsules(routing=kind(), **sizes).double()
        for layer in (*model.layers, model.classes):
            layer.connections.data += 0.3 * torch.randn_like(layer.connections)
        torch.manual_seed(1)
        model.scores(torch.rand(3, *model.image_shape).double()).square().sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    gradients, again = slopes(False), slopes(True)
    assert {
        f"{layer}.connections" for layer in ("layers.0", "layers.1", "classes")
    } <= gradients.keys()
    for name, slope in gradients.items():
        assert slope.norm() > 0
        torch.testing.assert_close(slope, again[name])


@pytest.mark.parametrize("kind", LEARNED.values())
def test_a_child_in_many_windows_is_shared_among_them(kind):
    windows = Windows.sliding(5, 5, 3, 1)
    votes = Votes(rand(1, 9, J, D, 9), torch.ones(1, 9, 9).double(), windows)
    total = windows.gather_claims(kind()(votes, distribution()).responsibility.sum(2), 0.0).sum(2)
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("name", SIZES)
def test_another_routing_begins_anew_and_keeps_all_else(name):
    entry = create(name, **with_routing(name, SelfAttentionRouting(fair=True)))
    program = entry.model if entry.model.supervised else entry.guide
    images = torch.rand(3, *entry.model.image_shape)
    before = program.eval().scores(images)
    other = program.with_routing(SelfRouting())
    names = {key for key, _ in program.named_parameters() if "connections" not in key}
    assert names == {key for key, _ in other.named_parameters() if "connections" not in key}
    originals = dict(program.named_parameters())
    for key, parameter in other.named_parameters():
        assert (parameter is originals[key]) == ("connections" not in key)
    assert not torch.allclose(other.scores(images), before)
    torch.testing.assert_close(program.scores(images), before)
    dynamic = program.with_routing(DynamicRouting(2))
    assert not [key for key, _ in dynamic.named_parameters() if "connections" in key]
    same = program.with_routing(SelfAttentionRouting(fair=True))
    assert [p is originals[key] for key, p in same.named_parameters()] == [True] * len(originals)


@dataclass(frozen=True)
class Halves(Routing):
    """A routing of a reader, with a setting of its own."""

    fraction: float = 0.5

    def beliefs(self, votes, distribution):
        yield best_belief(votes, self.fraction * votes.uniform(), distribution)


@pytest.mark.parametrize("name", SIZES)
def test_a_routing_of_ones_own_is_saved_with_its_settings(name, tmp_path, monkeypatch):
    entry = create(name, **with_routing(name, Halves(1, fraction=0.25)))
    save_entry(entry, tmp_path)
    again = load(tmp_path)
    program = again.model.classes if again.model.supervised else again.guide
    assert program.routing == Halves(1, fraction=0.25)
    others = {k: kind for k, kind in specification.classes().items() if k != "Halves"}
    monkeypatch.setattr(specification, "classes", lambda: others)
    with pytest.raises(CheckpointError, match="if another module defines Halves, import it first"):
        load(tmp_path)


def test_a_routing_is_the_name_of_a_class_or_an_object():
    assert create("matrix-capsules", routing="SelfRouting").model.classes.routing == SelfRouting()
