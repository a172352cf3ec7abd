"""The pair that a run trains: a model and a guide on one device, which have run together once."""

import torch
from pyro.infer import ELBO
from torch import Tensor, nn

from capsule_zoo.inference.check import refuse_misfit
from capsule_zoo.inference.objectives.base import default_objective, loss_per_image


class Pair:
    """A model and a guide on their device, which take batches in their precision.

    Args:
        model, guide: the modules; they are moved to the device.
        device: the device of the run.
        labels: True if both are given the labels.
    """

    def __init__(
        self, model: nn.Module, guide: nn.Module, device: torch.device, labels: bool
    ) -> None:
        self.model = model.to(device)
        self.guide = guide.to(device)
        self.device = device
        self.labels = labels
        self.dtype = next((p.dtype for module in self.both for p in module.parameters()), None)

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.model, self.guide

    def takes(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return a batch on the device and in the precision of the modules."""
        images = images.to(self.device, self.dtype or images.dtype)
        return images, labels.to(self.device) if self.labels and labels is not None else None

    def objective(self, given: ELBO | None, images: Tensor, labels: Tensor | None) -> ELBO:
        """Run the pair once and return the given objective, or by default one for this model.

        Afterwards all parameters exist, and the objective knows the plates. The random state is
        left as it was.

        Raises:
            IncompatibleGuide: the guide does not fit the model.
        """
        example = self.takes(images, labels)
        refuse_misfit(*self.both, *example)
        objective = given or default_objective(self.model, *example)
        with torch.random.fork_rng(), torch.no_grad():  # Pyro's ELBOs guess the plates on first use
            if not hasattr(objective, "state_dict"):
                loss_per_image(objective, *self.both, *example)
        return objective
