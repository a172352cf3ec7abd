"""Small scenes in float64, in every form that a scene has."""

import pyro
import torch

from capsule_zoo.guides import ConvolutionalEncoder, Peeling
from capsule_zoo.models import Scenes, VariationalAutoencoder

LIKE = torch.zeros((), dtype=torch.float64)


def picture_guide() -> ConvolutionalEncoder:
    """Return the guide of an autoencoder that paints grounds of 5x5 pixels."""
    return ConvolutionalEncoder(VariationalAutoencoder((3, 5, 5), 2, channels=3), 5)


FORMS = {
    "gray": dict(channels=1),
    "learned counts": dict(channels=1, counts="learned"),
    "turned": dict(channels=1, rotation=1.0),
    "tinted": dict(channels=3, ground="color"),
    "textured": dict(channels=3, texture=True, ground="learned"),
    "gray on gray": dict(channels=1, ground="color"),
    "poisson": dict(channels=1, texture=True, counts="poisson", size_distribution="learned"),
    "on a picture": dict(channels=3, ground="picture"),
    "on a painted ground": dict(channels=3, ground=picture_guide),
}


def pair(slots: int = 3, channels: int = 1, texture: bool = False, sweeps: int = 1, **options):
    """Return a small model and its guide, in float64, and three images."""
    pyro.set_rng_seed(0)
    thing_channels = 1 + channels if texture else 1
    thing = VariationalAutoencoder((thing_channels, 6, 6), 2, channels=3)
    ground = options.pop("ground", "black")
    behind = picture_guide() if ground is picture_guide else None
    ground = behind.model if behind else ground
    model = Scenes((channels, 10, 12), thing, slots, ground=ground, **{"size": 6.0, **options})
    reader = ConvolutionalEncoder(thing, 5, context=channels)
    guide = Peeling(model, reader, glimpse=4, hidden=6, sweeps=sweeps, ground_reader=behind)
    images = torch.rand(3, channels, 10, 12, generator=torch.Generator().manual_seed(1))
    return model.double(), guide.double(), images.double()


SMALL_WINDOWS = dict(window=8, thing_settings=dict(latent=2, channels=3, guide=dict(hidden=5)))


def disks(number, height=130, width=170, seed=0):
    """Return a picture (1, H, W) of disks 14 to 18 pixels wide that do not touch, and centers."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    picture, centers = 0.02 * torch.randn(height, width, generator=generator), []
    while len(centers) < number:
        row, column, radius, tone = torch.rand(4, generator=generator).tolist()
        row, column, radius = 10 + row * (height - 20), 10 + column * (width - 20), 7 + 2 * radius
        if all((row - r) ** 2 + (column - c) ** 2 > 22**2 for c, r in centers):
            inside = (rows - row) ** 2 + (columns - column) ** 2 <= radius**2
            picture[inside] += 0.3 + 0.3 * tone
            centers.append((column, row))
    return (0.2 + picture).clamp(0, 1)[None], torch.tensor(centers)
