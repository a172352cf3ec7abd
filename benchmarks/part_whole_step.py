"""Time a training step of part-whole capsules, and the fraction spent in the framework.

The framework is Pyro and the zoo's own sites, plates, traces and checks. Its peer is the loss
written by hand in plain torch, from the zoo's pure functions and networks, with equal random
numbers. A second peer, the prototype, renders parts by the textbook calls of `render.py`. All are
checked to be equal before they are timed.

The stages are the stages of the peer's forward pass (encoder, objects (set transformer), render,
likelihood) and then backward. `gemm` multiplies matrices with as many operations as the networks'
convolutions and linear layers need, forward and backward. The rest of a step is the time that could
be saved.
"""

import math
import time
from collections.abc import Callable

import pyro
import torch
import torch.nn.functional as F
from harness import Benchmark, Contestants, check_same_gradients, main
from pyro.infer import Trace_ELBO
from render import obvious
from torch import Tensor
from torch.distributions.utils import clamp_probs
from torch.utils.flop_counter import FlopCounterMode

from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.inference import loss_per_image
from capsule_zoo.models import Capsules, Painting, PartWholeCapsules, poses
from capsule_zoo.models.parts.parent_selection import log_presence
from capsule_zoo.settings import configure

BATCH = 128


class ByHand:
    """A two-level part-whole model with delta poses without Pyro; its loss, in nats per image."""

    def __init__(self, model: PartWholeCapsules, guide: PartWholeGuide) -> None:
        self.model = model
        self.guide = guide

    def __call__(self, images: Tensor) -> Tensor:
        part_logits, part_pose = self.encode(images)
        parts = Capsules(self.relax(part_logits), part_pose)
        object_logits, object_pose = self.gather(parts)
        objects = Capsules(self.relax(object_logits), object_pose)
        log_q = self.concrete(part_logits, parts.presence).sum()
        log_q = log_q + self.concrete(object_logits, objects.presence).sum()
        return (log_q - self.log_joint(objects, parts, self.render(parts), images)) / len(images)

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Infer the presence logits (B, P) and poses (B, P, 6) of the parts."""
        reader = self.guide.read_parts
        read = reader.pool(reader.encoder(images - 0.5))
        return read[..., 0], poses.from_parameters(read[..., 1:7], 0.01, *reader.bounds)

    def gather(self, parts: Capsules) -> tuple[Tensor, Tensor]:
        """Infer the presence logits (B, K) and poses (B, K, 6) of the objects."""
        batch, number = parts.presence.shape
        identity = torch.eye(number).to(parts.pose).expand(batch, number, number)
        members = torch.cat([parts.pose, parts.presence.sigmoid()[..., None], identity], dim=-1)
        networks = self.guide.infer_objects
        read = networks.transformers[0](members)
        return networks.balance[0](read[..., 0]), poses.from_parameters(read[..., 1:7])

    def render(self, parts: Capsules) -> Tensor:
        """Render the parts into mean images (B, C, H, W)."""
        return self.model.render(parts)

    def log_joint(self, objects: Capsules, parts: Capsules, mean: Tensor, images: Tensor) -> Tensor:
        """Compute log p(image, parts, objects), the parents summed out, as a sum over the batch."""
        model, selection = self.model, self.model.selections[0]
        part_presence = parts.presence.sigmoid()[..., None]
        affinity = log_presence(objects.presence, True)[:, None] + selection.log_affinity
        weights = F.pad(affinity, (1, 0), value=math.log(selection.epsilon)).log_softmax(-1)
        logits = F.pad(selection.presence_logits, (1, 0), value=selection.dummy_logit)
        joint = weights + self.concrete(logits, parts.presence[..., None])  # (B, P, 1 + K)
        identity = poses.identity_like(parts.pose)
        votes = poses.compose(objects.pose[:, None], identity + selection.transform)
        votes = torch.cat([identity.expand_as(votes[:, :, :1]), votes], dim=2)
        on = selection.sigma_min + F.softplus(selection.raw_scale)
        off = torch.full_like(on, selection.sigma_off)
        on, off = (F.pad(s, (1, 0), value=selection.sigma_dummy) for s in (on, off))
        scale = (part_presence * on + (1 - part_presence) * off)[..., None]
        joint = joint + normal(parts.pose[:, :, None], votes, scale).sum(-1)
        return (
            joint.logsumexp(-1).sum()
            + self.concrete(model.presence_logits, objects.presence).sum()
            + normal(objects.pose, identity, model.pose.sigma_top).sum()
            + normal(images, mean, model.sigma_image).sum()
        )

    def relax(self, logits: Tensor) -> Tensor:
        """Sample the Concrete distribution, as a logit."""
        uniform = clamp_probs(torch.rand_like(logits))
        return (uniform.log() - (-uniform).log1p() + logits) / self.model.temperature

    def concrete(self, logits: Tensor, value: Tensor) -> Tensor:
        difference = logits - value * self.model.temperature
        return math.log(self.model.temperature) + difference - 2 * F.softplus(difference)


class Prototype(ByHand):
    """The loss of `ByHand` with parts rendered by textbook calls."""

    def render(self, parts: Capsules) -> Tensor:
        paint = self.model.template_logits.sigmoid()
        return obvious(paint, parts.pose, parts.presence.sigmoid())


def normal(value: Tensor, mean: Tensor, scale: Tensor | float) -> Tensor:
    log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
    return -0.5 * ((value - mean) / scale).square() - log_scale - 0.5 * math.log(2 * math.pi)


def prepare(dtype: torch.dtype = torch.float32) -> tuple[ByHand, Tensor]:
    """Return an untrained model and guide, and a batch of noise."""
    pyro.set_rng_seed(0)
    model = PartWholeCapsules(objects=16, parts=24, painting=Painting(template_size=11))
    guide = configure(PartWholeGuide, model, "delta", channels=128, width=128, blocks=3)
    images = torch.rand(BATCH, *model.image_shape, dtype=dtype)
    return ByHand(model.to(dtype), guide.to(dtype)), images


def losses(by_hand: ByHand, images: Tensor) -> dict[str, Callable[[], Tensor]]:
    objective = Trace_ELBO()
    return {
        "zoo": lambda: loss_per_image(objective, by_hand.model, by_hand.guide, images),
        "plain_torch": lambda: by_hand(images),
        "prototype": lambda: Prototype(by_hand.model, by_hand.guide)(images),
    }


def gemm(by_hand: ByHand, images: Tensor) -> Callable[[], Tensor]:
    """Return matrix products with as many operations as the networks, forward and backward."""
    count = FlopCounterMode(display=False)
    with count:
        encoded = by_hand.encode(images)
        read = by_hand.gather(Capsules(encoded[0], encoded[1]))
        sum(value.sum() for value in (*encoded, *read)).backward()
    left, right = torch.rand(1024, 1024), torch.rand(1024, 1024)
    products = max(1, round(count.get_total_flops() / (2 * 1024**3)))
    return lambda: [left @ right for _ in range(products)][-1]


def make() -> Contestants:
    by_hand, images = prepare()
    drawn: list = []

    def stage_inputs() -> tuple[Capsules, Capsules, Tensor]:
        """Return the parts, the objects and the mean image, computed on first use."""
        if not drawn:
            with torch.no_grad():
                logits, pose = by_hand.encode(images)
                parts = Capsules(by_hand.relax(logits), pose)
                logits, pose = by_hand.gather(parts)
                objects = Capsules(by_hand.relax(logits), pose)
                drawn.extend([parts, objects, by_hand.render(parts)])
        return drawn[0], drawn[1], drawn[2]

    def likelihood() -> Tensor:
        parts, objects, mean = stage_inputs()
        return by_hand.log_joint(objects, parts, mean, images)

    def backward() -> float:
        loss = by_hand(images)
        began = time.perf_counter()
        loss.backward()
        return time.perf_counter() - began

    return {
        **{n: lambda loss=loss: loss().backward() for n, loss in losses(by_hand, images).items()},
        "encoder": lambda: by_hand.encode(images),
        "objects": lambda: by_hand.gather(stage_inputs()[0]),
        "render": lambda: by_hand.render(stage_inputs()[0]),
        "likelihood": likelihood,
        "backward": backward,
        "gemm": gemm(by_hand, images),
    }


def check() -> None:
    """Check that the losses agree in float64, up to rounding."""
    by_hand, images = prepare(torch.float64)
    check_same_gradients(
        losses(by_hand, images).values(), (by_hand.model, by_hand.guide), rtol=1e-7, atol=1e-7
    )


if __name__ == "__main__":
    data = f"{BATCH} images of noise, 28x28 pixels; 16 objects, 24 parts, 11x11 templates"
    peers = ("plain_torch", "prototype")
    main(Benchmark("part_whole_step", make, check, "zoo", peers, data, "part-whole"))
