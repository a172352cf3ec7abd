"""Time an update of scenes, compared with the loss in plain torch and with AIR.

An update is a loss, its gradient and a step of Adam. `plain_torch` is the loss of the default
entry, a VAE as the object and the peeling guide, written by hand from the entry's networks, with
equal random numbers; both are checked to be equal. `air` is another model of these pictures, from
Pyro's tutorial: its time tells how many updates a second each model makes. `large` is an update of
scenes of 128x128 pixels with ten objects.
"""

import math
from collections.abc import Callable

import pyro
import torch
from air import TutorialAir
from harness import Benchmark, Contestant, Contestants, check_same_gradients, main, update
from torch import Tensor

from capsule_zoo.guides.scenes.peeling import blur_maps, focus
from capsule_zoo.models.scenes.counts import subsets_of
from capsule_zoo.models.scenes.pictures import crop, move_pictures
from capsule_zoo.registry import Entry, create

BATCH = 64


class ByHand:
    """Scenes of gray VAEs on black without Pyro; their loss, in nats per image."""

    def __init__(self, entry: Entry) -> None:
        self.model, self.guide = entry.model, entry.guide

    def __call__(self, images: Tensor) -> Tensor:
        model, guide = self.model, self.guide
        usual, size = model.usual(images), model.image_shape[1:]
        unit = torch.cat([usual.new_ones(1), usual])
        spread = images.new_tensor([model.size_spread, 0.7, 0.7])
        canvas, free, ratios = torch.zeros_like(images), [], []
        for _ in range(model.slots):
            left = (images - canvas).clamp(0, 1)
            inputs = torch.cat([left, images], 1)
            place = focus(blur_maps(left, model.size * guide.blur))
            about = torch.cat([torch.zeros_like(place[:, :1]), place], -1)
            wide = about + images.new_tensor([math.log(guide.wide), 0.0, 0.0])
            looked = guide.where(guide.look(crop(inputs, wide, (guide.glimpse,) * 2, usual)))
            mean, log_scale = looked.chunk(2, -1)
            pose, ratio = draw(about + unit * mean, unit * log_scale.exp(), spread)
            window = crop(inputs, pose, model.thing.image_shape[1:], usual).clamp(0, 1)
            mean, log_scale = guide.reader.code(guide.reader.encoder(window)).chunk(2, -1)
            code, code_ratio = draw(mean, log_scale.exp(), torch.ones_like(mean))
            cover = move_pictures(model.thing.decoder(code).sigmoid(), pose, size, usual)
            free.append((-(1 - 1e-4) * cover).log1p().flatten(1))
            ratios.append(ratio + code_ratio)
            canvas = 1 - torch.stack(free).sum(0).exp().detach().unflatten(1, images.shape[1:])
        rows = subsets_of(model.slots, images)
        means = 1 - (rows @ torch.stack(free, 1)).exp()  # (B, 2^S, pixels)
        error = (images.flatten(1)[:, None] - means).square().sum(-1) / model.sigma_image**2
        constant = means.shape[-1] * math.log(model.sigma_image * math.sqrt(math.tau))
        prior = (rows * math.log(model.rate) - math.log1p(model.rate)).sum(-1)
        used = torch.stack(ratios, -1) @ rows.T
        return -(used + prior - 0.5 * error - constant).logsumexp(-1).mean()


def draw(mean: Tensor, scale: Tensor, usual: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sample (B, n) of a normal posterior q, and its log p - log q, (B,)."""
    noise = torch.normal(torch.zeros_like(mean), torch.ones_like(mean))
    value = mean + scale * noise
    ratio = 0.5 * (noise.square() - (value / usual).square()) + scale.log() - usual.log()
    return value, ratio.sum(-1)


def prepare(dtype: torch.dtype = torch.float32) -> tuple[Entry, Tensor]:
    """Return an untrained entry after the warm-up of its presences, and a batch of noise."""
    pyro.set_rng_seed(0)
    entry = create("scenes")
    entry.objective.done = entry.objective.updates
    entry.model.to(dtype)
    entry.guide.to(dtype)
    return entry, torch.rand(BATCH, *entry.model.image_shape, dtype=dtype)


def losses(entry: Entry, images: Tensor) -> dict[str, Callable[[], Tensor]]:
    by_hand = ByHand(entry)
    return {
        "zoo": lambda: entry.objective.differentiable_loss(entry.model, entry.guide, images),
        "plain_torch": lambda: by_hand(images),
    }


def large() -> Contestant:
    """Return a function that updates a model of ten objects on 128x128 pixels."""
    entry = create("scenes", image_shape=(1, 128, 128), slots=10)
    images = torch.rand(BATCH, *entry.model.image_shape)
    return update((entry.model, entry.guide), losses(entry, images)["zoo"])


def make() -> Contestants:
    entry, images = prepare()
    pair = entry.model, entry.guide
    svi = TutorialAir(images.shape[-1]).svi()

    def air() -> None:
        svi.step(images)

    return {
        **{name: update(pair, loss) for name, loss in losses(entry, images).items()},
        "air": air,
        "large": large(),
    }


def check() -> None:
    """Check that the losses agree in float64, up to rounding."""
    entry, images = prepare(torch.float64)
    check_same_gradients(
        losses(entry, images[:8]).values(), (entry.model, entry.guide), rtol=1e-7, atol=1e-7
    )


if __name__ == "__main__":
    data = f"{BATCH} images of noise, 50x50 pixels and 3 slots; large: 128x128 pixels and 10 slots"
    peers = ("plain_torch", "air", "large")
    main(Benchmark("scene_step", make, check, "zoo", peers, data))
