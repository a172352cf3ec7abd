"""The guide to a classifier: where no label is given, the exact law of the label."""

from __future__ import annotations

import pyro
from torch import Tensor

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.classifier import Classifier


class ExactLabel(Guide):
    """q(label | image) = p(label | image), which a classifier has in closed form.

    With labels given there is nothing left to draw, and with none the log weight of every draw is
    the log partition function of the model's law: 0 where that is normalised.

    Args:
        model: the classifier.

    Raises:
        ValueError: the model is no classifier.
    """

    model_class = Classifier

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | None:
        model = self.model
        model.check_images(images)
        model.check_labels(labels)
        if labels is not None:
            return labels
        with pyro.plate("images", len(images), dim=-1):
            return pyro.sample("label", model.label_law(model.scores(images)))
