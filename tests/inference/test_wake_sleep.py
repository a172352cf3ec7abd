"""Objectives of directed models against their definitions; bounds in their order."""

import math

import pyro
import pytest
import torch
from machines import helmholtz_pair
from pyro import poutine
from pyro.poutine import Trace
from small_rbms import binary_images
from toys import Conjugate, ExactGuide, LinearGuide, conjugate_images, pair

from capsule_zoo.guides import RecognitionMachine
from capsule_zoo.inference import Checks, ReweightedWakeSleep, WakeSleep, evaluate, fit, summarize
from capsule_zoo.inference.energy.pretrain import pretrain
from capsule_zoo.inference.objectives.score_function import ScoreFunctionELBO
from capsule_zoo.models import CapsuleHelmholtzMachine, ImageSpace


def of_two_images():
    """Return a new machine, its guide, and 100 images with either half of the pixels on."""
    torch.manual_seed(0)
    model = CapsuleHelmholtzMachine(4, (2, 3), 2)
    guide = RecognitionMachine(model)
    images = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0.0]]).view(2, 1, 2, 2).repeat(50, 1, 1, 1)
    return model, guide, images


def log_density(program, trace, *arguments, **keywords):
    replayed = poutine.trace(poutine.replay(program, trace=trace))
    return replayed.get_trace(*arguments, **keywords).log_prob_sum()


def assert_gradients(losses):
    """Check that `backward` has given every module the gradient of its own loss."""
    for module, loss in losses.items():
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        for parameter, expected in zip(module.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-10)


def by_hand(objective, model, guide, images):
    """Return log p and log q of a loss's draws, (particles, images), and the loss to descend."""
    pyro.set_rng_seed(1)
    loss = objective.differentiable_loss(model, guide, images)
    loss.backward()
    pyro.set_rng_seed(1)
    repeated = images.repeat(objective.num_particles, 1, 1, 1)
    code = poutine.trace(guide).get_trace(repeated).nodes["code"]["value"].detach()
    mean = guide.slope * repeated.sum((1, 2, 3)) + guide.offset
    log_q = torch.distributions.Normal(mean, guide.scale).log_prob(code)
    pixels = torch.distributions.Normal(code[:, None, None, None], model.noise)
    log_p = torch.distributions.Normal(model.mean, 1.0).log_prob(code)
    log_p = log_p + pixels.log_prob(repeated).sum((1, 2, 3))
    shape = objective.num_particles, len(images)
    return log_p.view(shape), log_q.view(shape), loss


@pytest.mark.parametrize("recycle_top", [True, False])
def test_wake_sleep_gradients_are_their_definitions(recycle_top):
    """The same draws, made by hand from the same seed: wake for the model, sleep for the guide."""
    model, guide = helmholtz_pair(4, (2, 2), 1)
    images = binary_images(6)
    pyro.set_rng_seed(1)
    loss = WakeSleep(recycle_top).differentiable_loss(model, guide, images)
    loss.backward()
    pyro.set_rng_seed(1)
    recognized = poutine.trace(guide).get_trace(images)
    log_p = log_density(model, recognized, images) / 6
    log_q = log_density(guide, recognized, images) / 6
    assert loss.item() == pytest.approx((log_q - log_p).item(), abs=1e-10)
    dreamer = model
    if recycle_top:
        top = {n: recognized.nodes[n]["value"] for n in ("capsule2_switch", "capsule2_hidden")}
        dreamer = poutine.condition(model, data=top)
    dream = poutine.trace(dreamer).get_trace(batch_size=6)
    if recycle_top:
        for name in top:
            dream.nodes[name]["is_observed"] = False
    pixels = dream.nodes["_RETURN"]["value"]
    assert_gradients({model: -log_p, guide: -log_density(guide, dream, pixels) / 6})


def test_reweighted_gradients_weigh_every_image_by_itself():
    model, guide = helmholtz_pair(4, (2, 2), 1)
    images, count = binary_images(6), 4
    pyro.set_rng_seed(1)
    loss = ReweightedWakeSleep(count, sleep=0.3).differentiable_loss(model, guide, images)
    loss.backward()
    pyro.set_rng_seed(1)
    repeated = images.repeat(count, 1, 1, 1)
    drawn = poutine.trace(guide).get_trace(repeated)
    dream = poutine.trace(model).get_trace(batch_size=6)

    def one(program, row):
        """Compute the log density of one row alone, by hand."""
        row_trace = Trace()
        for name in guide.covers:
            site = drawn.nodes[name]
            row_trace.add_node(name, **{**site, "value": site["value"][row : row + 1]})
        return log_density(program, row_trace, repeated[row : row + 1])

    log_p = torch.stack([one(model, row) for row in range(24)]).view(count, 6)
    log_q = torch.stack([one(guide, row) for row in range(24)]).view(count, 6)
    log_weight = (log_p - log_q).detach()
    bound = (log_weight.logsumexp(0) - math.log(count)).mean()
    assert loss.item() == pytest.approx(-bound.item(), abs=1e-10)
    fraction = log_weight.exp() / log_weight.exp().sum(0)
    pixels = dream.nodes["_RETURN"]["value"]
    asleep = -log_density(guide, dream, pixels) / 6
    recognize = -0.7 * (fraction * log_q).sum() / 6 + 0.3 * asleep
    assert_gradients({model: -(fraction * log_p).sum() / 6, guide: recognize})


def test_under_the_exact_posterior_wake_is_the_likelihood_gradient_in_expectation():
    """Fisher's identity, on a model whose posterior and evidence are known."""
    model = Conjugate().double()
    model.space = ImageSpace((1, 2, 2), (-math.inf, math.inf))  # dreams have noise
    guide = ExactGuide(model)
    images = conjugate_images(3).repeat(20_000, 1, 1, 1)
    loss = WakeSleep(recycle_top=False).differentiable_loss(model, guide, images)
    loss.backward()
    expected = torch.autograd.grad(-model.log_evidence(images).mean(), model.mean)[0]
    assert loss.item() == pytest.approx(-model.log_evidence(images).mean().item(), abs=1e-8)
    assert model.mean.grad.item() == pytest.approx(expected.item(), abs=5.5 * 0.25 / 60_000**0.5)


@pytest.mark.parametrize("objective", [ReweightedWakeSleep(), WakeSleep(recycle_top=False)])
def test_the_guide_takes_dreams_outside_of_the_pixels_range(objective):
    model, guide = pair()  # noise of .5 around means of any size
    images = conjugate_images(30)
    fit(model, guide, images, objective=objective, steps=2, checks=Checks(progress=False))
    assert pyro.distributions.is_validation_enabled()
    with pytest.raises(ValueError, match="must lie in"):
        guide(images + 3)


def test_one_particle_awake_is_wake_sleeps_wake():
    model, guide = helmholtz_pair(4, (2, 2), 1)
    images, gradients = binary_images(6), []
    for objective in (WakeSleep(), ReweightedWakeSleep(1)):
        pyro.set_rng_seed(0)
        model.zero_grad()
        objective.differentiable_loss(model, guide, images).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_reweighted_value_is_bounded_by_the_evidence_and_rises_with_particles():
    model = Conjugate().double()
    model.space = ImageSpace((1, 2, 2), (-math.inf, math.inf))  # dreams have noise
    guide = LinearGuide(model).double()
    images = conjugate_images(20)
    evidence = model.log_evidence(images).mean().item()
    means, errors = [], []
    for count in (1, 3, 10, 100):
        repeated = images.repeat(400, 1, 1, 1)
        with torch.no_grad():
            values = torch.tensor(
                [
                    -ReweightedWakeSleep(count).differentiable_loss(model, guide, repeated[:800])
                    for _ in range(20)
                ]
            )
        means.append(values.mean().item())
        errors.append(5.5 * values.std().item() / 20**0.5)
    for low, high, error in zip(means, means[1:], errors, strict=False):
        assert low < high + error
    assert means[0] < means[1] - errors[0]  # it does rise
    assert means[-1] < evidence + errors[-1]


@pytest.mark.long
@pytest.mark.parametrize("objective", [WakeSleep(), WakeSleep(False), ReweightedWakeSleep(4)])
def test_training_raises_the_bound(objective):
    model, guide, images = of_two_images()
    run = fit(
        model, guide, images, objective=objective, lr=0.04, steps=250, checks=Checks(progress=False)
    )
    losses = run.history["loss"]
    assert losses.iloc[0] > 2.3 and losses.iloc[-1] < 1.5  # log 16 = 2.77; the optimum is log 2


def test_pretraining_puts_each_rbm_into_both_halves():
    model, guide, images = of_two_images()
    before = (
        -fit(
            model,
            guide,
            images,
            objective=WakeSleep(),
            lr=1e-9,
            steps=1,
            checks=Checks(progress=False),
        )
        .history["loss"]
        .iloc[0]
    )
    runs = pretrain(model, guide, images, steps=400, lr=0.5, checks=Checks(progress=False))
    assert [run.steps for run in runs] == [400, 400]
    lower, upper = guide.layers
    torch.testing.assert_close(lower.coupling.weight, model.weight)
    told = model.layers[1].coupling.weight  # (capsules and units above, 3, 2)
    torch.testing.assert_close(upper.coupling.weight.flatten(1).T, told.flatten(1))
    after = summarize(evaluate(model, guide, images[:2], num_particles=200))["iwae"]
    assert after > before + 0.3
    rebuilt = model.mean_image(guide.expectations(images))
    assert (rebuilt - images).abs().mean() < 0.2


@pytest.mark.parametrize("family", ["bernoulli", "gaussian"])
def test_pretraining_gives_centered_recognition_the_same_distribution(family):
    images, distributions = binary_images(6).float(), []
    families = dict(visible_family=family, hidden_family=family)
    for centered in (True, False):
        torch.manual_seed(0)
        model = CapsuleHelmholtzMachine(4, (2, 3), 2, **families)
        guide = RecognitionMachine(model, centered)
        torch.manual_seed(1)
        pretrain(model, guide, images, steps=20, lr=0.1, checks=Checks(progress=False))
        distributions.append(guide.posterior(images))
    torch.testing.assert_close(distributions[0].switch_logits, distributions[1].switch_logits)
    torch.testing.assert_close(distributions[0].field, distributions[1].field)


def test_draws_are_constants_even_where_they_could_be_reparametrized():
    model, guide, images, count = *pair(), conjugate_images(6), 4
    objective = ReweightedWakeSleep(count, sleep=0)
    log_p, log_q, _ = by_hand(objective, model, guide, images)
    fraction = (log_p - log_q).detach().softmax(0) / 6
    assert_gradients({model: -(fraction * log_p).sum(), guide: -(fraction * log_q).sum()})


def test_score_function_credits_every_draw_with_what_it_adds_to_the_mean_of_the_others():
    model, guide, images, count = *pair(), conjugate_images(6), 3
    log_p, log_q, loss = by_hand(ScoreFunctionELBO(count), model, guide, images)
    log_weight = (log_p - log_q).detach()
    assert loss.item() == pytest.approx(-log_weight.mean().item(), abs=1e-10)
    others = torch.stack([log_weight[torch.arange(count) != k].mean(0) for k in range(count)])
    credit = log_weight - others
    assert_gradients({model: -log_p.mean(), guide: -(credit * log_q).mean()})


def test_pretraining_with_gaussian_units_raises_the_bound():
    torch.manual_seed(0)
    families = dict(visible_family="gaussian", hidden_family="gaussian")
    model = CapsuleHelmholtzMachine(4, (2, 3), 2, **families)
    guide = RecognitionMachine(model)
    images = torch.randn(100, 1, 1, 1) + 0.3 * torch.randn(100, 1, 2, 2)

    def bound():
        return summarize(evaluate(model, guide, images, num_particles=50))["iwae"]

    before = bound()
    pretrain(model, guide, images, steps=400, lr=0.02, checks=Checks(progress=False))
    assert guide.layers[1].coupling.weight.abs().max() > 0.05  # of the upper layer too
    assert bound() > before + 0.3
