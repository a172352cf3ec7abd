"""Application of networks for one batch dim to any number of batch dims; images of classes.

Plates to the left of `images`, such as the particles of a vectorized objective, add batch dims in
front of the dim of the images. Convolutions and batch normalization support only one batch dim.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.models.checks import check_labels


def over_leading(network: Callable[[Tensor], Tensor], inputs: Tensor, event_dim: int) -> Tensor:
    """Apply `network` to `inputs` with all batch dims flattened, and unflatten the result.

    Args:
        network: takes (B, *event) and returns (B, *output).
        inputs: (*batch, *event) with one batch dim or more.
        event_dim: number of dims of one event.

    Returns:
        (*batch, *output). With one batch dim it is `network(inputs)`, without any reshape.
    """
    batch = inputs.shape[: inputs.dim() - event_dim]
    return unflat_batch(network(flat_batch(inputs, event_dim)), 0, batch)


def flat_batch(value: Tensor, event_dim: int) -> Tensor:
    """Flatten the batch dims of a value (*batch, *event), if any, to one dim."""
    if value.dim() <= event_dim + 1:
        return value
    return value.reshape(-1, *value.shape[value.dim() - event_dim :])


def unflat_batch(value: Tensor, dim: int, batch: torch.Size) -> Tensor:
    """Restore the dims of `batch` from a flattened batch at `dim`."""
    return value if len(batch) == 1 else value.unflatten(dim, batch)


def join_broadcast(tensors: list[Tensor], dim: int) -> Tensor:
    """Concatenate tensors along a negative `dim`, with the dims on its left broadcast.

    A tensor that does not depend on a plate lacks the plate's dim. Observed images, for example,
    are the same for all particles. If no tensor lacks a dim the function is `torch.cat`.
    """
    first = tensors[0].shape[:dim]
    if all(x.shape[:dim] == first for x in tensors):
        return torch.cat(tensors, dim)
    batch = torch.broadcast_shapes(*(x.shape[:dim] for x in tensors))
    return torch.cat([x.expand(*batch, *x.shape[dim:]) for x in tensors], dim)


def with_previous(values: Tensor) -> Tensor:
    """Return the maximum of each row and its predecessor: overlaid images, or united labels."""
    return torch.maximum(values, values.roll(1, 0))


class ImagesOfClasses:
    """The base class of models of labeled images, with one class for each image."""

    num_classes: int

    def network_inputs(self, images: Tensor) -> Tensor:
        """Return the inputs of the network for images (*batch, C, H, W): the images."""
        return images

    def present(self, labels: Tensor) -> Tensor:
        """Return 1 for the classes present in a network input, 0 for others, (B, classes)."""
        return self.one_hot(labels)

    def one_hot(self, labels: Tensor) -> Tensor:
        """Encode labels, integers of any width, as one-hot vectors, (*batch, classes)."""
        return F.one_hot(labels.long(), self.num_classes)

    def mask_capsules(self, capsules: Tensor, labels: Tensor) -> Tensor:
        """Return the labels' capsules for a decoder, (*batch, J D), with zeros for other classes.

        Args:
            capsules: (*batch, J, D), or (*batch, 1, D) of the labels' classes alone.
            labels: (*batch,).

        Reference: Sabour, Frosst & Hinton 2017 (arXiv 1710.09829), section 4.1.
        """
        return (self.one_hot(labels).to(capsules)[..., None] * capsules).flatten(-2)

    def check_labels(self, labels: Tensor | None) -> None:
        """Raise ValueError unless labels are (B,) integers from 0 to the number of classes - 1."""
        check_labels(labels, self.num_classes)


class PairsOfImages(ImagesOfClasses):
    """The base class of models that see each image laid over the previous one in the batch."""

    def network_inputs(self, images: Tensor) -> Tensor:
        return with_previous(images)

    def present(self, labels: Tensor) -> Tensor:
        return with_previous(self.one_hot(labels))
