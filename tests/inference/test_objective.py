"""One objective, two ways of training: the same loss, the same gradients, the same steps."""

import pyro
import pytest
import torch
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from toys import BernoulliMixture, ExactGuide, NoGuide, binary_images, conjugate_images, pair

from capsule_zoo.inference import Objective, is_bound, loss_per_image
from capsule_zoo.inference.training.default_objective import default_objective


class MeanELBO(Objective):
    """The negated single-draw ELBO per image, written as a user would write it."""

    is_bound = True

    def differentiable_loss(self, model, guide, *args, **kwargs):
        model_trace, guide_trace = self._get_trace(model, guide, args, kwargs)
        return (guide_trace.log_prob_sum() - model_trace.log_prob_sum()) / len(args[0])


def test_svi_steps_are_the_torch_optimizers_steps():
    images = conjugate_images(6)
    model, guide = pair()
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=MeanELBO())
    pyro.set_rng_seed(3)
    losses = [svi.step(images) for _ in range(5)]
    other_model, other_guide = pair()
    module = MeanELBO()(other_model, other_guide)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    pyro.set_rng_seed(3)
    for expected in losses:
        optimizer.zero_grad()
        loss = module(images)
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert losses[0] != losses[-1]
    ours, theirs = guide.state_dict(), other_guide.state_dict()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-12)


def test_zoo_and_pyro_objectives_agree_per_image():
    images = conjugate_images(7)
    model, guide = pair()
    values = []
    for objective in (MeanELBO(), Trace_ELBO()):
        pyro.set_rng_seed(5)
        values.append(loss_per_image(objective, model, guide, images).item())
    assert values[0] == pytest.approx(values[1], abs=1e-12)


def test_loss_per_image_is_the_negated_evidence_under_the_exact_posterior():
    images = conjugate_images(7)
    model, _ = pair()
    loss = loss_per_image(Trace_ELBO(), model, ExactGuide(model), images)
    torch.testing.assert_close(loss, -model.log_evidence(images).mean())


@pytest.mark.parametrize("enabled", [True, False])
def test_enumerated_loss_is_the_negated_evidence_with_and_without_gradients(enabled):
    model, images = BernoulliMixture().double(), binary_images(9)
    with torch.set_grad_enabled(enabled):
        loss = loss_per_image(TraceEnum_ELBO(max_plate_nesting=1), model, NoGuide(model), images)
    torch.testing.assert_close(loss, -model.log_evidence(images).mean())


def test_default_objective_enumerates_where_the_model_does():
    images = binary_images(2)
    assert isinstance(default_objective(BernoulliMixture().double(), images), TraceEnum_ELBO)
    plain = default_objective(BernoulliMixture(enumerated=False).double(), images)
    assert isinstance(plain, Trace_ELBO)


def test_which_objectives_are_bounds():
    assert is_bound(Trace_ELBO()) and is_bound(TraceEnum_ELBO()) and is_bound(MeanELBO())
    assert is_bound(RenyiELBO(alpha=0)) and not is_bound(RenyiELBO(alpha=-1))
    assert not is_bound(TraceMeanField_ELBO())  # drops the log density of Delta sites
    assert not Objective.is_bound
