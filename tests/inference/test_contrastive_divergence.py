"""Contrastive divergence against the enumerated likelihood of small machines."""

import pyro
import pytest
import torch
from small_rbms import PAIRS, binary_images, log_masses, small

from capsule_zoo.data import Dataset, Split
from capsule_zoo.guides import ExactSwitches, MeanFieldSwitches
from capsule_zoo.inference import Checks, ContrastiveDivergence, fit, log_partition
from capsule_zoo.models import RBM, CapsuleRBM

KINDS = pytest.mark.parametrize("kind", [CapsuleRBM, RBM])
MODES = [
    dict(),
    dict(persistent=True),
    dict(persistent=True, centered=True),
    dict(persistent=True, tempering=(1, 0.7, 0.3)),
]


@KINDS
def test_chains_started_at_the_exact_distribution_give_the_likelihood_gradient(kind):
    """Sweeps keep the distribution, so the objective's own gradient errs by chance alone."""
    model, images, number = small(kind=kind), binary_images(), 40_000
    masses, listed = log_masses(model, PAIRS[0])
    distribution = masses.softmax(0).detach()
    objective = ContrastiveDivergence(k=2, persistent=True, chains=number)
    torch.manual_seed(0)
    start = listed[torch.multinomial(distribution, number, replacement=True)]
    state = model.posterior(start).sample()
    objective.load_state_dict({n: v.detach() for n, v in state._asdict().items()})
    parameters = list(model.parameters())
    for _ in range(2):  # the second loss goes on from where the first one left the chains
        loss = objective.differentiable_loss(model, ExactSwitches(model), images)
    gradients = torch.autograd.grad(loss, parameters)
    energies = model.free_energy(listed)
    rows = [torch.autograd.grad(f, parameters, retain_graph=True) for f in energies]
    likelihood = -model.free_energy(images).mean() - masses.logsumexp(0)
    for i, exact in enumerate(torch.autograd.grad(-likelihood, parameters)):
        per_image = torch.stack([row[i] for row in rows])
        mean = torch.einsum("s,s...->...", distribution, per_image)
        variance = torch.einsum("s,s...->...", distribution, (per_image - mean).square())
        assert ((gradients[i] - exact).abs() <= 5.5 * (variance / number).sqrt() + 1e-12).all()


def test_with_mean_field_the_data_term_is_its_variational_free_energy():
    """The surrogate differs from the exact guide's surrogate by the gap between the two."""
    model, images = small(), binary_images()
    guides = ExactSwitches(model), MeanFieldSwitches(model)
    losses = []
    for guide in guides:
        pyro.set_rng_seed(2)
        losses.append(ContrastiveDivergence(k=3).differentiable_loss(model, guide, images))
    gap = (guides[1].free_energy(images) - guides[0].free_energy(images)).mean()
    torch.testing.assert_close(losses[1] - losses[0], gap)
    assert gap > 0.001


@pytest.mark.parametrize("options", MODES, ids=str)
def test_training_raises_the_exact_likelihood(options):
    torch.manual_seed(0)
    model = CapsuleRBM(4, 2, 2)
    images = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0.0], [1, 1, 1, 0]]).view(3, 1, 2, 2)
    images = images.repeat(20, 1, 1, 1)

    def log_likelihood():
        return -model.free_energy(images).mean().item() - log_partition(model).value

    before = log_likelihood()
    fit(
        model,
        ExactSwitches(model),
        images,
        objective=ContrastiveDivergence(**options),
        optimizer=torch.optim.SGD,
        lr=0.3,
        steps=600,
        checks=Checks(progress=False),
    )
    assert before < -2.7 and log_likelihood() > -1.6  # log 16 = 2.77, the optimum is log 3 = 1.10


@pytest.mark.parametrize("options", MODES[1:], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_chains_and_all(options, tmp_path):
    def run(model, steps, **places):
        fit(
            model,
            ExactSwitches(model),
            binary_images(30).float(),
            objective=ContrastiveDivergence(chains=10, **options),
            optimizer=torch.optim.SGD,
            lr=0.1,
            batch_size=10,
            steps=steps,
            checks=Checks(progress=False, **places),
        )
        return model.state_dict()

    def fresh():
        torch.manual_seed(1)
        return CapsuleRBM(4, 2, 2)

    whole = run(fresh(), steps=8)
    path = tmp_path / "half.safetensors"
    run(fresh(), steps=4, checkpoint=path)
    resumed = run(fresh(), steps=8, resume=path)
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


@pytest.mark.parametrize("options", MODES[1:], ids=str)
def test_held_out_checks_leave_the_chains_alone(options):
    images, states = Split(binary_images(30).float(), torch.zeros(30, dtype=torch.int64)), []
    for validation in (images[:0], images[:10]):
        torch.manual_seed(1)
        model = CapsuleRBM(4, 2, 2)
        fit(
            model,
            ExactSwitches(model),
            Dataset("noise", images, validation, images),
            objective=ContrastiveDivergence(chains=10, **options),
            lr=0.1,
            batch_size=10,
            steps=6,
            checks=Checks(every=2, progress=False),
        )
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_gaussian_training_cannot_leave_the_normalizable_machines():
    torch.manual_seed(0)
    model = CapsuleRBM(4, 2, 3, visible_family="gaussian", hidden_family="gaussian")
    images = torch.rand(20, 1, 1, 1).expand(-1, 1, 2, 2).contiguous()
    objective = ContrastiveDivergence(persistent=True, chains=20)
    with torch.no_grad():
        model.weight.add_(5)
    loss = objective.differentiable_loss(model, ExactSwitches(model), images)
    assert model.coupling_norm() < 1 and loss.isfinite()


def test_sparsity_charges_every_switch_that_is_on():
    model, images = small(), binary_images()
    losses = []
    for sparsity in (0.0, 0.7):
        torch.manual_seed(1)
        objective = ContrastiveDivergence(sparsity=sparsity)
        losses.append(objective.differentiable_loss(model, ExactSwitches(model), images))
    charge = 0.7 * model.switch_probabilities(images).sum(1).mean()
    torch.testing.assert_close(losses[1] - losses[0], charge, rtol=0, atol=1e-10)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(losses[1] - losses[0], parameters, allow_unused=True)
    wanted = torch.autograd.grad(charge, parameters, allow_unused=True)
    for gradient, expected in zip(gradients, wanted, strict=True):
        expected = torch.zeros_like(gradient) if expected is None else expected
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", MODES[1:], ids=str)
def test_a_state_is_taken_up_in_the_models_precision_and_place(options):
    """Checkpoints are read on the CPU; here in another precision, which would fail as loudly."""
    model = small()
    first, second = (ContrastiveDivergence(chains=5, **options) for _ in range(2))
    first.differentiable_loss(model, ExactSwitches(model), binary_images())
    state = first.state_dict()
    second.load_state_dict({n: v.float() if v.is_floating_point() else v for n, v in state.items()})
    loss = second.differentiable_loss(model, ExactSwitches(model), binary_images())
    assert loss.dtype == torch.float64 and loss.isfinite()
    assert all(second.state_dict()[name].dtype == value.dtype for name, value in state.items())
