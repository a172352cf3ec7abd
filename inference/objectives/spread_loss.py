"""The objective of matrix capsules: the spread loss, whose margin rises with the updates."""

import torch
from pyro.infer import Trace_ELBO
from torch import Tensor

from capsule_zoo.inference.objectives.base import Objective
from capsule_zoo.models.matrix_capsules import MatrixCapsules


class SpreadLoss(Objective):
    """The spread loss of `MatrixCapsules`; the margin rises with every training loss.

    The count of updates is part of the model's state, because the distribution of a trained model
    needs its margin. Only this objective moves it, once for each loss with gradients in training
    mode. With another objective the margin stays where it is.

    References:
        Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing" (ICLR), section 4.1.
    """

    units = "spread loss per image"

    def differentiable_loss(
        self, model: MatrixCapsules, guide, images: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Return the mean spread loss of the labels (B,) of images (B, C, H, W).

        Raises:
            ValueError: another model.
        """
        if not isinstance(model, MatrixCapsules):
            raise ValueError(
                f"model must be MatrixCapsules for SpreadLoss, not {type(model).__name__}; for "
                "other models use Trace_ELBO"
            )
        loss = Trace_ELBO().differentiable_loss(model, guide, images, labels) / len(images)
        if model.training and torch.is_grad_enabled():
            model.updates += 1
        return loss
