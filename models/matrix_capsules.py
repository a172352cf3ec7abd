"""Matrix capsules: a classifier in which every layer infers poses and presences by routing.

Story. A convolution reads features off the image; primary capsules read poses and presences off the
features; two layers of convolutional capsules and a layer of class capsules follow, each inferred
from the votes of the one below. The label is the class whose capsule has the highest presence.

    image    ~ Uniform(0, 1)                                       # (B, C, H, W): not modeled
    features = relu(conv5x5(image))                                # (B, A, ., .)
    primary  = 1x1(features)                                       # grid of B types
    capsules = route(votes(primary)), 3x3 stride 2                 # grid of C types
    capsules = route(votes(capsules)), 3x3                         # grid of D types
    classes  = route(votes(capsules) + coordinates)                # one capsule a class, a_c
    label    ~ Categorical(-E(., a)) or Categorical(logit a)       # (B,)
    factor sum_t exp(-E(t, a))                                     # with the spread loss only
    factor exp(-w |image - decoder(pose of the label's capsule)|^2)    # in training, if w > 0

    E(t, a) = sum_{c != t} max(0, m - (a_t - a_c))^2               # the spread loss

The model explains labels, not images, so without labels it has nothing to score. The distribution
of the spread loss is a Gibbs distribution. The factor is its partition function, so that the log
joint is minus the loss that the paper trains. The margin m grows with the updates, which the
objective counts (`capsule_zoo.inference.SpreadLoss`).

Routing is inference in a mixture of switchable Gaussians (`capsule_zoo.models.SwitchableGaussians`)
and is an argument of the model, because models do not import guides:
`MatrixCapsules(routing=EMRouting(3))`.

References:
    Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing" (ICLR): section 4 and figure 1
    for the network, section 4.1 for the spread loss. The margin grows with the shape of their
    released code, over a 200th of the updates; the paper gives no shape. For the first
    transformations and the scale of costs see `capsule_convolution`.
    Hui 2017, "Understanding Matrix capsules with EM Routing" (an article), whose code most programs
    follow: `EMRouting(3, anneal="linear", costs="standardized")`, a margin that grows by .1 an
    epoch (`margin_shape="linear"`), and a loss of reconstruction (`reconstruction`).
"""

import math
from typing import Any, Self

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive
from capsule_zoo.models.common.remembering import note_changes
from capsule_zoo.models.networks.classifier import Classifier, standardize_images
from capsule_zoo.models.networks.layers import perceptron
from capsule_zoo.models.routing.capsule_convolution import (
    POSE,
    RIGHT_COLUMN,
    CapsuleGrid,
    CapsuleLayer,
    ClassCapsules,
    PrimaryCapsules,
)
from capsule_zoo.models.routing.parent_distribution import (
    ParentDistribution,
    Routing,
    pay_for_connections,
    sharing,
)
from capsule_zoo.models.routing.votes import Votes, Windows

PRESETS: dict[str, dict[str, Any]] = {
    "small": dict(features=64, capsules=(8, 16, 16)),
    "full": dict(features=32, capsules=(32, 32, 32)),
}
HIDDEN = (512, 1024)  # units of a decoder, as in the capsule network of 2017


def spread_energy(presence: Tensor, margin: float) -> Tensor:
    """Compute the spread loss for each label, (..., classes), from presences (..., classes)."""
    gap = presence[..., :, None] - presence[..., None, :]  # a_t - a_c
    loss = (margin - gap).clamp_min(0).square()
    return loss.sum(-1) - torch.diagonal(loss, dim1=-2, dim2=-1)


class MatrixCapsules(Classifier):
    """The matrix capsule network as a model of labels, described at the top of this file.

    Args:
        image_shape: (channels, height, width), 17x17 pixels or more, padding included.
        classes: number of classes of the label.
        routing: infers every layer, such as `EMRouting(3)` of `capsule_zoo.guides`.
        features: channels of the first convolution, A.
        capsules: types of the primary and the two convolutional layers, (B, C, D).
        likelihood: "spread" or "categorical".
        margin_steps: updates in which the margin of the spread loss grows by a sigmoid's unit:
            .2 + .79 sigmoid(updates / margin_steps - 4). The state holds the number of updates,
            which `capsule_zoo.inference.SpreadLoss` counts.
        margin_shape: "sigmoid", or "linear", with which the margin grows from .2 to .9, by .1 in
            `margin_steps` updates (in Hui's article an epoch).
        coordinates: as for `ClassCapsules`.
        padding: pixels of zeros around the image, for the first convolution; the paper has none.
        reconstruction: weight w of the squared error of an image that a decoder draws from the pose
            of the label's capsule, in the units of the loss, such as .0005; 0 for no decoder. It is
            a part of the density in training mode only.
        recompute: compute the votes again in the backward pass instead of keeping them, which takes
            less memory and more time; by default where a batch has more than 2^25 numbers of votes
            (2^29 on an accelerator).

    Raises:
        ValueError: a size below 1, an image that is too small, an unknown likelihood or shape, or a
            negative weight.

    Called as `model(images=None, labels=None, batch_size=1)` it returns the images.
    `capsules(images)` returns every layer, `predict(images)` the labels.
    """

    updates: Tensor

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        classes: int = 10,
        *,
        routing: Routing,
        features: int = 64,
        capsules: tuple[int, int, int] = (8, 16, 16),
        likelihood: str = "spread",
        margin_steps: float = 250,
        coordinates: tuple[tuple[int, int], tuple[int, int]] | None = RIGHT_COLUMN,
        padding: int = 0,
        margin_shape: str = "sigmoid",
        reconstruction: float = 0.0,
        recompute: bool | None = None,
    ) -> None:
        super().__init__(image_shape, classes)
        primary, middle, last = capsules
        check_at_least(1, features=features)
        check_at_least(0, padding=padding, reconstruction=reconstruction)
        check_positive(margin_steps=margin_steps)
        check_one_of("likelihood", likelihood, ("spread", "categorical"))
        check_one_of("margin_shape", margin_shape, ("sigmoid", "linear"))
        self.likelihood = likelihood
        self.margin_steps = margin_steps
        self.margin_shape = margin_shape
        self.reconstruction = reconstruction
        self.normalized = likelihood == "categorical"
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        channels, height, width = image_shape
        if min(height, width) + 2 * padding < 17:
            raise ValueError(
                "image_shape must be 17x17 pixels or more, padding included, not "
                f"{height}x{width} and {padding}"
            )
        grid = ((height + 2 * padding - 3) // 2, (width + 2 * padding - 3) // 2)
        self.stem = PyroModule[nn.Conv2d](channels, features, 5, stride=2, padding=padding)
        nn.init.kaiming_normal_(self.stem.weight, nonlinearity="relu")
        nn.init.zeros_(self.stem.bias)
        self.primary = PrimaryCapsules(features, primary)
        options: dict[str, Any] = dict(routing=routing, recompute=recompute)
        first = CapsuleLayer(Windows.sliding(*grid, 3, 2), primary, middle, **options)
        second = CapsuleLayer(Windows.sliding(*first.shape, 3, 1), middle, last, **options)
        self.layers = PyroModule[nn.ModuleList]([first, second])
        self.classes = ClassCapsules(
            last, classes, second.shape, coordinates=coordinates, **options
        )
        self.decoder = None
        if reconstruction:
            self.decoder = perceptron(classes * POSE * POSE, *HIDDEN, math.prod(image_shape))

    @pyro_method
    def capsules(self, images: Tensor) -> list[CapsuleGrid]:
        """Compute the capsules of every layer, the class capsules last."""
        grids = [self.primary(F.relu(self.stem(standardize_images(images))))]
        for layer in (*self.layers, self.classes):
            grids.append(layer(grids[-1]))
        return grids

    @torch.no_grad()
    def class_votes(self, images: Tensor) -> tuple[Votes, ParentDistribution]:
        """Return the votes for the class capsules and their distribution, for inspection."""
        return self.classes.votes(self.capsules(images)[-2]), self.classes.distribution()

    def with_routing(self, routing: Routing) -> Self:
        """Return a model with shared parameters and another routing in every layer."""
        others = {name: layer.with_routing(routing) for name, layer in self.layers._modules.items()}
        layers, classes = sharing(self.layers, **others), self.classes.with_routing(routing)
        twin = sharing(self, layers=layers, classes=classes)
        note_changes(twin, {"routing": routing})
        return twin

    @pyro_method
    def scores(self, images: Tensor) -> Tensor:
        """Compute the log-odds (B, classes) of the class capsules' presences."""
        return self.capsules(images)[-1].logits[:, 0]

    def outputs(self, images: Tensor) -> Tensor:
        """Compute the scores or, with a decoder, log-odds and poses of the classes, (B, J, 17)."""
        if self.decoder is None:
            return self.scores(images)
        classes = self.capsules(images)[-1]
        return torch.cat([classes.logits[..., None], classes.pose.flatten(3)], -1)[:, 0]

    def label_distribution(self, scores: Tensor) -> dist.Categorical:
        """Return p(label | class capsules), given log-odds of presences (*batch, classes)."""
        if self.likelihood == "categorical":
            return super().label_distribution(scores)
        return dist.Categorical(logits=-spread_energy(scores.sigmoid(), self.margin))

    def sample_label(self, scores: Tensor, labels: Tensor | None) -> None:
        """Sample or observe the label; in the loss its density is not normalized."""
        super().sample_label(scores, labels)
        if self.likelihood == "spread":
            energy = spread_energy(scores.sigmoid(), self.margin)
            with energy.device:  # `pyro.factor` moves its number to torch's default device
                pyro.factor("log_partition", (-energy).logsumexp(-1))
        pay_for_connections([*self.layers, self.classes], -1.0)

    def explain(self, outputs: Tensor, images: Tensor, labels: Tensor | None) -> None:
        """Sample or observe the label; in training, also score the reconstruction of the image."""
        if self.decoder is None:
            return super().explain(outputs, images, labels)
        super().explain(outputs[..., 0], images, labels)
        if self.training and labels is not None:
            error = (self.draw(outputs[..., 1:], labels) - images).square().sum((-3, -2, -1))
            with error.device:  # the device, as in `sample_label`
                pyro.factor("reconstruction", -self.reconstruction * error)

    def draw(self, poses: Tensor, labels: Tensor) -> Tensor:
        """Decode the poses of class capsules to images (*batch, C, H, W).

        Args:
            poses: (*batch, J, 16), or (*batch, 1, 16) of the labels' capsules alone.
            labels: the classes whose capsules are drawn, (*batch,).

        Raises:
            ValueError: the model has no decoder.
        """
        if self.decoder is None:
            raise ValueError(
                "this model has no decoder, which draws images from poses; train the preset "
                "decoder, on the command line --set preset=decoder"
            )
        return (
            self.decoder(self.mask_capsules(poses, labels))
            .sigmoid()
            .unflatten(-1, self.image_shape)
        )

    @property
    def margin(self) -> float:
        """The present margin m of the spread loss."""
        return margin_after(self.updates.item(), self.margin_steps, self.margin_shape)


def margin_after(updates: float, margin_steps: float, shape: str = "sigmoid") -> float:
    """Compute the margin m = .2 + .79 sigmoid(min(10, updates / margin_steps - 4)), or linear."""
    if shape == "linear":
        return min(0.9, 0.2 + 0.1 * updates / margin_steps)
    return 0.2 + 0.79 / (1 + math.exp(-min(10.0, updates / margin_steps - 4)))
