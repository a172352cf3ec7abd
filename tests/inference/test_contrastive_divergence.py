"""Contrastive divergence against the enumerated likelihood of small machines."""

import pyro
import pytest
import torch
from pyro.infer import SVI
from small_rbms import PAIRS, log_masses, small
from toys import Conjugate, LinearGuide

from capsule_zoo.data import Dataset, Split
from capsule_zoo.guides import ExactSwitches, MeanFieldSwitches
from capsule_zoo.inference import ContrastiveDivergence, fit, log_partition
from capsule_zoo.inference.centering import RunningMeans, centered_gradient
from capsule_zoo.inference.tempering import TemperedChains, TemperedRBM
from capsule_zoo.models import RBM, CapsuleRBM

KINDS = pytest.mark.parametrize("kind", [CapsuleRBM, RBM])
MODES = [
    dict(),
    dict(persistent=True),
    dict(persistent=True, centered=True),
    dict(persistent=True, tempering=(1, 0.7, 0.3)),
]


def data(number=12):
    torch.manual_seed(4)
    return torch.randint(2, (number, 1, 2, 2)).double()


def exact_gradient(model, images):
    """Of the mean of -log p(x), with Z summed by brute force."""
    masses, _ = log_masses(model, PAIRS[0])
    loss = model.free_energy(images).mean() + masses.logsumexp(0)
    return torch.autograd.grad(loss, list(model.parameters()))


@KINDS
def test_with_exact_negatives_the_gradient_is_that_of_the_likelihood(kind):
    """The model's expectation, enumerated, in place of the mean over negatives: 1e-10."""
    model, images = small(kind=kind), data()
    masses, listed = log_masses(model, PAIRS[0])
    expectation = (masses.softmax(0).detach() * model.free_energy(listed)).sum()
    surrogate = ExactSwitches(model).free_energy(images).mean() - expectation
    gradients = torch.autograd.grad(surrogate, list(model.parameters()))
    for mine, exact in zip(gradients, exact_gradient(model, images), strict=True):
        torch.testing.assert_close(mine, exact, rtol=0, atol=1e-10)


@KINDS
def test_chains_started_at_the_exact_law_give_the_likelihood_gradient(kind):
    """Sweeps keep the law, so the objective's own gradient errs by chance alone."""
    model, images, number = small(kind=kind), data(), 40_000
    masses, listed = log_masses(model, PAIRS[0])
    law = masses.softmax(0).detach()
    objective = ContrastiveDivergence(k=2, persistent=True, chains=number)
    torch.manual_seed(0)
    start = listed[torch.multinomial(law, number, replacement=True)]
    state = model.posterior(start).sample()
    objective.load_state_dict({n: v.detach() for n, v in state._asdict().items()})
    parameters = list(model.parameters())
    for _ in range(2):  # the second loss goes on from where the first one left the chains
        loss = objective.differentiable_loss(model, ExactSwitches(model), images)
    found = torch.autograd.grad(loss, parameters)
    energies = model.free_energy(listed)
    rows = [torch.autograd.grad(f, parameters, retain_graph=True) for f in energies]
    for i, exact in enumerate(exact_gradient(model, images)):
        per_image = torch.stack([row[i] for row in rows])
        mean = torch.einsum("s,s...->...", law, per_image)
        variance = torch.einsum("s,s...->...", law, (per_image - mean).square())
        assert ((found[i] - exact).abs() <= 5.5 * (variance / number).sqrt() + 1e-12).all()


def test_mean_field_training_raises_its_own_bound_only():
    """Its data term is the guide's variational free energy, so the surrogate differs by the gap."""
    model, images = small(), data()
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
        progress=False,
    )
    assert before < -2.7 and log_likelihood() > -1.6  # log 16 = 2.77, the optimum is log 3 = 1.10


@pytest.mark.parametrize("options", MODES[1:], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_chains_and_all(options, tmp_path):
    def run(model, **limits):
        fit(
            model,
            ExactSwitches(model),
            data(30).float(),
            objective=ContrastiveDivergence(chains=10, **options),
            optimizer=torch.optim.SGD,
            lr=0.1,
            batch_size=10,
            progress=False,
            **limits,
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
    images, states = Split(data(30).float(), torch.zeros(30, dtype=torch.int64)), []
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
            validate_every=2,
            progress=False,
        )
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_svi_and_torch_optimizers_train_every_parameter_alike():
    images = data()
    found = []
    for way in ("svi", "module"):
        pyro.clear_param_store()
        model = small()
        guide, objective = ExactSwitches(model), ContrastiveDivergence(persistent=True, chains=5)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        pyro.set_rng_seed(0)
        if way == "svi":
            svi = SVI(model, guide, pyro.optim.SGD({"lr": 0.1}), loss=objective)
            for _ in range(3):
                svi.step(images)
        else:
            module = objective(model, guide)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                module(images).backward()
                optimizer.step()
        assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())
        found.append(model.state_dict())
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=0, atol=1e-12)


def test_gaussian_training_cannot_leave_the_normalisable_machines():
    torch.manual_seed(0)
    model = CapsuleRBM(4, 2, 3, visible_family="gaussian", hidden_family="gaussian")
    images = torch.rand(20, 1, 1, 1).expand(-1, 1, 2, 2).contiguous()
    objective = ContrastiveDivergence(persistent=True, chains=20)
    with torch.no_grad():
        model.weight.add_(5)
    loss = objective.differentiable_loss(model, ExactSwitches(model), images)
    assert model.coupling_norm() < 1 and loss.isfinite()


# Tempering


def test_tempered_chains_keep_the_law_of_every_temperature():
    """All replicas start at their exact laws; sweeps and exchanges leave their means there."""
    model, betas, number = small(), (1.0, 0.6, 0.2), 30_000
    machine = TemperedRBM(model)
    _, listed = log_masses(model, PAIRS[0])
    fields = model.fields(listed)
    laws = []
    for beta in betas:
        energy = machine.free_energy(listed, machine.posterior(fields, beta), beta)
        laws.append((-energy).softmax(0).detach())
    torch.manual_seed(0)
    starts = [listed[torch.multinomial(law, number, replacement=True)] for law in laws]
    chains = TemperedChains(betas, torch.stack(starts))
    for _ in range(4):
        chains.sweep(model)
    for images, law in zip(chains.images, laws, strict=True):
        code = (images.flatten(1) * 2.0 ** torch.arange(3, -1, -1)).sum(1).long()
        share = torch.bincount(code, minlength=16) / number
        assert ((share - law).abs() < 5.5 * (law * (1 - law) / number).sqrt()).all()
    assert (laws[0] - laws[2]).abs().max() > 0.02  # the temperatures differ


def test_exchanges_happen():
    model, betas = small(), (1.0, 0.9)
    chains = TemperedChains(betas, data(2000))
    chains.images[1] = 1 - chains.images[0]
    before = chains.images.clone()
    chains._exchange(TemperedRBM(model))
    swapped = (chains.images[0] == before[1]).flatten(1).all(1)
    assert 0.3 < swapped.double().mean() < 1
    assert (chains.images[1][swapped] == before[0][swapped]).all()
    assert (chains.images[0][~swapped] == before[0][~swapped]).all()


# Centering


def centered(theta, means, rate):
    """The five coordinates about the means, as functions of the usual parameters."""
    mu, zeta, lam = means.visible, means.switch, means.hidden
    couple = theta["switch_weight"] + (theta["weight"] * lam).sum(2)
    hidden = theta["hidden.bias"] + torch.einsum("mkj,m->kj", theta["weight"], mu)
    own = theta["switch_bias"] - (rate * theta["hidden.bias"]).sum(1)  # c', to first order
    switch = own + mu @ theta["switch_weight"] + (hidden * lam).sum(1)
    visible = theta["visible.bias"].flatten() + couple @ zeta
    return torch.cat([v.flatten() for v in (theta["weight"], couple, visible, hidden, switch)])


def test_centered_coordinates_write_the_same_energy():
    """z(x - mu)'W(h - lambda) + ... differs from the energy by a constant: what J is made from."""
    model = small()
    means = RunningMeans()
    means.update(data(), model.posterior(data()))
    theta = {n: p.detach() for n, p in model.named_parameters()}
    theta["visible.bias"] = theta["visible.bias"].flatten()
    flat = centered(theta, means, torch.zeros_like(means.hidden))
    sizes = [
        theta[n].numel()
        for n in ("weight", "switch_weight", "visible.bias", "hidden.bias", "switch_bias")
    ]
    weight, couple, visible, hidden, switch = flat.split(sizes)
    torch.manual_seed(0)
    x, z = torch.randn(50, 4).double(), torch.randint(2, (50, 2)).double()
    h = torch.randn(50, 2, 2).double()
    zh, off = z[..., None] * h, z[..., None] * (h - means.hidden)
    usual = (
        torch.einsum("bm,mkj,bkj->b", x, theta["weight"], zh)
        + torch.einsum("bm,mk,bk->b", x, theta["switch_weight"], z)
        + x @ theta["visible.bias"]
        + zh.flatten(1) @ theta["hidden.bias"].flatten()
        + z @ theta["switch_bias"]
    )
    about = (
        torch.einsum("bm,mkj,bkj->b", x - means.visible, weight.view(4, 2, 2), off)
        + torch.einsum("bm,mk,bk->b", x - means.visible, couple.view(4, 2), z - means.switch)
        + x @ visible
        + off.flatten(1) @ hidden
        + z @ switch
    )
    difference = usual - about
    torch.testing.assert_close(difference, difference[:1].expand(50), rtol=0, atol=1e-10)


def test_centered_gradient_is_a_gradient_step_in_centered_coordinates():
    """J'^-1 and J^-1 by autograd of the map above, solved: d = J J' g."""
    model, images = small(), data()
    means = RunningMeans()
    means.update(images, model.posterior(images))
    names = [n for n, _ in model.named_parameters()]
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    sizes = [theta[n].numel() for n in names]
    rate = model.hidden.mean().detach()

    def by_vector(vector):
        parts = vector.split(sizes)
        named = {n: v.view(theta[n].shape) for n, v in zip(names, parts, strict=True)}
        return centered(named, means, rate)

    vector = torch.cat([theta[n].flatten() for n in names])
    inverse = torch.autograd.functional.jacobian(by_vector, vector)  # of new by old coordinates
    loss = model.free_energy(images).mean()
    usual = torch.cat(
        [
            g.flatten()
            for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        ]
    )
    jacobian = torch.linalg.inv(inverse)
    expected = jacobian @ jacobian.T @ usual
    surrogate = centered_gradient(loss, model, means)
    assert surrogate.item() == pytest.approx(loss.item())
    found = torch.cat(
        [g.flatten() for g in torch.autograd.grad(surrogate, list(model.parameters()))]
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert (found - usual).abs().max() > 0.01


def test_centered_steps_do_not_depend_on_which_pixels_count_as_on():
    """Flip every pixel and adapt the parameters: the step taken is the same machine's."""
    rbm, images, negatives = small(kind=RBM), data(), data(20)
    flipped = RBM((1, 2, 2), rbm.num_units).double()

    def flip(parameters):
        weight = parameters["weight"]
        return {
            "weight": -weight,
            "visible.bias": -parameters["visible.bias"],
            "hidden.bias": parameters["hidden.bias"] + weight.sum(0),
        }

    flipped.load_state_dict(flip(rbm.state_dict()))
    steps = []
    for model, seen, dreamt in ((rbm, images, negatives), (flipped, 1 - images, 1 - negatives)):
        means = RunningMeans()
        means.update(seen, model.posterior(seen))
        loss = model.free_energy(seen).mean() - model.free_energy(dreamt).mean()
        loss = centered_gradient(loss, model, means)
        names, parameters = zip(*model.named_parameters(), strict=True)
        steps.append(dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)))
    for name, expected in flip(steps[0]).items():
        torch.testing.assert_close(steps[1][name], expected, rtol=0, atol=1e-10)


def test_sparsity_charges_every_switch_that_is_on():
    model, images = small(), data()
    losses = []
    for sparsity in (0.0, 0.7):
        torch.manual_seed(1)
        objective = ContrastiveDivergence(sparsity=sparsity)
        losses.append(objective.differentiable_loss(model, ExactSwitches(model), images))
    charge = 0.7 * model.switch_probabilities(images).sum(1).mean()
    torch.testing.assert_close(losses[1] - losses[0], charge, rtol=0, atol=1e-10)
    parameters = list(model.parameters())
    found = torch.autograd.grad(losses[1] - losses[0], parameters, allow_unused=True)
    wanted = torch.autograd.grad(charge, parameters, allow_unused=True)
    for gradient, expected in zip(found, wanted, strict=True):
        expected = torch.zeros_like(gradient) if expected is None else expected
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(sparsity=-1), "sparsity must be at least 0, not -1"),
        (dict(k=0), "k must be at least 1"),
        (dict(chains=0), "chains must be at least 1"),
        (dict(tempering=(1, 0.5)), "tempering needs persistent=True"),
        (dict(tempering=(0.9, 0.5), persistent=True), "tempering must be 1 and then falling"),
        (dict(tempering=(1, 1), persistent=True), "tempering must be 1 and then falling"),
        (dict(tempering=(1,), persistent=True), "tempering must be 1 and then falling"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        ContrastiveDivergence(**options)


def test_models_without_a_free_energy_are_refused():
    model = Conjugate()
    with pytest.raises(ValueError, match="needs a CapsuleRBM or an RBM as model, not a Conjugate"):
        ContrastiveDivergence().loss(model, LinearGuide(model), torch.rand(2, 1, 2, 2))
    with pytest.raises(ValueError, match="needs a guide with a free energy in closed form"):
        ContrastiveDivergence().loss(small(), LinearGuide(model), data())
    assert not ContrastiveDivergence().is_bound


@pytest.mark.parametrize("options", MODES[1:], ids=str)
def test_a_state_is_taken_up_in_the_models_precision_and_place(options):
    """Checkpoints are read on the CPU; here in another precision, which would fail as loudly."""
    model = small()
    first, second = (ContrastiveDivergence(chains=5, **options) for _ in range(2))
    first.differentiable_loss(model, ExactSwitches(model), data())
    state = first.state_dict()
    second.load_state_dict({n: v.float() if v.is_floating_point() else v for n, v in state.items()})
    loss = second.differentiable_loss(model, ExactSwitches(model), data())
    assert loss.dtype == torch.float64 and loss.isfinite()
    assert all(second.state_dict()[name].dtype == value.dtype for name, value in state.items())
