"""Routing by address against its formula, cell by cell, in value and gradient."""

import itertools
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from capsule_zoo.models import ConditionalAutoencoder, ContinuousCapsNet, GenerativeCapsNet
from capsule_zoo.models.generative_capsnet import LogRelaxedOneHot, Parts, splat
from capsule_zoo.models.networks.on_request import DARK, LEAK, leaky_sigmoid

SIZE = (4, 6)


def direct(address, activation, size=SIZE):
    """Compute F[i, j] = sum_c relu(1 - |i - q_c0|) relu(1 - |j - q_c1|) a_c as written."""
    q = (address + 1) * (torch.tensor(size).to(address) - 1) / 2
    cells = []
    for i, j in itertools.product(range(size[0]), range(size[1])):
        rows, columns = ((1 - (n - q[..., axis]).abs()).relu() for axis, n in enumerate((i, j)))
        cells.append(
            sum(rows[:, c, None] * columns[:, c, None] * activation[:, c] for c in range(7))
        )
    return torch.stack(cells, -1).unflatten(-1, size)


@pytest.fixture
def parts():
    """Return capsules on the grid and off it, with two of them in one cell."""
    torch.manual_seed(0)
    address = 3 * torch.rand(2, 7, 2, dtype=torch.float64) - 1.5
    address[0, 1] = address[0, 0] + 0.01
    return Parts(address.requires_grad_(), torch.rand(2, 7, 3).double().requires_grad_())


def test_splat_is_its_formula_in_value_and_gradient(parts):
    image, expected = splat(*parts, SIZE), direct(*parts)
    torch.testing.assert_close(image, expected)
    weight = torch.randn_like(image)
    slopes = [torch.autograd.grad((weight * f).sum(), parts) for f in (image, expected)]
    for ours, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(lambda *p: splat(*p, SIZE), tuple(parts))


def test_weights_sum_to_one_on_the_grid_and_there_is_no_trace_beyond():
    torch.manual_seed(0)
    inside = 2 * torch.rand(50, 1, 2, dtype=torch.float64) - 1
    one = torch.ones(50, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(splat(inside, one, SIZE).sum((1, 2, 3)), one.flatten())
    cell = torch.tensor([2 / 3, 2 / 5])
    for far in (inside.sign() * (1 + cell), torch.full_like(inside, 7.0)):
        far = far.clone().requires_grad_()
        maps = splat(far, one, SIZE)
        assert (maps == 0).all()
        (slope,) = torch.autograd.grad(maps.sum(), far)
        assert (slope == 0).all()
    corners = torch.tensor([[[-1.0, -1.0], [1.0, 1.0]]])
    maps = splat(corners, torch.tensor([[[2.0], [5.0]]]), SIZE)
    assert maps[0, 0, 0, 0] == 2 and maps[0, 0, -1, -1] == 5 and maps.sum() == 7


@pytest.mark.parametrize("axis", [0, 1])
def test_a_cell_added_to_every_address_moves_the_image_by_four_pixels(axis):
    torch.manual_seed(0)
    canvas = GenerativeCapsNet((1, 40, 48), maps=3, channels=4).canvas.double()
    assert canvas.grid == (10, 12)
    middle = Parts(torch.rand(2, 5, 2).double() - 0.5, torch.randn(2, 5, 3).double())
    cell = torch.zeros(2, dtype=torch.float64)
    cell[axis] = 2 / (canvas.grid[axis] - 1)
    still = canvas(middle)
    moved = canvas(Parts(middle.address + cell, middle.activation))
    back = moved.roll(-4, 2 + axis)
    torch.testing.assert_close(back[..., 8:-8, 8:-8], still[..., 8:-8, 8:-8])
    assert not torch.allclose(moved[..., 8:-8, 8:-8], still[..., 8:-8, 8:-8])


def small(kind=GenerativeCapsNet, **options):
    torch.manual_seed(0)
    sizes = dict(kinds=3, pose=2, length=4) if kind is GenerativeCapsNet else dict(latent=2)
    options = {"image_shape": (1, 12, 8), "parts": 5, "hidden": 6, "maps": 3, **sizes, **options}
    return kind(channels=4, **options).double()


def test_part_capsules_are_votes_weighed_by_kind():
    model = small()
    kind = torch.randn(4, 3).double().log_softmax(-1)
    pose, request = torch.randn(4, 2).double(), torch.randn(4, 2).double()
    part_capsules = model.capsules({"object_kind": kind, "object_pose": pose}, request)
    weight = model.vote.weight.view(3, 5, 4, 4)  # kinds, parts, length, inputs
    bias = model.vote.bias.view(3, 5, 4)
    for b, c in itertools.product(range(4), range(5)):
        p = torch.cat([pose[b], request[b]])
        u = sum(kind[b, k].exp() * (weight[k, c] @ p + bias[k, c]) for k in range(3))
        for name, value in (
            ("address", part_capsules.address),
            ("activation", part_capsules.activation),
        ):
            network = getattr(model, name)
            hidden = (u @ network.weight_in[c] + network.bias_in[c, 0]).relu()
            expected = hidden @ network.weight_out[c] + network.bias_out[c, 0]
            expected = expected.sigmoid() if name == "activation" else expected
            torch.testing.assert_close(value[b, c], expected)


KINDS = [GenerativeCapsNet, ContinuousCapsNet]
IDENTITIES = {"rotations": (1.0, 0.0), "shifts": (0.0, 0.0)}


@pytest.mark.parametrize("identity", IDENTITIES.values(), ids=IDENTITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_linear_motion_is_a_matrix_for_each_part(kind, identity):
    """Addresses are linear in the request (plus 1 for shifts); activations do not depend on it."""
    model = small(kind, motion="linear", identity=identity)
    latents = {name: distribution.sample((3,)) for name, distribution in model.prior().items()}
    numbers = [[1.0, 0.0], [0.0, 1.0], *([[0.0, 0.0]] if not any(identity) else [])]
    outputs = [
        model.capsules(latents, torch.tensor([n], dtype=torch.float64).expand(3, -1))
        for n in numbers
    ]
    far = torch.randn(3, 2, dtype=torch.float64) * 5
    address, activation = model.capsules(latents, far)
    x, y = (parts.address for parts in outputs[:2])
    start = outputs[2].address if len(outputs) == 3 else torch.zeros_like(x)
    weight = far[..., None, None]
    expected = start + weight[:, 0] * (x - start) + weight[:, 1] * (y - start)
    torch.testing.assert_close(address, expected)
    for parts in outputs:
        torch.testing.assert_close(parts.activation, activation)
    assert not torch.allclose(x, y)
    assert (start != 0).any() == (not any(identity))


@pytest.mark.parametrize("kind", KINDS)
def test_with_matrices_that_turn_an_image_turns_as_requested(kind):
    """Right angles are exact here, because the filters look the same from all four sides."""
    model = small(kind, motion="linear", image_shape=(1, 28, 28))
    latents = {name: distribution.sample((2,)) for name, distribution in model.prior().items()}
    place = torch.rand(2, 5, 2, dtype=torch.float64) - 0.5  # row and column
    row, column = place.unbind(-1)
    matrices = torch.stack([row, -column, column, row], -1)  # counter-clockwise as seen
    model.address.forward = lambda parts: (  # type: ignore[method-assign]
        matrices if kind is GenerativeCapsNet else matrices.flatten(1)
    )
    with torch.no_grad():
        for layer in model.canvas.upsample.modules():
            if isinstance(layer, torch.nn.ConvTranspose2d):
                rotations = [layer.weight.rot90(k, (2, 3)) for k in range(4)]
                layer.weight.copy_(torch.stack(rotations).mean(0))
    still, rotated = (
        model.mean_image(latents, torch.tensor([numbers], dtype=torch.float64))
        for numbers in ([1.0, 0.0], [0.0, 1.0])
    )
    torch.testing.assert_close(rotated, still.rot90(1, (2, 3)))
    assert not torch.allclose(rotated, still)


def test_a_sure_kind_is_the_same_relaxed_and_discrete():
    model = small()
    sure = torch.eye(3).double()
    pose = torch.randn(3, 2).double()
    images = [
        m.mean_image({"object_kind": kind, "object_pose": pose})
        for m, kind in ((model, sure.log()), (model.discretize(), sure))
    ]
    torch.testing.assert_close(*images)
    assert isinstance(model.discretize().prior()["object_kind"], dist.OneHotCategorical)


def test_relaxed_kinds_do_not_underflow():
    """Their logarithms have a density where the simplex itself underflows in float32."""
    logits = torch.tensor([0.0, 300.0, -300.0])
    distribution = LogRelaxedOneHot(torch.tensor(0.5), logits=logits).expand((1000,))
    drawn = distribution.rsample()
    torch.testing.assert_close(drawn.exp().sum(-1), torch.ones(1000))
    assert distribution.log_prob(drawn).isfinite().all()
    plain = dist.RelaxedOneHotCategorical(torch.tensor(0.5), logits=torch.randn(3))
    simplex = plain.sample((20,))
    same = LogRelaxedOneHot(torch.tensor(0.5), logits=plain.logits).log_prob(simplex.log())
    torch.testing.assert_close(same, plain.log_prob(simplex) + simplex.log().sum(-1))


@pytest.mark.parametrize("motion", ["mixed", "linear"])
@pytest.mark.parametrize("kind", KINDS)
def test_learned_addresses_are_a_softmax_over_cells(kind, motion):
    model = small(kind, address="learned", motion=motion)
    latents = {name: distribution.sample((2,)) for name, distribution in model.prior().items()}
    parts = model.capsules(latents, torch.zeros(2, 2).double())
    assert parts.address.shape == (2, 5, 4)
    weight = torch.einsum("bca,an->bcn", parts.address, model.canvas.cells).softmax(-1)
    expected = torch.einsum("bcn,bcm->bmn", weight, parts.activation).view(2, 3, 3, 2)
    torch.testing.assert_close(model.canvas.route(parts), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_jitter_is_added_to_addresses(kind):
    model = small(kind, jitter=0.2)
    latents = {name: distribution.sample((2,)) for name, distribution in model.prior().items()}
    offset = latents["part_jitter"]
    assert offset.shape == (2, 5, 2)
    request = torch.randn(2, 2).double()
    address, activation = model.capsules(latents, request)
    moved = leaky_sigmoid(model.canvas(Parts(address + offset, activation)))
    torch.testing.assert_close(model.mean_image(latents, request), moved)
    assert "part_jitter" not in {site.name for site in small(kind).sites}
    trace = poutine.trace(model).get_trace(batch_size=3000)
    assert trace.nodes["part_jitter"]["value"].std().item() == pytest.approx(0.2, rel=0.05)


DECODERS = {
    "kinds": GenerativeCapsNet,
    "continuous": ContinuousCapsNet,
    "convolutional": ConditionalAutoencoder,
    "broadcast": partial(ConditionalAutoencoder, decoder="broadcast"),
    "linear": partial(ConditionalAutoencoder, decoder="linear"),
}


@pytest.mark.parametrize("kind", DECODERS)
def test_black_is_no_dead_end(kind):
    """Decoders start dark, and a black image still passes every pixel's error back."""
    torch.manual_seed(0)
    model = DECODERS[kind]((1, 28, 28)).double()
    (bias,) = (p for name, p in model.named_parameters() if name.endswith("paint.bias"))
    latents = {name: distribution.sample((2,)) for name, distribution in model.prior().items()}
    assert (bias == DARK).all()
    assert -0.4 < model.mean_image(latents).mean() < 0.1
    with torch.no_grad():
        bias.fill_(-1000.0)
    (slope,) = torch.autograd.grad(model.mean_image(latents).sum(), bias)
    torch.testing.assert_close(slope, torch.full_like(slope, LEAK * 2 * 28 * 28))


@pytest.mark.parametrize("motion", ["mixed", "linear"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_parts_start_all_over_the_grid(kind, motion, seed):
    """A uniform place has a scale of .58; of twenty parts' the estimate errs by .06."""
    torch.manual_seed(seed)
    model = kind((1, 68, 68), motion=motion)
    latents = {name: distribution.sample((2,)) for name, distribution in model.prior().items()}
    address = model.capsules(latents, torch.tensor([model.identity]).expand(2, -1)).address
    assert (address.abs() < 1).float().mean() > 0.8  # on the grid
    assert (address.std(1) > 0.35).all()
