"""Nothing overflows: many iterations, extreme votes, absent children, long training; float32."""

import pytest
import torch

from capsule_zoo.data import load_dataset
from capsule_zoo.guides import DynamicRouting, EMRouting, ExactLabel, VBRouting
from capsule_zoo.guides.learned_routing import LEARNED
from capsule_zoo.inference import Checks, Inputs, fit
from capsule_zoo.models import MatrixCapsules
from capsule_zoo.models.routing.parent_distribution import ParentDistribution
from capsule_zoo.models.routing.votes import Votes

B, I, J, D = 2, 9, 3, 16  # noqa: E741
ROUTINGS = [EMRouting, lambda n: EMRouting(n, e_step="exact"), VBRouting, DynamicRouting]
ROUTINGS += [lambda n: EMRouting(n, anneal="linear", costs="standardized")]
ROUTINGS += [lambda _, kind=kind: kind() for kind in LEARNED.values()]
VOTES = {
    "of unit size": lambda: torch.randn(B, I, J, D),
    "huge": lambda: 1e4 * torch.randn(B, I, J, D),
    "tiny": lambda: 1e-8 * torch.randn(B, I, J, D),
    "all equal": lambda: torch.ones(B, I, J, D),
    "all zero": lambda: torch.zeros(B, I, J, D),
    "at two places far apart": lambda: 1e4 * torch.randn(B, I, 1, 1).sign().expand(B, I, J, D),
    "of one child": lambda: torch.randn(B, 1, J, D),
}
PRESENCES = {"there": 1.0, "almost absent": 1e-30, "absent": 0.0}


@pytest.mark.parametrize("presence", PRESENCES)
@pytest.mark.parametrize("kind", VOTES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_beliefs_and_their_gradients_are_finite(routing, kind, presence):
    values = VOTES[kind]().requires_grad_()
    probability = torch.full(values.shape[:2], PRESENCES[presence], requires_grad=True)
    betas = [torch.zeros(J, requires_grad=True) for _ in range(2)]
    belief = routing(30)(Votes.dense(values, probability), ParentDistribution(*betas))
    assert all(torch.isfinite(part).all() for part in belief)
    total = belief.mean.sum() + belief.presence.sum()
    inputs = [values, probability, *betas]
    slopes = torch.autograd.grad(total, inputs, allow_unused=True)
    assert all(torch.isfinite(slope).all() for slope in slopes if slope is not None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("iterations", range(1, 6))
def test_a_thousand_steps_of_training_stay_finite(iterations, seed):
    """`fit` refuses to go on where a loss or a gradient is not finite."""
    digits = load_dataset("digits", size=17)
    torch.manual_seed(seed)
    sizes = dict(features=8, capsules=(4, 4, 4), margin_steps=100)
    model = MatrixCapsules(digits.image_shape, routing=EMRouting(iterations), **sizes)
    settings = dict(
        steps=1000,
        batch_size=16,
        lr=0.01,
        inputs=Inputs(labels=True),
        checks=Checks(progress=False),
        seed=seed,
    )
    fit(model, ExactLabel(model), digits.train, **settings)
    assert all(torch.isfinite(p).all() for p in model.parameters())
