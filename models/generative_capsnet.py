"""Generative CapsNets: part capsules write themselves into a map at addresses of their own.

Story. An object is of some kind and has a pose; it is requested under a transformation T, such as a
rotation. Kind, pose and T say what each of its parts looks like and where on a grid of cells it
belongs. A part does not know which cell that is beforehand, as a channel of a convolutional
decoder does: it computes an address, and is routed to the cells around it. So what moves an image
may move addresses alone, and a network that computes addresses can do so where no training image
has been.

    k ~ OneHotCategorical(1/K)                                  # kind of object, (B, K)
    pose ~ Normal(0, I)                                         # (B, D)
    u_c = sum_k k_k (W_kc [pose, T] + b_kc)                     # part capsules, (B, C, length)
    r_c ~ Normal(address_c(u_c), jitter)                        # row and column, (B, C, 2)
    a_c = sigmoid(activation_c(u_c))                            # (B, C, maps)
    F[i, j] = sum_c relu(1 - |i - q_c0|) relu(1 - |j - q_c1|) a_c,   q = (r + 1) (S - 1) / 2
    image ~ Normal(leaky_sigmoid(two transposed convolutions of F), sigma_image)

An address of -1 is the first cell and of 1 the last; around q a part is shared out bilinearly, with
weights that sum to one on the grid and leave no trace beyond it. `ContinuousCapsNet` has no kinds:
a code z ~ Normal(0, I) and T go through one dense layer to all addresses and activations.

So far code and request are mixed before anything is read from them (`motion="mixed"`), and a
network must find out by itself that a request has nothing to do with what the parts are. With
`motion="linear"` it cannot but know: the code alone says what the parts are and gives each a
matrix, and requests move parts linearly:

    u_c = sum_k k_k (W_kc pose + b_kc)
    r_c ~ Normal(matrix_c(u_c) [T, 1], jitter)                  # without the 1 for rotations

Turning is linear in the cosine and sine of the angle, and shifting in the shift, so that where the
matrices are learned they hold for every request. Which matrices, it is not told.

For training the kind is relaxed to a Concrete variable, whose site holds logarithms. With
`jitter=0` addresses are what the networks say; otherwise the site `part_jitter` holds how far each
part lies from there, so that its posterior does not depend on T.

References:
    Potapov 2018, "SingularityNET's AI Team Experiments with Generative Capsule Networks", and the
    authors' experiments (github.com/singnet/semantic-vision, experiments/invariance).
    Maddison, Mnih & Teh 2017, "The Concrete Distribution" (arXiv 1611.00712).
    The article's networks are autoencoders: codes are points and the loss is a squared error, as
    with the guide `ConditionalEncoder(model, deterministic=True)`. Its first attempt, which failed,
    routed by a softmax over learned cell addresses (`address="learned"`); there each map of a cell
    had an address of its own. Linear motion is not the article's, which mixes. Its transposed
    convolutions are rectified where ours have ELUs, and ours end in a sigmoid that leaks
    (`capsule_zoo.models.conditional_autoencoder`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical

from capsule_zoo.models.base import check_at_least, check_one_of, check_positive
from capsule_zoo.models.conditional_autoencoder import (
    Latents,
    OnRequest,
    centred_normal,
    leaky_sigmoid,
    starting_dark,
)
from capsule_zoo.models.leading import joined, over_leading
from capsule_zoo.models.vae import Upsampler


def splat(address: Tensor, activation: Tensor, size: tuple[int, int]) -> Tensor:
    """Capsules added to the four cells around their addresses, with bilinear weights.

    Args:
        address: (*batch, capsules, 2), row and column; -1 is the first cell, 1 the last.
        activation: (*batch, capsules, maps).
        size: (rows, columns) of the grid.

    Returns:
        Maps (*batch, maps, rows, columns).
    """
    rows, columns = (_hats(q, n) for q, n in zip(address.unbind(-1), size, strict=True))
    # Dense weights and one product: the grid is small, and scattering is slower on every device
    weights = (rows[..., None] * columns[..., None, :]).flatten(-2)  # (*batch, capsules, cells)
    return (activation.mT @ weights).unflatten(-1, size)


def _hats(address: Tensor, cells: int) -> Tensor:
    """Linear weights (..., cells) of the cells along one axis."""
    place = (address + 1) * ((cells - 1) / 2)
    cell = torch.arange(cells, dtype=address.dtype, device=address.device)
    return F.relu(1 - (cell - place[..., None]).abs())


class LogRelaxedOneHot(ExpRelaxedCategorical, TorchDistributionMixin):
    """The logarithm of a Concrete (relaxed one-hot) variable, in which none of it underflows."""


class Parts(NamedTuple):
    """Part capsules: `address` (*batch, C, its numbers) and `activation` (*batch, C, maps)."""

    address: Tensor
    activation: Tensor


def scatter(bias: nn.Parameter) -> None:
    """Have addresses start all over the grid, by the biases of what computes them.

    Where all parts start in one place they add up to a spot far too bright. The first updates then
    drive them off the grid, where no gradient reaches them, and from some seeds none comes back.
    """
    nn.init.uniform_(bias, -1, 1)


class CapsuleNetworks(PyroModule):
    """One network of two layers for each capsule, all of them two batched products.

    Called on (*batch, capsules, inputs) it returns (*batch, capsules, outputs).
    """

    def __init__(self, capsules: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.weight_in = _uniform(inputs, capsules, inputs, hidden)
        self.bias_in = _uniform(inputs, capsules, 1, hidden)
        self.weight_out = _uniform(hidden, capsules, hidden, outputs)
        self.bias_out = _uniform(hidden, capsules, 1, outputs)

    def forward(self, capsules: Tensor) -> Tensor:
        return over_leading(self._read, capsules, event_dim=2)

    def _read(self, capsules: Tensor) -> Tensor:
        """Return (B, capsules, outputs) of (B, capsules, inputs)."""
        hidden = torch.baddbmm(self.bias_in, capsules.transpose(0, 1), self.weight_in).relu()
        return torch.baddbmm(self.bias_out, hidden, self.weight_out).transpose(0, 1)


def _uniform(inputs: int, *shape: int) -> nn.Parameter:
    """A parameter that starts as those of a linear layer with so many inputs do."""
    bound = inputs**-0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


class Canvas(PyroModule):
    """Routing by address: capsules to maps, and maps to activities of pixels (B, C, H, W).

    Args:
        image_shape: (channels, height, width); the grid has a quarter of its rows and columns.
        maps: numbers in an activation.
        channels: maps at half the image's size.
        address: "fixed" (bilinear on the grid) or "learned" (a softmax over the products of the
            capsule's address with four numbers that each cell learns).
    """

    def __init__(
        self, image_shape: tuple[int, int, int], maps: int, channels: int, address: str
    ) -> None:
        super().__init__()
        check_one_of("address", address, ("fixed", "learned"))
        self.upsample = starting_dark(Upsampler(maps, image_shape, channels))
        self.grid = rows, columns = self.upsample.quarter
        self.learned, self.address_length = address == "learned", 2
        if self.learned:
            self.address_length = 4
            self.cells = nn.Parameter(torch.randn(self.address_length, rows * columns))

    def forward(self, parts: Parts) -> Tensor:
        return self.upsample(self.route(parts))

    def route(self, parts: Parts) -> Tensor:
        """Maps (*batch, maps, rows, columns)."""
        address, activation = parts
        if not self.learned:
            return splat(address, activation, self.grid)
        weights = (address @ self.cells).softmax(-1)  # (*batch, capsules, cells)
        return (activation.mT @ weights).unflatten(-1, self.grid)


class RoutedByAddress(OnRequest):
    """What both variants share: the canvas that parts are routed to, their motion and their jitter.

    Args:
        image_shape: (channels, height, width).
        parts: part capsules, C.
        maps: numbers in an activation.
        channels: maps at half the image's size.
        address: "fixed" or "learned", see `Canvas`.
        motion: "mixed" (parts are computed from code and request) or "linear" (from the code, and
            moved by the request), see the top of this file.
        jitter: deviation of an address; 0 for none.
        identity, sigma_image: of `OnRequest`.

    Raises:
        ValueError: a size below 1, a negative jitter, a deviation that is not positive, or an
            unknown way to address or to move.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        *,
        parts: int,
        maps: int = 32,
        channels: int = 32,
        address: str = "fixed",
        motion: str = "mixed",
        jitter: float = 0.0,
        identity: tuple[float, ...] = (1.0, 0.0),
        sigma_image: float = 0.15,
    ) -> None:
        super().__init__(image_shape, identity, sigma_image)
        check_at_least(1, parts=parts, maps=maps, channels=channels)
        check_at_least(0, jitter=jitter)
        check_one_of("motion", motion, ("mixed", "linear"))
        self.parts, self.maps, self.jitter = parts, maps, jitter
        self.canvas = Canvas(image_shape, maps, channels, address)
        self.linear, self.constant = motion == "linear", not any(identity)

    @property
    def numbers_heard(self) -> int:
        """Numbers of a request that parts are computed from."""
        return 0 if self.linear else len(self.identity)

    @property
    def address_numbers(self) -> int:
        """Numbers that a part's networks say of its address."""
        moves = len(self.identity) + self.constant if self.linear else 1
        return self.canvas.address_length * moves

    def heard(self, code: Tensor, request: Tensor) -> Tensor:
        """What parts are computed from: codes (B, n), and requests where the two are mixed."""
        return code if self.linear else joined([code, request], -1)

    def place(self, said: Tensor, request: Tensor) -> Tensor:
        """Addresses (B, C, n), of what the networks say of them (B, C, `address_numbers`)."""
        if not self.linear:
            return said
        if self.constant:  # zeros leave the image as it is, and move nothing away from the middle
            request = F.pad(request, (0, 1), value=1.0)
        matrices = said.unflatten(-1, (self.canvas.address_length, -1))
        return torch.einsum("...can,...n->...ca", matrices, request)

    def code_prior(self) -> dict[str, dist.TorchDistribution]:
        """The law of one image's code, by site."""
        raise NotImplementedError

    def capsules(self, latents: Latents, request: Tensor) -> Parts:
        """The parts before jitter, of latents by site and requests (B, n)."""
        raise NotImplementedError

    def prior(self) -> dict[str, dist.TorchDistribution]:
        laws = self.code_prior()
        if self.jitter:
            like, length = self.canvas.upsample.paint.weight, self.canvas.address_length
            laws["part_jitter"] = centred_normal(like, self.parts, length, deviation=self.jitter)
        return laws

    def paint(self, latents: Latents, request: Tensor) -> Tensor:
        address, activation = self.capsules(latents, request)
        parts = Parts(address + latents.get("part_jitter", 0.0), activation)
        return leaky_sigmoid(self.canvas(parts))


class GenerativeCapsNet(RoutedByAddress):
    """Kinds of objects place and activate part capsules; see the top of this file.

    Args:
        image_shape: (channels, height, width).
        kinds: kinds of objects, K.
        pose: numbers in a pose, D.
        parts: part capsules, C.
        length: numbers in a part capsule.
        hidden: units of a part's networks for its address and its activation.
        temperature: of the relaxed kind.
        options: arguments of `RoutedByAddress`, which says what is raised.
    """

    relaxed = True

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        *,
        kinds: int = 10,
        pose: int = 10,
        parts: int = 20,
        length: int = 10,
        hidden: int = 128,
        temperature: float = 2 / 3,
        **options: Any,
    ) -> None:
        super().__init__(image_shape, parts=parts, **options)
        check_at_least(1, kinds=kinds, pose=pose, length=length, hidden=hidden)
        check_positive(temperature=temperature)
        self.kinds, self.pose, self.length, self.temperature = kinds, pose, length, temperature
        numbers = pose + self.numbers_heard
        self.vote = PyroModule[nn.Linear](numbers, kinds * parts * length)  # all W_kc and b_kc
        self.address = CapsuleNetworks(parts, length, hidden, self.address_numbers)
        scatter(self.address.bias_out)
        self.activation = CapsuleNetworks(parts, length, hidden, self.maps)

    def with_discrete_presences(self) -> GenerativeCapsNet:
        """The same parameters with kinds that are one-hot, for reporting."""
        return self.sharing_parameters(relaxed=False)

    def kind_law(self, logits: Tensor) -> dist.TorchDistribution:
        """The law of the kind, from logits (..., K); relaxed ones are drawn as logarithms."""
        if self.relaxed:
            return LogRelaxedOneHot(logits.new_tensor(self.temperature), logits=logits)
        return dist.OneHotCategorical(logits=logits)

    def num_images(self, latents: Latents) -> int:
        return max(latents[name].shape[-2] for name in ("object_kind", "object_pose"))

    def code_prior(self) -> dict[str, dist.TorchDistribution]:
        weight = self.vote.weight
        return {
            "object_kind": self.kind_law(weight.new_zeros(self.kinds)),
            "object_pose": centred_normal(weight, self.pose),
        }

    def capsules(self, latents: Latents, request: Tensor) -> Parts:
        kind, pose = latents["object_kind"], latents["object_pose"]
        kind = kind.exp() if self.relaxed else kind
        votes = self.vote(self.heard(pose, request)).unflatten(-1, (self.kinds, -1))
        chosen = kind[..., None, :] @ votes  # (*batch, 1, parts x length)
        parts = chosen.view(*chosen.shape[:-2], self.parts, self.length)
        return Parts(self.place(self.address(parts), request), self.activation(parts).sigmoid())


class ContinuousCapsNet(RoutedByAddress):
    """A code without kinds places and activates all parts; see the top of this file.

    Args:
        image_shape: (channels, height, width).
        latent: numbers in a code.
        hidden: units of the dense layer.
        parts: part capsules, C.
        options: arguments of `RoutedByAddress`, which says what is raised.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        latent: int = 20,
        *,
        hidden: int = 1024,
        parts: int = 128,
        **options: Any,
    ) -> None:
        super().__init__(image_shape, parts=parts, **options)
        check_at_least(1, latent=latent, hidden=hidden)
        self.latent = latent
        self.mix = PyroModule[nn.Linear](latent + self.numbers_heard, hidden)
        self.address = PyroModule[nn.Linear](hidden, parts * self.address_numbers)
        scatter(self.address.bias)
        self.activation = PyroModule[nn.Linear](hidden, parts * self.maps)

    def code_prior(self) -> dict[str, dist.TorchDistribution]:
        return {"image_code": centred_normal(self.mix.weight, self.latent)}

    def capsules(self, latents: Latents, request: Tensor) -> Parts:
        mixed = F.relu(self.mix(self.heard(latents["image_code"], request)))
        said, activation = (
            read(mixed).unflatten(-1, (self.parts, -1)) for read in (self.address, self.activation)
        )
        return Parts(self.place(said, request), activation.sigmoid())
