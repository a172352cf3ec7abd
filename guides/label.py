"""Guides made of classifiers: the exact distribution of a label; a class's pose as a code."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.baselines.vae import VariationalAutoencoder
from capsule_zoo.models.matrix_capsules import MatrixCapsules
from capsule_zoo.models.networks.classifier import Classifier
from capsule_zoo.models.routing.capsule_convolution import POSE


class ExactLabel(Guide[Classifier]):
    """The guide q(label | image) = p(label | image), a classifier's exact posterior.

    With labels there is nothing left to draw. Without labels the log weight of every draw is the
    log partition function of the model's distribution, which is 0 if the distribution is
    normalized.

    Args:
        model: the classifier.

    Raises:
        ValueError: the model is not a classifier.
    """

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | None:
        model = self.model
        model.check_labels(labels)
        if labels is not None:
            return labels
        with pyro.plate("images", len(images), dim=-1):
            return pyro.sample("label", model.label_distribution(model.scores(images)))


class ClassPose(Guide[VariationalAutoencoder]):
    """The guide whose code is the pose of the label's class capsule, with zeros for other classes.

    The code has 16 numbers for each class. If no label is given, it is the most likely label. The
    network is not a part of the guide and does not learn from the decoder.

    Poses of a class lie close together, a tenth of their size apart in a network that was trained
    to classify. After `standardize` the code is 1 plus the distance from the mean of the class, in
    its standard deviations. The decoder then need not learn that scale, and a mean pose still shows
    its class.

    Args:
        model: the decoder.
        classifier: the capsule network.

    Raises:
        ValueError: the decoder is not a variational autoencoder, or its code has another size.

    Reference: Sabour, Frosst & Hinton 2017 (arXiv 1710.09829), section 4.1, where such a decoder is
    trained along with the network.
    """

    origin: Tensor
    unit: Tensor

    def __init__(self, model: VariationalAutoencoder, classifier: MatrixCapsules) -> None:
        super().__init__(model)
        size = classifier.num_classes * POSE * POSE
        if model.latent != size:
            raise ValueError(
                f"the model's latent must be {size}, {POSE * POSE} numbers for each of "
                f"{classifier.num_classes} classes, not {model.latent}"
            )
        self._classifier = (classifier,)  # in a tuple, so that it is not a sub-module
        self.register_buffer("origin", torch.zeros(classifier.num_classes, POSE * POSE))
        self.register_buffer("unit", torch.ones(classifier.num_classes, POSE * POSE))

    @property
    def classifier(self) -> MatrixCapsules:
        return self._classifier[0]

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        self.classifier.check_labels(labels)
        pose, labels = self.poses(images, labels)
        pose = (pose - self.origin[labels]) / self.unit[labels]
        code = self.classifier.mask_capsules(pose[:, None], labels)
        with pyro.plate("images", len(images), dim=-1):
            return pyro.sample("image_code", dist.Delta(code, event_dim=1))

    @torch.no_grad()
    def poses(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the pose (B, 16) of the label's capsule, and the label, by default predicted."""
        with poutine.block():
            classes = self.classifier.capsules(images)[-1]
        labels = classes.logits[:, 0].argmax(1) if labels is None else labels.long()
        rows = torch.arange(len(labels), device=labels.device)
        return classes.pose[:, 0].flatten(2)[rows, labels], labels

    def standardize(self, images: Tensor, labels: Tensor) -> None:
        """Compute the mean and standard deviation of each class's poses over images (B, C, H, W).

        Labels are (B,). Classes with fewer than two images stay as they are.
        """
        batches = zip(images.split(100), labels.split(100), strict=True)
        poses = torch.cat([self.poses(*batch)[0] for batch in batches])
        for label in labels.unique().tolist():
            class_poses = poses[labels == label]
            if len(class_poses) > 1:
                self.unit[label] = class_poses.std(0).clamp(min=1e-6)
                self.origin[label] = class_poses.mean(0) - self.unit[label]
