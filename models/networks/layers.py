"""Neural layers of several models and guides.

Attention over sets follows Lee et al. 2019, "Set Transformer" (arXiv 1810.00825): MAB (eq. 6),
ISAB (eq. 9-10) and PMA (eq. 11). `AttentionPooling` reads one vector per capsule out of a feature
map, as in Kosiorek et al. 2019 (arXiv 1906.06818, appendix).
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.networks.leading import join_broadcast


class _ELU(torch.autograd.Function):
    """The autograd function max(x, e^min(x, 0) - 1), whose gradient needs only the result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.maximum(x, x.clamp(max=0).exp_().sub_(1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ops.aten.elu_backward(gradient, 1.0, 1.0, 1.0, True, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * (ctx.saved_tensors[0].clamp(max=0) + 1)


def elu(x: Tensor) -> Tensor:
    """Compute the exponential linear unit (ELU), on CPUs six times as fast as torch.

    Torch computes e^x - 1 to a relative rounding error, which is slow there. The error of this form
    is absolute, and as large as the rounding of 1.
    """
    if x.device.type != "cpu" or x.dtype.itemsize < 4 or torch.compiler.is_compiling():
        return F.elu(x)
    return _ELU.apply(x)


class ELU(nn.Module):
    """The exponential linear unit as a layer; see `elu`."""

    def forward(self, x: Tensor) -> Tensor:
        return elu(x)


class AttentionPooling(PyroModule):
    """The layer that averages each capsule's outputs over a map, weighted by its attention.

    A 1x1 convolution gives each of `capsules` capsules `outputs` maps and one attention map.
    Called on features (B, channels, H, W) it returns (B, capsules, outputs).
    """

    def __init__(self, channels: int, capsules: int, outputs: int) -> None:
        super().__init__()
        self.capsules = capsules
        self.read = PyroModule[nn.Conv2d](channels, capsules * (outputs + 1), 1)

    def forward(self, features: Tensor) -> Tensor:
        # Outputs are linear and attention sums to one, so pooling first gives the same numbers at a
        # tenth of the operations.
        weight = self.read.weight.unflatten(0, (self.capsules, -1)).flatten(2)
        bias = self.read.bias.unflatten(0, (self.capsules, -1))
        features = features.flatten(2)  # (B, channels, positions)
        scores = weight[:, -1] @ features + bias[:, -1:]  # (B, capsules, positions)
        pooled = scores.softmax(-1) @ features.mT
        return torch.einsum("bcf,cof->bco", pooled, weight[:, :-1]) + bias[:, :-1]


class BalancedLogits(PyroModule):
    """The layer that standardizes logits over the images of a batch.

    It is batch normalization without learned numbers. Each column has mean zero over a batch in
    training mode, and the standard deviation `spread` sqrt(v / (v + 1e-5)), where v is the variance
    of the logits that come in. Otherwise, or when the batch is a single image, it has them over the
    running statistics. A presence can then be neither always on nor always off. Without this,
    relaxed presences collapse to one of the two early in training. Training may still shrink v
    until presences are undecided: in the weights `part-whole-mnist` the standard deviation is .67,
    not 3. Called on logits (*outer, B, columns). Every outer index, such as a particle, has its own
    statistics, and the running statistics move towards their mean.

    Reference: Zhu et al. 2020, "A Batch Normalized Inference Network Keeps the KL Vanishing Away"
    (arXiv 2004.12585).
    """

    running_mean: Tensor
    running_variance: Tensor

    def __init__(self, columns: int, spread: float = 3.0, momentum: float = 0.1) -> None:
        super().__init__()
        self.spread = spread
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(columns))
        self.register_buffer("running_variance", torch.ones(columns))

    def forward(self, logits: Tensor) -> Tensor:
        training = self.training and logits.shape[-2] > 1
        if logits.dim() == 2:
            mean, variance = self.running_mean, self.running_variance
            return self.spread * F.batch_norm(
                logits, mean, variance, training=training, momentum=self.momentum
            )
        by_image = logits.movedim(-2, 0)  # (B, *outer, columns)
        copies = by_image[0, ..., 0].numel()
        mean, variance = (x.repeat(copies) for x in (self.running_mean, self.running_variance))
        normal = F.batch_norm(
            by_image.flatten(1), mean, variance, training=training, momentum=self.momentum
        )
        if training:
            self.running_mean.copy_(mean.unflatten(0, (copies, -1)).mean(0))
            self.running_variance.copy_(variance.unflatten(0, (copies, -1)).mean(0))
        return self.spread * normal.view_as(by_image).movedim(0, -2)


class MultiheadAttentionBlock(PyroModule):
    """The block MAB(X, Y) = LN(H + ReLU(linear(H))) with H = LN(X + attention(X, Y, Y)).

    The result is (B, n, width). X may be (1, n, width), the same for all images.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, not {width} of {heads}")
        self.heads = heads
        self.query = PyroModule[nn.Linear](width, width)
        self.key_value = PyroModule[nn.Linear](width, 2 * width)
        self.mix = PyroModule[nn.Linear](width, width)
        self.feed = PyroModule[nn.Linear](width, width)
        self.norm_attention = PyroModule[nn.LayerNorm](width)
        self.norm_feed = PyroModule[nn.LayerNorm](width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = self.key_value(y).unflatten(-1, (2, self.heads, -1)).unbind(2)
        # Written out, because for such small sets torch's fused kernel is several times slower
        scores = query @ key.permute(0, 2, 3, 1) * key.shape[-1] ** -0.5
        attended = scores.softmax(-1) @ value.transpose(1, 2)
        hidden = self.norm_attention(x + self.mix(attended.transpose(1, 2).flatten(2)))
        return self.norm_feed(hidden + F.relu(self.feed(hidden)))


class InducedSetAttention(PyroModule):
    """The block ISAB, in which a set attends to learned inducing points that attended to it."""

    def __init__(self, width: int, heads: int, inducing: int) -> None:
        super().__init__()
        self.inducing = nn.Parameter(torch.randn(inducing, width) / width**0.5)
        self.gather = MultiheadAttentionBlock(width, heads)
        self.scatter = MultiheadAttentionBlock(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        summary = self.gather(self.inducing[None], x)
        return self.scatter(x, summary)


class SetTransformer(PyroModule):
    """A network from a set of vectors to a fixed number of capsules.

    It has a linear layer, ISABs, PMA and one linear layer for each capsule.

    Args:
        inputs: size of the vectors in the set.
        capsules: number of output capsules.
        outputs: numbers of each capsule, from its own linear layer.
        width: numbers of each element between the layers.
        heads: attention heads.
        blocks: attention blocks between the elements.
        inducing: inducing points of each attention block.

    Called on (B, n, inputs) it returns (B, capsules, outputs) and does not depend on the order.

    Raises:
        ValueError: a size out of range.
    """

    def __init__(
        self,
        inputs: int,
        capsules: int,
        outputs: int,
        width: int = 128,
        heads: int = 4,
        blocks: int = 3,
        inducing: int = 16,
    ) -> None:
        super().__init__()
        check_at_least(1, width=width, heads=heads, inducing=inducing)
        check_at_least(0, blocks=blocks)
        self.embed = PyroModule[nn.Linear](inputs, width)
        self.blocks = PyroModule[nn.ModuleList](
            [InducedSetAttention(width, heads, inducing) for _ in range(blocks)]
        )
        self.seeds = nn.Parameter(torch.randn(capsules, width) / width**0.5)
        self.pool = MultiheadAttentionBlock(width, heads)
        self.read_weight = nn.Parameter(torch.randn(capsules, width, outputs) / width**0.5)
        self.read_bias = nn.Parameter(torch.zeros(capsules, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.members(x))

    def members(self, x: Tensor) -> Tensor:
        """Compute features of the members of a set, in the context of the others, (B, n, width)."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def read(self, members: Tensor) -> Tensor:
        """Compute the outputs of every capsule, (B, capsules, outputs), from `members`."""
        pooled = self.pool(self.seeds[None], members)  # (B, capsules, width)
        return torch.einsum("bcw,cwo->bco", pooled, self.read_weight) + self.read_bias


def perceptron(*sizes: int, unit: type[nn.Module] = nn.ReLU, last: bool = False) -> PyroModule:
    """Return a perceptron: linear layers of these sizes, with nonlinearities between them.

    Args:
        unit: class of the units.
        last: whether units follow the last layer too.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [PyroModule[nn.Linear](inputs, outputs), unit()]
    return PyroModule[nn.Sequential](*(layers if last else layers[:-1]))


class CoupledLSTM(PyroModule):
    """An LSTM whose input gate is one minus its forget gate.

        f, o, g = linear(inputs, h),    s' = f s + (1 - f) tanh(g),    h' = o tanh(s')

    Gates are logistic. The new cell lies between the old cell and tanh(g), so that no cell ever
    leaves [-1, 1], after any number of steps. With a free input gate cells can grow by 1 a step.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.gates = PyroModule[nn.Linear](inputs + units, 3 * units)
        nn.init.normal_(self.gates.weight, std=(inputs + units) ** -0.5)
        nn.init.zeros_(self.gates.bias)

    def forward(self, inputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        forget, output, new = self.gates(join_broadcast([inputs, hidden], -1)).chunk(3, -1)
        # The cell keeps its precision under autocast, where the gates have less
        cell = torch.lerp(new.tanh().to(cell), cell, forget.sigmoid().to(cell))
        return output.sigmoid() * cell.tanh(), cell
