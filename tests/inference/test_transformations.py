"""Requests in training, and inferred requests, against closed forms and quadrature."""

import math

import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from toys import fit

from capsule_zoo.data import Rotations, Shifts, Split
from capsule_zoo.guides import ConditionalEncoder
from capsule_zoo.inference import loss_per_image
from capsule_zoo.inference.transformations import Requested, infer_transformation
from capsule_zoo.models import ContinuousCapsNet
from capsule_zoo.models.networks.on_request import OnRequest, centered_normal

SIZE = 16
SHIFTS = Shifts(1)  # the model is told pixels as they are


def blob(x, y):
    """Return smooth images (B, 1, 16, 16), lopsided about (x, y) pixels from the middle."""
    pixel = torch.arange(SIZE, dtype=torch.float64) - (SIZE - 1) / 2
    across = ((pixel - x[:, None] - 1) / 2).square()
    down = ((pixel - y[:, None]) / 3).square()
    return (-0.5 * (across[:, None, None] + down[:, None, :, None])).exp()


class Blob(OnRequest):
    """A model of a blob at the requested place, as strong as its code of one number."""

    def __init__(self, strength=1.0):
        super().__init__((1, SIZE, SIZE), SHIFTS.identity, sigma_image=0.2)
        self.strength = strength

    def prior(self):
        return {"image_code": centered_normal(torch.zeros(1).double(), 1)}

    def paint(self, latents, request):
        code = self.strength * latents["image_code"][..., None, None]
        return blob(*request.unbind(-1)) * (0.6 + 0.1 * code.tanh())


def untrained(model):
    """Return a guide that draws from the prior for every image."""
    guide = ConditionalEncoder(model, channels=2, hidden=3).double()
    for parameter in guide.read.parameters():
        torch.nn.init.zeros_(parameter)
    return guide


TRUTH = torch.tensor([[1.3, -2.4], [-3.2, 0.4], [0.0, 0.0]], dtype=torch.float64)
GRID = torch.cartesian_prod(*2 * [torch.arange(-4.0, 5.0, 2.0)])


@pytest.fixture
def images():
    return 0.6 * blob(*TRUTH.unbind(-1))


def test_evidence_on_the_grid_is_exact_where_the_code_does_not_matter(images):
    model = Blob(strength=0.0)
    estimate = infer_transformation(model, untrained(model), images, SHIFTS, grid=GRID, steps=0)
    for g, request in enumerate(GRID.double()):
        distribution = dist.Normal(0.6 * blob(*request[:, None]), model.sigma_image)
        expected = distribution.log_prob(images).sum((1, 2, 3))
        torch.testing.assert_close(estimate.log_evidence[:, g], expected)
    best = estimate.log_evidence.argmax(-1)
    torch.testing.assert_close(estimate.best, GRID[best].double())
    torch.testing.assert_close(estimate.best_log_evidence, estimate.log_evidence.amax(-1))
    torch.testing.assert_close(estimate.probabilities.sum(-1), torch.ones(3).double())


def test_codes_are_integrated_out(images):
    """The result equals quadrature over the one number of the code."""
    model = Blob(strength=2.0)
    grid = GRID[[6, 12]]
    settings = dict(grid=grid, steps=0, num_particles=2000)
    estimate = infer_transformation(model, untrained(model), images, SHIFTS, **settings)
    code = torch.linspace(-6, 6, 1001, dtype=torch.float64)[:, None]
    log_step = math.log(12 / 1000)
    prior = dist.Normal(0.0, 1.0).log_prob(code[:, 0])
    for g, request in enumerate(grid.double()):
        mean = model.mean_image({"image_code": code}, request[None])
        distribution = dist.Normal(mean, model.sigma_image)
        scores = torch.stack([distribution.log_prob(image).sum((1, 2, 3)) for image in images])
        expected = (scores + prior + log_step).logsumexp(-1)
        torch.testing.assert_close(estimate.log_evidence[:, g], expected, atol=0.15, rtol=0)


def test_the_guide_reads_images_moved_back():
    model, inputs = Blob(), []
    guide = untrained(model)
    guide.encoder.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    plain, asked = blob(*torch.zeros(2, 2).double()), torch.tensor([[3.0, -2.0]]).double()
    moved = SHIFTS.move(plain, asked)
    settings = dict(grid=asked, steps=0, num_particles=1)
    infer_transformation(model, guide, moved, SHIFTS, **settings)
    middle = (..., slice(3, -3), slice(3, -3))  # nothing left the image there
    torch.testing.assert_close(inputs[0][middle], plain[middle])


@pytest.mark.long
def test_climbs_reach_requests_between_those_of_the_grid(images):
    model = Blob()
    guide = untrained(model)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    estimate = infer_transformation(model, guide, images, SHIFTS, grid=GRID, steps=60, lr=0.5)
    torch.testing.assert_close(estimate.best, TRUTH, atol=0.3, rtol=0)
    assert (estimate.best_log_evidence >= estimate.log_evidence.amax(-1)).all()
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())
    assert all(parameter.requires_grad for parameter in guide.parameters())


@pytest.mark.long
def test_a_second_start_leaves_a_local_mode():
    """The best request on the grid climbs to a faint second blob, the other one to the image's."""
    model = Blob(strength=0.0)
    faint, strong = blob(*torch.full((2, 1), 6.0).double()), blob(*torch.zeros(2, 1).double())
    images = 0.4 * faint + 0.6 * strong
    settings = dict(grid=torch.tensor([[6.0, 6.0], [2.8, -2.8]]), steps=60, lr=0.3)
    one, both = (
        infer_transformation(model, untrained(model), images, SHIFTS, starts=starts, **settings)
        for starts in (1, 2)
    )
    torch.testing.assert_close(one.best, torch.full((1, 2), 6.0).double(), atol=0.5, rtol=0)
    torch.testing.assert_close(both.best, torch.zeros(1, 2).double(), atol=0.5, rtol=0)
    assert both.best_log_evidence > one.best_log_evidence


def test_requested_models_see_moved_images_and_guides_plain_ones():
    """A range of one angle is that rotation: the loss is that of the pair by hand."""
    torch.manual_seed(0)
    sizes = dict(hidden=4, parts=3, maps=2, channels=3)
    model = ContinuousCapsNet((1, 8, 8), 2, **sizes)
    guide = ConditionalEncoder(model, deterministic=True, channels=3, hidden=6)
    images, labels = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 1, 0])
    asked = Requested(model, Rotations(), [(0.0, 0.0), (90.0, 90.0)])
    loss = loss_per_image(Trace_ELBO(), asked, guide, images, labels)
    rotated = torch.stack(
        [torch.rot90(x, int(k), (1, 2)) for x, k in zip(images, labels, strict=True)]
    )
    numbers = torch.tensor([[1.0, 0.0], [0.0, 1.0]])[labels]
    mean = model.mean_image(guide.expectations(images), numbers)
    expected = -dist.Normal(mean, model.sigma_image).log_prob(rotated).sum((1, 2, 3)).mean()
    torch.testing.assert_close(loss, expected)


def test_requested_models_train_the_model_itself():
    torch.manual_seed(0)
    model = ContinuousCapsNet((1, 8, 8), 2, hidden=4, parts=3, maps=2, channels=3)
    guide = ConditionalEncoder(model, channels=3, hidden=6)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    data = Split(torch.rand(12, 1, 8, 8), torch.arange(12) % 2)
    asked = Requested(model, Shifts(2), [(-2, 2), (0, 1)])
    fit(asked, guide, data, steps=3, batch_size=6, labels=True, progress=False)
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
