"""The guide to a classifier: the exact law of the label where no label is given."""

from __future__ import annotations

import pyro
from torch import Tensor

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.networks.classifier import Classifier


class ExactLabel(Guide[Classifier]):
    """The guide q(label | image) = p(label | image), which a classifier has in closed form.

    With labels there is nothing left to draw. Without labels the log weight of every draw is the
    log partition function of the model's law, which is 0 if the law is normalized.

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
            return pyro.sample("label", model.label_law(model.scores(images)))
