"""Generative CapsNets: part capsules are written into maps at computed addresses.

Story. An object is of some kind and has a pose; it is requested under a transformation T, such as a
rotation. Kind, pose and T determine the appearance of each part and its position on a grid. A
channel of a convolutional decoder has fixed cells. A part does not: it computes an address and is
routed to the cells around that address. A change that moves an image can therefore move addresses
only, and a network that computes addresses can place parts where no training image has had any.

    k ~ OneHotCategorical(1/K)                                  # kind of object, (B, K)
    pose ~ Normal(0, I)                                         # (B, D)
    u_c = sum_k k_k (W_kc [pose, T] + b_kc)                     # part capsules, (B, C, length)
    r_c ~ Normal(address_c(u_c), jitter)                        # row and column, (B, C, 2)
    a_c = sigmoid(activation_c(u_c))                            # (B, C, maps)
    F[i, j] = sum_c relu(1 - |i - q_c0|) relu(1 - |j - q_c1|) a_c,   q = (r + 1) (S - 1) / 2
    image ~ Normal(leaky_sigmoid(two transposed convolutions of F), sigma_image)

An address of -1 is the first cell, an address of 1 the last. A part is distributed bilinearly over
the cells around q. The weights sum to one on the grid, and outside the grid a part has no effect.
`ContinuousCapsNet` has no kinds: a code z ~ Normal(0, I) and T go through one dense layer to all
addresses and activations.

In the model above, code and request are mixed before the parts are computed (`motion="mixed"`). A
network must then learn that a request does not change what the parts are. With `motion="linear"`
this is built in. The code alone determines the parts and gives each of them a matrix, and requests
move parts linearly:

    u_c = sum_k k_k (W_kc pose + b_kc)
    r_c ~ Normal(matrix_c(u_c) [T, 1], jitter)                  # without the 1 for rotations

A rotation is linear in the cosine and sine of the angle, and a shift is linear in its pixels.
Matrices that are learned for some requests are therefore right for every request. The matrices
themselves are not given to the model.

For training the kind is relaxed to a Concrete variable, whose site holds logarithms. With
`jitter=0` the addresses are the outputs of the networks. Otherwise the site `part_jitter` holds the
distance of each part from that address, so that the posterior of the site does not depend on T.

References:
    Potapov 2018, "SingularityNET's AI Team Experiments with Generative Capsule Networks", and the
    authors' experiments (github.com/singnet/semantic-vision, experiments/invariance).
    Maddison, Mnih & Teh 2017, "The Concrete Distribution" (arXiv 1611.00712).
    The article's networks are autoencoders: codes are points and the loss is a squared error, as
    with the guide `ConditionalEncoder(model, deterministic=True)`. Its first attempt, which failed,
    routed by a softmax over learned cell addresses (`address="learned"`); there each map of a cell
    had its own address. The article has no linear motion: it mixes code and request. Its transposed
    convolutions are rectified; those here have ELUs and end in a sigmoid that leaks
    (`capsule_zoo.models.baselines.conditional_autoencoder`).
"""

from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical

from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive
from capsule_zoo.models.networks.convolutional import Upsampler
from capsule_zoo.models.networks.leading import join_broadcast, over_leading
from capsule_zoo.models.networks.on_request import (
    Latents,
    OnRequest,
    centered_normal,
    leaky_sigmoid,
    starting_dark,
)


def splat(address: Tensor, activation: Tensor, size: tuple[int, int]) -> Tensor:
    """Add capsules to the four cells around their addresses, with bilinear weights.

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
    """Compute the linear interpolation weights (..., cells) of the cells along one axis."""
    place = (address + 1) * ((cells - 1) / 2)
    cell = torch.arange(cells, dtype=address.dtype, device=address.device)
    return F.relu(1 - (cell - place[..., None]).abs())


class LogRelaxedOneHot(ExpRelaxedCategorical, TorchDistributionMixin):
    """The distribution of the log of a Concrete variable, which never underflows."""


class Parts(NamedTuple):
    """The part capsules: `address` (*batch, C, numbers) and `activation` (*batch, C, maps)."""

    address: Tensor
    activation: Tensor


def scatter(bias: nn.Parameter) -> None:
    """Initialize the biases of address networks so that addresses are spread over the grid.

    If all parts start at one position, they add up to a spot that is far too bright. First updates
    then drive the parts off the grid, where they get no gradient. From some seeds no part comes
    back.
    """
    nn.init.uniform_(bias, -1, 1)


class CapsuleNetworks(PyroModule):
    """Two-layer networks, one for each capsule, computed as two batched products.

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
        """Apply the networks to inputs (B, capsules, inputs); return (B, capsules, outputs)."""
        hidden = torch.baddbmm(self.bias_in, capsules.transpose(0, 1), self.weight_in).relu()
        return torch.baddbmm(self.bias_out, hidden, self.weight_out).transpose(0, 1)


def _uniform(inputs: int, *shape: int) -> nn.Parameter:
    """Return a parameter initialized as in a linear layer with this many inputs."""
    bound = inputs**-0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


class Canvas(PyroModule):
    """The routing by address: capsules are written to maps, and maps are decoded to pixels.

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
        self.learned = address == "learned"
        self.address_length = 2
        if self.learned:
            self.address_length = 4
            self.cells = nn.Parameter(torch.randn(self.address_length, rows * columns))

    def forward(self, parts: Parts) -> Tensor:
        return self.upsample(self.route(parts))

    def route(self, parts: Parts) -> Tensor:
        """Write the parts into maps (*batch, maps, rows, columns) at their addresses."""
        address, activation = parts
        if not self.learned:
            return splat(address, activation, self.grid)
        weights = (address @ self.cells).softmax(-1)  # (*batch, capsules, cells)
        return (activation.mT @ weights).unflatten(-1, self.grid)


class RoutedByAddress(OnRequest):
    """The base class of both variants: canvas, motion and jitter of the parts.

    Args:
        image_shape: (channels, height, width).
        parts: part capsules, C.
        maps: numbers in an activation.
        channels: maps at half the image's size.
        address: "fixed" (a position on the grid) or "learned" (each cell learns its own address).
        motion: "mixed" (parts are computed from code and request) or "linear" (parts are computed
            from the code and moved by the request).
        jitter: standard deviation of an address; 0 for none.
        identity: see `OnRequest`.
        sigma_image: standard deviation of a pixel, in units of its range.

    Raises:
        ValueError: a size below 1, a negative jitter, a standard deviation that is not positive, or
            an unknown `address` or `motion`.
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
        self.parts = parts
        self.maps = maps
        self.jitter = jitter
        self.canvas = Canvas(image_shape, maps, channels, address)
        self.linear = motion == "linear"
        self.constant = not any(identity)

    @property
    def request_inputs(self) -> int:
        """The number of a request's entries from which the parts are computed."""
        return 0 if self.linear else len(self.identity)

    @property
    def address_numbers(self) -> int:
        """The number of outputs of a part's networks for its address."""
        moves = len(self.identity) + self.constant if self.linear else 1
        return self.canvas.address_length * moves

    def inputs(self, code: Tensor, request: Tensor) -> Tensor:
        """Return the inputs of the parts' networks: codes (B, n), with requests if mixed."""
        return code if self.linear else join_broadcast([code, request], -1)

    def place(self, outputs: Tensor, request: Tensor) -> Tensor:
        """Compute addresses (B, C, n) from the networks' outputs (B, C, `address_numbers`)."""
        if not self.linear:
            return outputs
        if self.constant:  # a request of zeros is the identity and moves no part off the middle
            request = F.pad(request, (0, 1), value=1.0)
        matrices = outputs.unflatten(-1, (self.canvas.address_length, -1))
        return torch.einsum("...can,...n->...ca", matrices, request)

    def code_prior(self) -> dict[str, dist.TorchDistribution]:
        """Return the prior of one image's code, by site."""
        raise NotImplementedError

    def capsules(self, latents: Latents, request: Tensor) -> Parts:
        """Compute the parts before jitter from latents by site and requests (B, n)."""
        raise NotImplementedError

    def prior(self) -> dict[str, dist.TorchDistribution]:
        distributions = self.code_prior()
        if self.jitter:
            like, length = self.canvas.upsample.paint.weight, self.canvas.address_length
            distributions["part_jitter"] = centered_normal(
                like, self.parts, length, scale=self.jitter
            )
        return distributions

    def paint(self, latents: Latents, request: Tensor) -> Tensor:
        address, activation = self.capsules(latents, request)
        parts = Parts(address + latents.get("part_jitter", 0.0), activation)
        return leaky_sigmoid(self.canvas(parts))


class GenerativeCapsNet(RoutedByAddress):
    """The generative CapsNet in which kinds of objects place and activate part capsules.

    Args:
        image_shape: (channels, height, width).
        kinds: kinds of objects, K.
        pose: numbers in a pose, D.
        parts: part capsules, C.
        length: numbers in a part capsule.
        hidden: units of a part's networks for its address and its activation.
        temperature: temperature of the Concrete distribution of the relaxed kind.
        options: arguments of `RoutedByAddress`, which lists the errors.
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
        self.kinds = kinds
        self.pose = pose
        self.length = length
        self.temperature = temperature
        numbers = pose + self.request_inputs
        self.vote = PyroModule[nn.Linear](numbers, kinds * parts * length)  # all W_kc and b_kc
        self.address = CapsuleNetworks(parts, length, hidden, self.address_numbers)
        scatter(self.address.bias_out)
        self.activation = CapsuleNetworks(parts, length, hidden, self.maps)

    def discretize(self) -> "GenerativeCapsNet":
        """Return the model with one-hot kinds and shared parameters, for reporting."""
        return self.sharing_parameters(relaxed=False)

    def kind_distribution(self, logits: Tensor) -> dist.TorchDistribution:
        """Return the distribution of kinds from logits (..., K); relaxed kinds are logarithms."""
        if self.relaxed:
            return LogRelaxedOneHot(logits.new_tensor(self.temperature), logits=logits)
        return dist.OneHotCategorical(logits=logits)

    def num_images(self, latents: Latents) -> int:
        return max(latents[name].shape[-2] for name in ("object_kind", "object_pose"))

    def code_prior(self) -> dict[str, dist.TorchDistribution]:
        weight = self.vote.weight
        return {
            "object_kind": self.kind_distribution(weight.new_zeros(self.kinds)),
            "object_pose": centered_normal(weight, self.pose),
        }

    def capsules(self, latents: Latents, request: Tensor) -> Parts:
        kind, pose = latents["object_kind"], latents["object_pose"]
        kind = kind.exp() if self.relaxed else kind
        votes = self.vote(self.inputs(pose, request)).unflatten(-1, (self.kinds, -1))
        kind_votes = kind[..., None, :] @ votes  # (*batch, 1, parts x length)
        parts = kind_votes.view(*kind_votes.shape[:-2], self.parts, self.length)
        return Parts(self.place(self.address(parts), request), self.activation(parts).sigmoid())


class ContinuousCapsNet(RoutedByAddress):
    """The generative CapsNet in which a code without kinds places and activates all parts.

    Args:
        image_shape: (channels, height, width).
        latent: numbers in a code.
        hidden: units of the dense layer.
        parts: part capsules, C.
        options: arguments of `RoutedByAddress`, which lists the errors.
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
        self.mix = PyroModule[nn.Linear](latent + self.request_inputs, hidden)
        self.address = PyroModule[nn.Linear](hidden, parts * self.address_numbers)
        scatter(self.address.bias)
        self.activation = PyroModule[nn.Linear](hidden, parts * self.maps)

    def code_prior(self) -> dict[str, dist.TorchDistribution]:
        return {"image_code": centered_normal(self.mix.weight, self.latent)}

    def capsules(self, latents: Latents, request: Tensor) -> Parts:
        mixed = F.relu(self.mix(self.inputs(latents["image_code"], request)))
        outputs, activation = (
            read(mixed).unflatten(-1, (self.parts, -1)) for read in (self.address, self.activation)
        )
        return Parts(self.place(outputs, request), activation.sigmoid())
