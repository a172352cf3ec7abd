"""The capsule network of 2017: the direction of a class capsule encodes how a digit looks.

Story. An image shows one thing of one class. Every class has a capsule, a vector whose length says
how surely the class is present and whose direction says how the thing looks. A decoder draws the
image from the capsule of the winning class alone; all other capsules are masked. The winning class
is the label, or the class with the longest capsule where no label is given.

    s_j   ~ Normal(0, I_16)                                # (B, J, 16), one for each class
    v_j   = squash(s_j)                                    # the capsule; its length is below 1
    k     = label | argmax_j |v_j|                         # (B,), the winning class
    factor exp(-label_weight margin_loss(|v|, label))      # only where labels are given
    image ~ Normal(decoder(v_k, other capsules masked), sigma_image)         # (B, C, H, W)

The routings are the guides: `RoutedCapsules` (`capsule_zoo.guides`) reads primary capsules from
the image with convolutions and infers the class capsules from their votes, by dynamic routing, EM
or variational Bayes. The margin loss is a factor, not a distribution over labels. Without labels
the trace is a normalized density of images and capsules; with labels it is not.

References:
    Sabour, Frosst & Hinton 2017, "Dynamic Routing Between Capsules" (arXiv 1710.09829): squash is
    equation 1, the margin loss equation 4; section 4.1 has the decoder and its weight. The paper
    adds .0005 squared errors to the margin loss. In nats this is label_weight = 1000 / sigma^2, the
    default. The paper has no prior on capsules; the standard normal is ours. Under it all classes
    are present (the mean length is .93), which the margin loss excludes: bounds with labels say
    nothing when compared with the bounds of other models.
"""

import math

import pyro
import pyro.distributions as dist
from pyro.nn import pyro_method
from torch import Tensor

from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.checks import check_at_least, check_positive
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.networks.layers import perceptron
from capsule_zoo.models.networks.leading import ImagesOfClasses, PairsOfImages
from capsule_zoo.models.routing.vector_capsules import CLASS, margin_loss, squash

PER_SQUARED_ERROR = 0.0005  # the paper's weight of the reconstruction in units of the margin loss


class CapsuleNetwork(ImagesOfClasses, Model):
    """The capsule network as a model of images, described at the top of this file.

    Args:
        image_shape: (channels, height, width).
        classes: number of class capsules, and of labels.
        hidden: units of the decoder's two hidden layers.
        sigma_image: standard deviation of a pixel, in units of its range.
        label_weight: nats for one unit of the margin loss; by default the weight for which a
            squared error counts .0005 units, as in the paper.

    Raises:
        ValueError: a size below 1, fewer than two classes, or a standard deviation that is not
        positive.

    Called as `model(images=None, labels=None, batch_size=1)` it returns the image (B, C, H, W).
    """

    sites = (Site("class_pose", ("images",), event_dim=2),)

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        classes: int = 10,
        *,
        hidden: tuple[int, int] = (512, 1024),
        sigma_image: float = 0.15,
        label_weight: float | None = None,
    ) -> None:
        super().__init__()
        check_at_least(2, classes=classes)
        check_at_least(1, hidden=hidden)
        check_positive(sigma_image=sigma_image)
        if label_weight is None:
            label_weight = 1 / (2 * sigma_image**2 * PER_SQUARED_ERROR)
        check_at_least(0, label_weight=label_weight)
        self.space = ImageSpace(image_shape)
        self.num_classes = classes
        self.sigma_image = sigma_image
        self.label_weight = label_weight
        self.decoder = perceptron(classes * CLASS, *hidden, math.prod(image_shape))

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        self.check_labels(labels)
        batch = batch_size if images is None else len(images)
        origin = next(self.parameters()).new_zeros(self.num_classes, CLASS)
        with pyro.plate("images", batch, dim=-1):
            pose = pyro.sample("class_pose", dist.Normal(origin, 1.0).to_event(2))
            capsules = squash(pose)  # (*batch, B, J, 16)
            if labels is not None:
                cost = margin_loss(capsules.norm(dim=-1), self.present(labels))
                pyro.factor("label", -self.label_weight * cost)
            mean = self.draw(capsules, labels)
            distribution = dist.Normal(mean, self.sigma_image).to_event(3)
            return pyro.sample("image", distribution, obs=images)

    @pyro_method
    def draw(self, capsules: Tensor, winners: Tensor | None = None) -> Tensor:
        """Decode the capsules (*batch, J, 16) of one class to mean images (*batch, C, H, W).

        Args:
            winners: the class whose capsule is drawn, (*batch,); by default the longest capsule.
        """
        if winners is None:
            winners = capsules.norm(dim=-1).argmax(-1)
        logits = self.decoder(self.mask_capsules(capsules, winners))
        return logits.sigmoid().unflatten(-1, self.image_shape)


class OverlappingCapsuleNetwork(PairsOfImages, CapsuleNetwork):
    """The capsule network for two overlapping images (section 6 of the paper).

    The capsules of a pair are inferred from the overlay of an image and the one before it in the
    batch. The margin loss requires the classes of both. The model draws the image, from the capsule
    of the image's own class; the paper draws both images of a pair. An image is the first of one
    pair and the second of another, so that each is drawn.
    """
