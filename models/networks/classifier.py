"""Models of the label of an image, without a model of the image.

    image ~ Uniform(0, 1)                  # (B, C, H, W)
    label ~ distribution(scores(image))             # (B,)

A subclass computes the scores, one number for each class, and may choose the distribution. Without
labels such a model has nothing to score.
"""

import pyro
import pyro.distributions as dist
import torch.nn.functional as F
from pyro.nn import pyro_method
from torch import Tensor

from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.networks.leading import ImagesOfClasses, over_leading


def standardize_images(images: Tensor) -> Tensor:
    """Standardize each image of (B, C, H, W) to mean 0 and standard deviation 1."""
    return F.layer_norm(images, images.shape[1:])


class Classifier(ImagesOfClasses, Model):
    """The base class of models of labels.

    Args:
        image_shape: (channels, height, width).
        classes: number of classes of the label.

    Raises:
        ValueError: fewer than two classes.

    Called as `model(images=None, labels=None, batch_size=1)` it returns the images.
    `predict(images)` gives the likeliest labels.
    """

    sites = (Site("label", ("images",), discrete=True),)
    supervised = True

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        check_at_least(2, classes=classes)
        self.space = ImageSpace(image_shape)
        self.num_classes = classes

    def scores(self, images: Tensor) -> Tensor:
        """Compute a score for each class, (B, classes), from images (B, C, H, W)."""
        raise NotImplementedError

    def outputs(self, images: Tensor) -> Tensor:
        """Compute the inputs of `explain`, (B, ...), from images (B, C, H, W): here the scores."""
        return self.scores(images)

    def label_distribution(self, scores: Tensor) -> dist.Categorical:
        """Return p(label | scores), from scores (*batch, classes); here the scores are logits."""
        return dist.Categorical(logits=scores)

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        self.check_labels(labels)
        batch = batch_size if images is None else len(images)
        with pyro.plate("images", batch, dim=-1):
            images = self.sample_images(images)
            outputs = over_leading(self.outputs, self.network_inputs(images), event_dim=3)
            self.explain(outputs, images, labels)
        return images

    def explain(self, outputs: Tensor, images: Tensor, labels: Tensor | None) -> None:
        """Sample or observe the label in the plate of images, from outputs (*batch, ...)."""
        self.sample_label(outputs, labels)

    def sample_label(self, scores: Tensor, labels: Tensor | None) -> None:
        """Sample or observe the label in the plate of images, from scores (*batch, classes)."""
        pyro.sample("label", self.label_distribution(scores), obs=labels)

    def sample_images(self, images: Tensor | None) -> Tensor:
        """Sample or observe uniform images, (*batch, C, H, W), in the plate of images."""
        # a Beta, because torch's Uniform has no density at its upper end, that is, at white
        one = next(self.parameters()).new_ones(self.image_shape)
        return pyro.sample("image", dist.Beta(one, one).to_event(3), obs=images)

    @pyro_method
    def predict(self, images: Tensor) -> Tensor:
        """Predict the likeliest labels (B,) of images (B, C, H, W)."""
        self.space.check(images)
        return self.scores(images).argmax(-1)
