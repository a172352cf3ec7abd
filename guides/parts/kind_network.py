"""A network that proposes an object of every kind from the parts, for shape codes."""

from typing import NamedTuple

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from pyro.ops.indexing import Vindex
from torch import Tensor, nn

from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.models.common.remembering import Submodule
from capsule_zoo.models.networks.layers import ELU, perceptron
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import Capsules, as_presence
from capsule_zoo.models.shape_codes import ShapeCodes

_INITIAL_SCALE = 0.1  # standard deviation of a fresh code, whose prior has 1
_INITIAL_POSE_SCALE = 0.02


class KindProposals(NamedTuple):
    """The distributions q(A, c | parts, k) of an object's pose and code, for every kind k.

    Attributes:
        pose, pose_scale: means and standard deviations of the pose, (B, K, 6).
        code, code_scale: means and standard deviations of the code, (B, K, d).

    The standard deviations are None where pose and code are points.
    """

    pose: Tensor
    code: Tensor
    pose_scale: Tensor | None = None
    code_scale: Tensor | None = None

    def points(self) -> "KindProposals":
        """Return the proposals as points at their centers, without standard deviations."""
        return KindProposals(self.pose, self.code)

    def log_density_at_centers(self) -> Tensor | float:
        """Return log q(a_k, m_k | k), (B, K), in nats; 0 for points."""
        if self.pose_scale is None or self.code_scale is None:
            return 0.0
        pose = dist.Normal(self.pose, self.pose_scale).to_event(1)
        code = dist.Normal(self.code, self.code_scale).to_event(1)
        return pose.log_prob(self.pose) + code.log_prob(self.code)

    def distributions(self, kind: Tensor) -> tuple[dist.TorchDistribution, dist.TorchDistribution]:
        """Return the distributions of pose and code for a kind (B, 1), which may be enumerated."""
        pose, code = (Vindex(x.unsqueeze(-3))[..., kind, :] for x in self[:2])
        if self.pose_scale is None or self.code_scale is None:
            return dist.Delta(pose, event_dim=1), dist.Delta(code, event_dim=1)
        scales = (self.pose_scale, self.code_scale)
        pose_scale, code_scale = (Vindex(x.unsqueeze(-3))[..., kind, :] for x in scales)
        return dist.Normal(pose, pose_scale).to_event(1), dist.Normal(code, code_scale).to_event(1)


class KindNetwork(Submodule, PyroModule):
    """The network that proposes an object of every kind from all parts.

    The centers are a linear map of the parts, which the posterior would be if all parts were
    present, plus the output of a perceptron.

    Args:
        model: shape codes.
        objects: the distribution of pose and code, "delta" (centers alone) or "normal".
        width: units of each hidden layer.
        hidden: number of hidden layers.

    Raises:
        ValueError: a size below 1.
    """

    model_class = ShapeCodes

    def __init__(
        self, model: ShapeCodes, objects: str, *, width: int = 384, hidden: int = 2
    ) -> None:
        super().__init__()
        check_at_least(1, width=width, hidden=hidden)
        self.objects = objects
        in_features = 7 * model.levels[-1].size
        sizes = [in_features, *[width] * hidden]
        self.body, inputs = perceptron(*sizes, unit=ELU, last=True), sizes[-1]
        outputs = model.kinds * (6 + model.codes)
        self.center = PyroModule[nn.Linear](inputs, outputs)
        self.center.weight.data *= 0.1  # objects start near the identity, with codes near zero
        if objects == "normal":
            self.spread = PyroModule[nn.Linear](inputs, outputs)
            self.spread.weight.data *= 0.1
        with use_seed(0):  # its draws are not used
            self.direct = PyroModule[nn.Linear](in_features, outputs, bias=False)
        self.direct.weight.data.zero_()

    @torch.no_grad()
    def start_at_posterior(self, model: ShapeCodes) -> None:
        """Set the proposals to the posterior of codes given parts, for objects at the identity.

        They are exact where all parts are present, none is the dummy's, presences do not depend on
        codes, and the numbers of a code are independent given the parts. Models that start from
        factor analyzers, by `start_kinds`, are such. What the perceptron adds begins at zero.
        """
        shapes = model.shapes
        precision = shapes.scale**-2  # (K, P, 6)
        weighted = precision[..., None] * shapes.pose_codes  # (K, P, 6, d)
        code = 1 + (weighted * shapes.pose_codes).sum((1, 2))  # (K, d)
        by_pose = weighted / code[:, None, None]
        by_presence = -torch.einsum("kpid,kpi->kpd", by_pose, shapes.place)
        by_part = torch.cat([by_presence[:, :, None], by_pose], dim=2)  # (K, P, 7, d)
        onto_code = by_part.flatten(1, 2).mT  # (K, d, 7 P)
        self.direct.weight.copy_(F.pad(onto_code, (0, 0, 6, 0)).flatten(0, 1))
        self.center.weight.zero_()
        self.center.bias.zero_()
        if self.objects == "normal":
            place = poses.to_matrix(shapes.place).square()
            rows = precision.unflatten(-1, (2, 3))
            pose = torch.einsum("kprl,kpjl->krj", rows, place).flatten(1)
            pose = pose + model.pose.scale(pose) ** -2
            first = pose.rsqrt() / _INITIAL_POSE_SCALE, code.rsqrt() / _INITIAL_SCALE
            self.spread.weight.zero_()
            self.spread.bias.copy_(torch.cat(first, dim=-1).log().flatten())

    def forward(self, model: ShapeCodes, parts: Capsules) -> KindProposals:
        presence = as_presence(parts.presence, model.relaxed)[..., None]
        inputs = torch.cat([presence, presence * parts.pose], dim=-1).flatten(-2)
        hidden = self.body(inputs)
        pose, code = self._split_by_kind(model, self.center(hidden) + self.direct(inputs))
        pose = poses.identity_like(pose) + pose
        if self.objects == "delta":
            return KindProposals(pose, code)
        pose_spread, code_spread = self._split_by_kind(model, self.spread(hidden))
        scales = _INITIAL_POSE_SCALE * pose_spread.exp(), _INITIAL_SCALE * code_spread.exp()
        return KindProposals(pose, code, *scales)

    @staticmethod
    def _split_by_kind(model: ShapeCodes, numbers: Tensor) -> tuple[Tensor, Tensor]:
        numbers = numbers.unflatten(-1, (model.kinds, 6 + model.codes))
        pose, code = numbers.split([6, model.codes], dim=-1)
        return pose, code
