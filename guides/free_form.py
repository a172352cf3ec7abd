"""Free-form inference: separate variational parameters for every image, and no network.

    t ~ relaxed or discrete Bernoulli(logits[image, capsule])
    A ~ Delta(pose[image, capsule])  or  Normal(pose[image, capsule], scale[image, capsule])

If it starts at another guide's result, it measures the cost of amortisation and corrects the errors
of the encoder. If it starts at the prior, it checks that a result does not depend on an encoder.
Train it with `inference.fit(..., freeze="model")` on the images it was made for, in their order.

References:
    Smith, Schut, Gal & van der Wilk 2020 (arXiv 2004.03553).
"""

from __future__ import annotations

from typing import Protocol

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.blocks.parent_selection import Capsules, Level
from capsule_zoo.models.checks import check_one_of
from capsule_zoo.models.modes import in_eval_mode
from capsule_zoo.models.part_whole import PartWholeCapsules

_INITIAL_SCALE = 0.02


class FreeForm(Guide):
    """The guide with per-image variational parameters for all levels of a part-whole model.

    Args:
        model: the model.
        images: (B, C, H, W), the images whose posterior this is.
        init: a guide to start from; None for a draw from the prior.
        pose: "delta" or "normal".

    Raises:
        ValueError: another kind of model, unknown `pose`, or images that the model does not take.
    """

    model_class = PartWholeCapsules
    per_image = True  # its parameters belong to these images, in this order

    def __init__(
        self,
        model: PartWholeCapsules,
        images: Tensor,
        init: Guide | None = None,
        pose: str = "delta",
    ) -> None:
        super().__init__(model)
        check_one_of("pose", pose, ("delta", "normal"))
        self.pose = pose
        with torch.no_grad(), poutine.block():
            if init is None:
                start = poutine.trace(model).get_trace(batch_size=len(images))
            else:
                with in_eval_mode(init):
                    start = poutine.trace(init).get_trace(images)
        self.presence_logits = PyroModule[nn.ParameterDict]()
        self.poses = PyroModule[nn.ParameterDict]()
        self.log_scales = PyroModule[nn.ParameterDict]()
        for level in model.levels:
            centre = start.nodes[f"{level.name}_pose"]["value"]
            logits, scale = torch.zeros_like(centre[..., 0]), torch.zeros_like(centre)
            if init is not None:
                law = start.nodes[f"{level.name}_pose"]["fn"]
                centre, scale = law.mean, law.stddev
                logits = start.nodes[f"{level.name}_presence"]["fn"].logits
            self.presence_logits[level.name] = nn.Parameter(logits.expand(centre.shape[:2]).clone())
            self.poses[level.name] = nn.Parameter(centre.clone())
            if pose == "normal":
                scale = torch.where(scale > 0, scale, _INITIAL_SCALE)  # a point has none
                self.log_scales[level.name] = nn.Parameter(scale.log())

    @property
    def num_images(self) -> int:
        return len(self.poses["part"])

    def select(self, index: Tensor) -> FreeForm:
        """Return the guide to `images[index]`, with copies of the parameters of these images."""
        chosen = self.sharing_parameters()
        chosen._modules = dict(self._modules)
        for name, tensors in self._modules.items():
            chosen._modules[name] = PyroModule[nn.ParameterDict](
                {level: nn.Parameter(tensor.detach()[index]) for level, tensor in tensors.items()}
            )
        chosen._rename()
        return chosen

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Capsules:
        """Draw every level and return the presences and poses of the objects.

        `images` may be the guide's own images several times over, as evaluation passes them.
        """
        repeats = repeats_of(self, images)
        with pyro.plate("images", len(images), dim=-2):
            drawn = [self._draw(level, repeats) for level in self.model.levels]
        return drawn[0]

    def _draw(self, level: Level, repeats: int) -> Capsules:
        logits = self.presence_logits[level.name].repeat(repeats, 1)
        loc = self.poses[level.name].repeat(repeats, 1, 1)
        if self.pose == "delta":
            law = dist.Delta(loc, event_dim=1)
        else:
            scale = self.log_scales[level.name].exp().repeat(repeats, 1, 1)
            law = dist.Normal(loc, scale).to_event(1)
        with pyro.plate(level.plate, level.size, dim=-1):
            presence = pyro.sample(f"{level.name}_presence", self.model.presence_law(logits))
            return Capsules.drawn(level, presence, pyro.sample(f"{level.name}_pose", law))


class _OfImages(Protocol):
    """A guide whose parameters belong to `num_images` images."""

    @property
    def num_images(self) -> int: ...


def repeats_of(guide: _OfImages, images: Tensor) -> int:
    """Return how many times over `images` are the images that a guide's parameters belong to.

    Raises:
        ValueError: they are not a multiple of the guide's own images.
    """
    repeats, rest = divmod(len(images), guide.num_images)
    if rest or not repeats:
        raise ValueError(
            f"this guide belongs to {guide.num_images} images, not {len(images)}; make a new "
            f"{type(guide).__name__} for other images"
        )
    return repeats
