"""The centered gradient is compared with the change of coordinates that it represents."""

import pytest
import torch
from small_rbms import binary_images, small

from capsule_zoo.inference.energy.contrastive_divergence import RunningMeans, centered_gradient
from capsule_zoo.models import RBM


def centered_coordinates(theta, means, rate):
    """Return the five coordinates about the means, as functions of the usual parameters."""
    mu, zeta, lam = means.visible, means.switch, means.hidden
    couple = theta["switch_weight"] + (theta["weight"] * lam).sum(2)
    hidden = theta["hidden.bias"] + torch.einsum("mkj,m->kj", theta["weight"], mu)
    bias = theta["switch_bias"] - (rate * theta["hidden.bias"]).sum(1)  # c', to first order
    switch = bias + mu @ theta["switch_weight"] + (hidden * lam).sum(1)
    visible = theta["visible.bias"].flatten() + couple @ zeta
    return torch.cat([v.flatten() for v in (theta["weight"], couple, visible, hidden, switch)])


def test_centered_coordinates_write_the_same_energy():
    """z(x - mu)'W(h - lambda) + ... differs from the energy by a constant: what J is made from."""
    model = small()
    means = RunningMeans()
    means.update(binary_images(), model.posterior(binary_images()))
    theta = {n: p.detach() for n, p in model.named_parameters()}
    theta["visible.bias"] = theta["visible.bias"].flatten()
    flat = centered_coordinates(theta, means, torch.zeros_like(means.hidden))
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
    model, images = small(), binary_images()
    means = RunningMeans()
    means.update(images, model.posterior(images))
    names = [n for n, _ in model.named_parameters()]
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    sizes = [theta[n].numel() for n in names]
    rate = model.hidden.mean().detach()

    def by_vector(vector):
        parts = vector.split(sizes)
        named = {n: v.view(theta[n].shape) for n, v in zip(names, parts, strict=True)}
        return centered_coordinates(named, means, rate)

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
    direction = torch.cat(
        [g.flatten() for g in torch.autograd.grad(surrogate, list(model.parameters()))]
    )
    torch.testing.assert_close(direction, expected, rtol=0, atol=1e-10)
    assert (direction - usual).abs().max() > 0.01


def test_centered_steps_do_not_depend_on_which_pixels_count_as_on():
    """Flip every pixel and adapt the parameters: the step taken is the same machine's."""
    rbm, images, negatives = small(kind=RBM), binary_images(), binary_images(20)
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
    for model, batch, dreamt in ((rbm, images, negatives), (flipped, 1 - images, 1 - negatives)):
        means = RunningMeans()
        means.update(batch, model.posterior(batch))
        loss = model.free_energy(batch).mean() - model.free_energy(dreamt).mean()
        loss = centered_gradient(loss, model, means)
        names, parameters = zip(*model.named_parameters(), strict=True)
        steps.append(dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)))
    for name, expected in flip(steps[0]).items():
        torch.testing.assert_close(steps[1][name], expected, rtol=0, atol=1e-10)
