"""The guide to models that paint on request: a convolutional network infers the code.

    q(z_s | image) = Normal(mean_s, scale_s)              # every continuous site s
    q(k | image) = OneHotCategorical(logits)              # relaxed in training
    (logits, mean_s, log scale_s) = CNN(image)

The network sees the untransformed image, never the transformed image that the model is requested to
draw, because the code does not depend on the request. Where a request moves things over a large
canvas it reads only a window in the middle.

`deterministic=True` is the article's autoencoder. Each site is a point, whose density is taken
equal to the prior's, so that the point costs nothing. The loss is the squared error over twice the
variance of a pixel, up to a constant. It is not a bound.

References:
    Potapov 2018 and his co-authors' experiments, see `capsule_zoo.models.generative_capsnet`: two
    convolutions of 64 and 128 maps, 1,024 units. Their kernels are 4x4, with leaky rectifiers;
    here the network is the encoder of the VAE.
"""

import pyro
import pyro.distributions as dist
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.generative_capsnet import GenerativeCapsNet
from capsule_zoo.models.networks.convolutional import Encoder
from capsule_zoo.models.networks.on_request import OnRequest

KIND = "object_kind"


class ConditionalEncoder(Guide[OnRequest]):
    """The guide q(latents | image) to a model that paints on request.

    It is described at the top of this file.

    Args:
        model: a `GenerativeCapsNet`, a `ContinuousCapsNet` or a `ConditionalAutoencoder`.
        deterministic: whether each site is a point that costs nothing, instead of a distribution.
        window: (height, width) of the window in the middle of the image that is read; by default
            the whole image.
        channels: maps at half the window's size; twice as many at a quarter.
        hidden: units of the layer between the maps and the distributions.

    Raises:
        ValueError: another kind of model, a size below 1, or a window larger than the image.
    """

    def __init__(
        self,
        model: OnRequest,
        *,
        deterministic: bool = False,
        window: tuple[int, int] | None = None,
        channels: int = 64,
        hidden: int = 1024,
    ) -> None:
        super().__init__(model)
        check_at_least(1, channels=channels, hidden=hidden)
        colors, height, width = model.image_shape
        self.window = rows, columns = window or (height, width)
        if not (1 <= rows <= height and 1 <= columns <= width):
            raise ValueError(f"window must lie in {height}x{width} pixels, not be {rows}x{columns}")
        self.deterministic = deterministic
        self.encoder = Encoder((colors, rows, columns), channels, hidden)
        self.columns = {
            name: distribution.event_shape.numel() * (1 if deterministic or name == KIND else 2)
            for name, distribution in model.prior().items()
        }
        self.read = PyroModule[nn.Linear](hidden, sum(self.columns.values()))

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Sample every latent site and return the values by site, (B, ...) each."""
        numbers, prior = self._numbers(images), self.model.prior()
        with pyro.plate("images", len(images), dim=-1):
            return {
                name: pyro.sample(name, self._distribution(name, numbers[name], distribution))
                for name, distribution in prior.items()
            }

    def expectations(self, images: Tensor) -> dict[str, Tensor]:
        """Compute the center of q at each site, (B, ...) by site.

        For a continuous site it is the mean. For a kind it is the logarithms of the probabilities
        or, in a guide to the discrete model, the most likely value.
        """
        prior = self.model.prior()
        return {n: self._point(n, read, prior[n]) for n, read in self._numbers(images).items()}

    @property
    def _with_kinds(self) -> GenerativeCapsNet:
        """The model, of a class that has object kinds."""
        assert isinstance(self.model, GenerativeCapsNet)
        return self.model

    def _numbers(self, images: Tensor) -> dict[str, Tensor]:
        """Compute the network's outputs for each site, (B, columns) by site."""
        top, left = ((n - m) // 2 for n, m in zip(images.shape[-2:], self.window, strict=True))
        patch = images[..., top : top + self.window[0], left : left + self.window[1]]
        read = self.read(self.encoder(patch)).split(list(self.columns.values()), dim=-1)
        return dict(zip(self.columns, read, strict=True))

    def _distribution(
        self, name: str, numbers: Tensor, prior: dist.TorchDistribution
    ) -> dist.TorchDistribution:
        point = self._point(name, numbers, prior)
        if self.deterministic:
            return dist.Delta(point, prior.log_prob(point), event_dim=prior.event_dim)
        if name == KIND:
            return self._with_kinds.kind_distribution(numbers)
        log_ratio = numbers.chunk(2, dim=-1)[1].view(-1, *prior.event_shape)
        return dist.Normal(point, prior.stddev * log_ratio.exp()).to_event(prior.event_dim)

    def _point(self, name: str, numbers: Tensor, prior: dist.TorchDistribution) -> Tensor:
        if name != KIND:
            size = prior.event_shape.numel()
            return prior.stddev * numbers[:, :size].view(-1, *prior.event_shape)
        if self._with_kinds.relaxed:
            return numbers.log_softmax(-1)
        return F.one_hot(numbers.argmax(-1), numbers.shape[-1]).to(numbers)
