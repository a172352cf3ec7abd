"""The base class of models that paint images under requested transformations, such as shifts."""

from collections.abc import Mapping
from typing import TypeVar

import pyro
import pyro.distributions as dist
from torch import Tensor, nn

from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.checks import check_at_least, check_positive
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.networks.convolutional import Upsampler

Latents = Mapping[str, Tensor]
U = TypeVar("U", bound=Upsampler)

# On a large canvas most pixels are black for every request. The first updates lower all activities
# so far that a sigmoid has no gradient left: at 68 x 68 the autoencoder, the broadcast decoder and
# digit capsules stayed black. All of them learn with a sigmoid that leaks and starts dark. If they
# start at an activity of zero they must first become black, and learn slowly.
LEAK = 0.1
DARK = -2.0


def leaky_sigmoid(activity: Tensor) -> Tensor:
    """Convert activities to mean pixels: a sigmoid plus a slope of `LEAK`."""
    return (1 - LEAK) * activity.sigmoid() + LEAK * activity


def starting_dark(upsampler: U) -> U:
    """Initialize the biases of an upsampler so that all pixels are `DARK`, and return it."""
    nn.init.constant_(upsampler.paint.bias, DARK)
    return upsampler


class OnRequest(Model):
    """The base class of models that paint on request; subclasses write `prior` and `paint`.

    Args:
        image_shape: (channels, height, width).
        identity: the numbers of the request that leaves the image as it is. It is also the default
            request. (1, 0) is no rotation, (0, 0) is no shift.
        sigma_image: standard deviation of a pixel.

    Raises:
        ValueError: a size below 1, or a standard deviation that is not positive.
    """

    means_in_range = False  # the sigmoid leaks

    def __init__(
        self, image_shape: tuple[int, int, int], identity: tuple[float, ...], sigma_image: float
    ) -> None:
        super().__init__()
        check_at_least(1, image_shape=image_shape)
        check_positive(sigma_image=sigma_image)
        self.space = ImageSpace(image_shape)
        self.identity = identity
        self.sigma_image = sigma_image

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(
            Site(
                name,
                ("images",),
                distribution.event_dim,
                discrete=isinstance(distribution, dist.OneHotCategorical),
            )
            for name, distribution in self.prior().items()
        )

    def prior(self) -> dict[str, dist.TorchDistribution]:
        """Return the prior of one image's latents, by site."""
        raise NotImplementedError

    def paint(self, latents: Latents, request: Tensor) -> Tensor:
        """Paint mean pixels (*batch, C, H, W) from latents by site and requests (B, n)."""
        raise NotImplementedError

    def forward(
        self,
        images: Tensor | None = None,
        labels: Tensor | None = None,
        batch_size: int = 1,
        *,
        request: Tensor | None = None,
    ) -> Tensor:
        """Sample the latents and the image, and return the image, (B, C, H, W).

        Args:
            images: the images as requested, or None to draw them.
            request: (B, n) or (1, n); the identity by default.
        """
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            latents = {
                name: pyro.sample(name, distribution) for name, distribution in self.prior().items()
            }
            distribution = dist.Normal(self.mean_image(latents, request), self.sigma_image)
            return pyro.sample("image", distribution.to_event(3), obs=images)

    def num_images(self, latents: Latents) -> int:
        """Return the number of images B of latents by site; the first has values (*batch, n)."""
        return next(iter(latents.values())).shape[-2]

    def mean_image(self, latents: Latents, request: Tensor | None = None) -> Tensor:
        """Compute E[image | latents, request], (*batch, C, H, W).

        Args:
            latents: values (*batch, ...) by site; the last batch dim holds the B images.
            request: (B, n) or (1, n); the identity by default.

        Raises:
            ValueError: a request of another shape.
        """
        first = next(iter(latents.values()))
        if request is None:
            request = first.new_tensor([self.identity])
        batch, n = self.num_images(latents), len(self.identity)
        if request.shape not in ((batch, n), (1, n)):
            raise ValueError(
                f"request must be ({batch}, {n}) or (1, {n}), not {tuple(request.shape)}; give "
                "the numbers of one request for each image"
            )
        return self.paint(latents, request.expand(batch, -1))


def centered_normal(like: Tensor, *shape: int, scale: float = 1.0) -> dist.TorchDistribution:
    """Return Normal(0, scale) with this event shape, in the dtype of `like`."""
    return dist.Normal(like.new_zeros(shape), scale).to_event(len(shape))
