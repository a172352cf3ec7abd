"""Scenes of several objects with known number, classes, boxes and masks.

Four data sets are drawn from existing images or from shapes, with fixed seeds:

    multi-digits     gray digits on black, 50x50, 0 to 3 of them: scikit-learn's, so that no file is
                     needed. Scenes for training, validation and testing show different digits, from
                     the corresponding splits of `digits`. Every digit is shrunk by a factor from
                     Normal(1.5, .1), which makes it as tall as a digit of multi-mnist, and has any
                     position. Scenes in which strokes hide each other (a sum above white) are drawn
                     again.
    multi-mnist      scenes of MNIST's digits, 0 to 2, shrunk by a factor from Normal(1.3, .1).
                     Scenes for training and validation share their digits.
    multi-sprites    2 to 5 colored squares, ellipses and hearts on a colored ground, 64x64. Later
                     shapes hide earlier ones.
    tetrominoes      three of the 19 pieces of four cells, in six colors, on black, 35x35, side by
                     side on a grid of 5 pixels.

Options follow a colon: `multi-mnist:canvas=80,least=3,most=3,of=fashion-mnist,overlap=1`. With
`ink=.1` the masks of digits hold their paler pixels too; the scenes do not change.

References:
    Eslami, Heess, Weber, Tassa, Szepesvari, Kavukcuoglu & Hinton 2016, "Attend, Infer, Repeat"
    (arXiv 1603.08575), section 3.1. Kabra et al. 2019, "Multi-object datasets": multi-dSprites and
    Tetrominoes, whose pictures ours follow but do not copy.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.progress import track
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.sources import (
    Labelled,
    Source,
    digits,
    resize_images,
    split_at_random,
    torchvision_images,
)

INK = 0.5  # a pixel belongs to an object that covers more than this fraction of it
GRAY = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
SHAPES = ("square", "ellipse", "heart")
PIECES = (  # cells (row, column) of the seven pieces; their rotations make 19
    ((0, 0), (0, 1), (1, 0), (1, 1)),
    ((0, 0), (0, 1), (0, 2), (0, 3)),
    ((0, 0), (0, 1), (0, 2), (1, 1)),
    ((0, 0), (0, 1), (0, 2), (1, 0)),
    ((0, 0), (0, 1), (0, 2), (1, 2)),
    ((0, 0), (0, 1), (1, 1), (1, 2)),
    ((0, 1), (0, 2), (1, 0), (1, 1)),
)
CELL = 5  # pixels of a cell
PURE = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1))
CHUNK = 1000  # scenes that are drawn at once
TRIES = 2000  # refused scenes in a row after which objects are considered not to fit


@dataclass(frozen=True, eq=False)
class Objects:
    """The true objects of N scenes, at most M in each.

    Attributes:
        numbers: the object that each pixel shows, from 1; 0 for the ground, uint8 (N, H, W).
        classes: class of every object, -1 where there is none, int64 (N, M).
        boxes: left, top, right and bottom edge of the visible part, in pixels, (N, M, 4).
    """

    numbers: Tensor
    classes: Tensor
    boxes: Tensor

    @property
    def counts(self) -> Tensor:
        """The number of objects in each scene, (N,)."""
        return (self.classes >= 0).sum(1)

    @property
    def masks(self) -> Tensor:
        """The visible part of every object, bool (N, M, H, W)."""
        return masks_of(self.numbers, self.classes.shape[1])

    def resize(self, size: tuple[int, int]) -> "Objects":
        """Return the objects of the scenes resized to (height, width)."""
        height, width = self.numbers.shape[-2:]
        numbers = F.interpolate(self.numbers[:, None], size, mode="nearest")[:, 0]
        scale = torch.tensor([size[1] / width, size[0] / height] * 2)
        return Objects(numbers, self.classes, self.boxes * scale)

    def to(self, device: torch.device | str) -> "Objects":
        """Return the objects on another device."""
        return Objects(self.numbers.to(device), self.classes.to(device), self.boxes.to(device))

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: slice | Tensor) -> "Objects":
        return Objects(self.numbers[index], self.classes[index], self.boxes[index])


def masks_of(numbers: Tensor, most: int) -> Tensor:
    """Return the masks of objects 1 to `most`, bool (N, M, H, W), from numbers (N, H, W)."""
    number = 1 + torch.arange(most, device=numbers.device)
    return numbers[:, None] == number[:, None, None]


def boxes_of(masks: Tensor) -> Tensor:
    """Return the boxes of masks (*batch, H, W): left, top, right and bottom edge, (*batch, 4).

    An empty mask has a box of zeros.
    """
    edges = []
    for axis in (-2, -1):  # columns are left when rows are merged
        covered = masks.any(axis)
        size = covered.shape[-1]
        place = torch.arange(size, device=masks.device)
        low = torch.where(covered, place, size).amin(-1)
        edges.append((low, torch.where(covered, place + 1, 0).amax(-1)))
    (left, right), (top, bottom) = edges
    box = torch.stack([left, top, right, bottom], dim=-1)
    return torch.where(masks.any(-1).any(-1)[..., None], box, 0).float()


def paste_patches(
    patches: Tensor, rows: Tensor, columns: Tensor, canvas: tuple[int, int]
) -> Tensor:
    """Paste patches (n, P, P) into empty canvases (n, H, W), at rows and columns (n,)."""
    height, width = canvas
    side = patches.shape[-1]
    place = torch.arange(side)
    empty = patches.new_zeros(len(patches), height + side, width + side)
    number = torch.arange(len(patches))[:, None, None]
    rows, columns = ((x[:, None] + place) for x in (rows, columns))
    empty[number, rows[:, :, None], columns[:, None]] = patches
    return empty[:, :height, :width]


def _integers(low: int, beyond: Tensor | int, generator: torch.Generator, number: int) -> Tensor:
    """Draw `number` integers, uniform from `low` to below `beyond`, (number,)."""
    span = torch.as_tensor(beyond) - low
    drawn = (torch.rand(number, generator=generator) * span).long()
    return low + drawn.clamp(max=span - 1)


def _describe_objects(covers: Tensor, classes: Tensor, ink: float = INK) -> Objects:
    """Describe objects that cover fractions (n, M, H, W) of pixels; the last is in front."""
    masks = covers > ink
    number = 1 + torch.arange(masks.shape[1], dtype=torch.uint8)
    numbers = torch.where(masks, number[:, None, None], 0).amax(1).to(torch.uint8)
    return Objects(numbers, classes, boxes_of(masks_of(numbers, masks.shape[1])))


def _draw_in_chunks(
    number: int, draw: Callable[[int], tuple[Tensor, Objects]]
) -> tuple[Tensor, Objects]:
    """Draw `number` scenes, chunk by chunk."""
    sizes = [min(CHUNK, number - first) for first in range(0, number, CHUNK)]
    images, objects = zip(*map(draw, track(sizes, "drawing scenes", "chunks")), strict=True)
    parts = [torch.cat([getattr(f, name) for f in objects]) for name in vars(objects[0])]
    return torch.cat(images), Objects(*parts)


def _check(canvas: int, least: int, most: int, side: float) -> None:
    """Raise ValueError for numbers of objects, or a canvas, that allow no scene."""
    if not 1 <= most <= 255:  # masks are numbers of a byte
        raise ValueError(f"most must be at least 1 and at most 255, not {most}")
    if not 0 <= least <= most:
        raise ValueError(f"least must be from 0 to most={most}, not {least}")
    if canvas < side:
        raise ValueError(
            f"canvas={canvas} has no room for objects of {side:.0f} pixels; use a larger canvas"
        )


def _arrange_objects(
    counts: Tensor, covers: Tensor, objects: Callable, refused: Callable
) -> Tensor:
    """Draw objects into `covers` (n, M, H, W) in place, again until no scene is refused.

    Returns:
        The classes of the objects, (n, M); -1 where a scene has fewer than M.

    Raises:
        ValueError: many scenes in a row are refused.
    """
    classes, again = torch.full(covers.shape[:2], -1), torch.arange(len(counts))
    tried = 0
    while len(again):
        if tried > TRIES:
            raise ValueError(
                f"{covers.shape[1]} objects do not fit; give a larger canvas or a smaller most, or "
                "overlap=1 for digits"
            )
        for slot in range(covers.shape[1]):
            here = again[counts[again] > slot]
            covers[here, slot], classes[here, slot] = objects(len(here))
        left = again[refused(covers[again], classes[again]).nonzero()[:, 0]]
        tried = tried + len(left) if len(left) == len(again) else 0
        again = left
    return classes


def _overlap(covers: Tensor, classes: Tensor) -> Tensor:
    """Return whether objects overlap in scenes (n, M, H, W), (n,)."""
    return (covers.sum(1) > 1).flatten(1).any(1)


def paint_objects(grounds: Tensor, covers: Tensor, colors: Tensor) -> Tensor:
    """Paint objects that cover (n, M, H, W), in colors (n, M, C, 1, 1), on grounds (n, C, H, W).

    Later objects lie in front.
    """
    for fraction, color in zip(covers.unbind(1), colors.unbind(1), strict=True):
        grounds = fraction[:, None] * color + (1 - fraction[:, None]) * grounds
    return grounds


def gray_scenes(
    digits: Tensor,
    labels: Tensor,
    number: int,
    *,
    canvas: int = 50,
    least: int = 0,
    most: int = 2,
    scale: float = 1.3,
    spread: float = 0.1,
    overlap: bool = False,
    ink: float = INK,
    grounds: Tensor | None = None,
    seed: int = 0,
) -> tuple[Tensor, Objects]:
    """Draw scenes of gray images on black, as for AIR, (number, 1, canvas, canvas).

    On grounds, objects have random colors, and scenes are (number, 3, canvas, canvas).

    Args:
        digits, labels: images (N, 1, s, s) and classes (N,) of single objects.
        canvas: height and width, in pixels.
        least, most: smallest and largest number of objects in a scene, uniform in between.
        scale, spread: mean and standard deviation of the factor by which an object is shrunk.
        overlap: keep scenes in which strokes hide each other; the sum is then cut off at 1.
        ink: brightness from 0 to 1 above which a pixel is in the mask of its object. It changes the
            masks and boxes, and no image.
        grounds: pictures (n, 3, h, w); each scene has one of them, resized.

    Raises:
        ValueError: an argument out of range, or objects that do not fit the canvas.
    """
    generator = seeded_generator(seed)
    side = digits.shape[-1]
    _check(canvas, least, most, side=1)
    if not (0 < scale < math.inf and 0 <= spread < math.inf):
        raise ValueError(
            f"scale must be a number above 0 and spread one from 0 on, not {scale} and {spread}"
        )
    if not 0 <= ink < 1:
        raise ValueError(f"ink must be a brightness from 0 to below 1, not {ink}")
    if canvas <= side / max(scale - 4 * spread, 0.1):
        raise ValueError(
            f"canvas={canvas} has no room for objects of {side} pixels shrunk by {scale}; use a "
            "larger canvas or a larger scale"
        )

    def objects(count: int) -> tuple[Tensor, Tensor]:
        """Draw one object for each scene, alone on its canvas, and its class."""
        indices = torch.randint(len(digits), (count,), generator=generator)
        factor = scale + spread * torch.randn(count, generator=generator)
        sizes = (side / factor.clamp_min(0.1)).long().clamp(1, canvas - 1)
        patches = digits.new_zeros(count, canvas, canvas)
        for size in sizes.unique().tolist():
            these = sizes == size
            small = resize_images(digits[indices[these]], (size, size))[:, 0]
            patches[these, :size, :size] = small
        rows, columns = (_integers(0, canvas - sizes, generator, count) for _ in range(2))
        return paste_patches(patches, rows, columns, (canvas, canvas)), labels[indices]

    def draw(count: int) -> tuple[Tensor, Objects]:
        covers = digits.new_zeros(count, most, canvas, canvas)
        counts = _integers(least, most + 1, generator, count)
        refused = (lambda scenes, _: torch.zeros(len(scenes))) if overlap else _overlap
        scene_objects = _describe_objects(
            covers, _arrange_objects(counts, covers, objects, refused), ink
        )
        if grounds is None:
            return covers.sum(1, keepdim=True).clamp(max=1), scene_objects
        indices = torch.randint(len(grounds), (count,), generator=generator)
        images = resize_images(grounds[indices], (canvas, canvas))
        colors = torch.rand(count, most, 3, 1, 1, generator=generator)
        return paint_objects(images, covers, colors), scene_objects

    return _draw_in_chunks(number, draw)


def _inside(shape: str, x: Tensor, y: Tensor) -> Tensor:
    """Return whether points lie inside a shape that fills the square [-1, 1]^2."""
    if shape == "square":
        return (x.abs() < 0.8) & (y.abs() < 0.8)
    if shape == "ellipse":
        return x.square() + (y / 0.6).square() < 1
    u, v = 1.2 * x, -1.25 * y + 0.15
    return (u.square() + v.square() - 1) ** 3 < u.square() * v**3


def sprite_bank() -> tuple[Tensor, Tensor]:
    """Return all sprites as covered fractions of pixels (K, P, P), and their classes (K,).

    Half widths are evenly spaced from 5 to 10 pixels, and angles over the circle.
    """
    sizes, rotations, side = 6, 40, 24
    fine = 4  # points across a pixel at which it is tested
    axis = (torch.arange(side * fine) + 0.5) / fine - side / 2
    row, column = torch.meshgrid(axis, axis, indexing="ij")
    sprites, classes = [], []
    for kind, shape in enumerate(SHAPES):
        for half in torch.linspace(5, 10, sizes).tolist():
            for rotation in range(rotations):
                c, s = (
                    math.cos(math.tau * rotation / rotations),
                    math.sin(math.tau * rotation / rotations),
                )
                x, y = (c * column + s * row) / half, (c * row - s * column) / half
                sprites.append(F.avg_pool2d(_inside(shape, x, y).float()[None], fine)[0])
                classes.append(kind)
    return torch.stack(sprites), torch.tensor(classes)


def sprite_scenes(
    number: int, *, canvas: int = 64, least: int = 2, most: int = 5, seed: int = 0
) -> tuple[Tensor, Objects]:
    """Draw scenes of colored sprites on a colored ground, (number, 3, canvas, canvas).

    An object of which fewer than 20 pixels would be visible is drawn again.

    Raises:
        ValueError: an argument out of range, or objects that do not fit the canvas.
    """
    generator = seeded_generator(seed)
    bank, kinds = sprite_bank()
    side = bank.shape[-1]
    _check(canvas, least, most, side)

    def objects(count: int) -> tuple[Tensor, Tensor]:
        indices = torch.randint(len(bank), (count,), generator=generator)
        rows, columns = (_integers(0, canvas - side + 9, generator, count) for _ in range(2))
        moved = paste_patches(bank[indices], rows, columns, (canvas + 8, canvas + 8))
        return moved[:, 4:-4, 4:-4], kinds[indices]

    def hidden(covers: Tensor, classes: Tensor) -> Tensor:
        areas = _describe_objects(covers, classes).masks.sum((-2, -1))
        return ((areas < 20) & (classes >= 0)).any(1)

    def draw(count: int) -> tuple[Tensor, Objects]:
        covers = torch.zeros(count, most, canvas, canvas)
        counts = _integers(least, most + 1, generator, count)
        classes = _arrange_objects(counts, covers, objects, hidden)
        colors = torch.rand(count, 1 + most, 3, 1, 1, generator=generator)
        images = colors[:, 0].expand(-1, -1, canvas, canvas)
        return paint_objects(images, covers, colors[:, 1:]), _describe_objects(covers, classes)

    return _draw_in_chunks(number, draw)


def tetromino_bank() -> Tensor:
    """Return the cells of the 19 pieces, bool (19, 4, 4), each in the upper left corner."""
    pieces: dict[tuple, Tensor] = {}
    for piece in PIECES:
        cells = torch.tensor(piece)
        for _ in range(4):
            cells = torch.stack([cells[:, 1], -cells[:, 0]], dim=1)
            cells = cells - cells.amin(0)
            square = torch.zeros(4, 4, dtype=torch.bool)
            square[cells[:, 0], cells[:, 1]] = True
            pieces.setdefault(tuple(square.flatten().tolist()), square)
    return torch.stack(list(pieces.values()))


def tetromino_scenes(
    number: int, *, canvas: int = 35, most: int = 3, seed: int = 0
) -> tuple[Tensor, Objects]:
    """Draw scenes of `most` colored pieces on black that do not overlap, (number, 3, H, W).

    Raises:
        ValueError: an argument out of range, or pieces that do not fit the canvas.
    """
    _check(canvas, most, most, 4 * CELL)
    if canvas % CELL:
        raise ValueError(f"canvas must be a multiple of {CELL}, the pixels of a cell, not {canvas}")
    generator = seeded_generator(seed)
    bank, grid = tetromino_bank().float(), canvas // CELL
    sides = [1 + (bank.amax(axis) * torch.arange(4)).amax(1).long() for axis in (2, 1)]
    pure = torch.tensor(PURE).float()

    def objects(count: int) -> tuple[Tensor, Tensor]:
        indices = torch.randint(len(bank), (count,), generator=generator)
        rows, columns = (_integers(0, grid - n[indices] + 1, generator, count) for n in sides)
        return paste_patches(bank[indices], rows, columns, (grid, grid)), indices

    def draw(count: int) -> tuple[Tensor, Objects]:
        counts, cells = torch.full((count,), most), torch.zeros(count, most, grid, grid)
        classes = _arrange_objects(counts, cells, objects, _overlap)
        covers = cells.repeat_interleave(CELL, -1).repeat_interleave(CELL, -2)
        colors = pure[torch.randint(len(pure), (count, most), generator=generator)]
        return torch.einsum("nmhw,nmc->nchw", covers, colors), _describe_objects(covers, classes)

    return _draw_in_chunks(number, draw)


def scene_source(
    draw: Callable[[str, int, int], tuple[Tensor, Objects]],
    train: int,
    test: int,
    held_out: bool = False,
) -> Source:
    """Return a source of scenes from `draw(split, number, seed)`; labels are numbers of objects.

    Args:
        held_out: draw scenes for validation too, as the split "validation".
    """
    if min(train, test) < 1:
        raise ValueError(f"train and test must be at least 1, not {train} and {test}")
    validation = 1000 if train > 2000 else train // 10
    scenes = [draw("train", train, 1), draw("test", test, 2)]
    if held_out:
        scenes.append(draw("validation", max(validation, 1), 3))
    parts = [(images, objects.counts) for images, objects in scenes]
    names = [f"{n} objects" for n in range(1 + max(int(counts.max()) for _, counts in parts))]
    scene_objects = tuple(objects for _, objects in scenes)
    validated = parts[2] if held_out else None
    return Source(
        parts[0], parts[1], tuple(names), validation, held_out=validated, objects=scene_objects
    )


def multi_digits(
    root: Path | None,
    train: int = 20_000,
    test: int = 1_000,
    most: int = 3,
    scale: float = 1.5,
    **options: Any,
) -> Source:
    """Return the source of scenes of scikit-learn's digits; `options` go to `gray_scenes`."""
    source = digits()
    train_digits, held_out = split_at_random(source.train, source.validation)
    splits = {"train": train_digits, "validation": held_out, "test": source.test}
    return _gray_source(splits, train, test, most=most, scale=scale, **options)


def multi_mnist(
    root: Path | None, of: str = "mnist", train: int = 30_000, test: int = 2_000, **options: Any
) -> Source:
    """Return the source of scenes of MNIST's digits; `options` go to `gray_scenes`."""
    if of not in GRAY:
        raise ValueError(f"of must be {' or '.join(GRAY)}, not {of!r}")
    source = torchvision_images(GRAY[of], root)
    return _gray_source({"train": source.train, "test": source.test}, train, test, **options)


def _gray_source(splits: dict[str, Labelled], train: int, test: int, **options: Any) -> Source:
    """Return the source of scenes of the gray images of each split."""

    def draw(split: str, number: int, seed: int) -> tuple[Tensor, Objects]:
        return gray_scenes(*splits[split], number, seed=seed, **options)

    return scene_source(draw, train, test, "validation" in splits)


def made_of(draw: Callable[..., tuple[Tensor, Objects]]) -> Callable[..., Source]:
    """Return a reader of the scenes that `draw` draws; the reader's options go to `draw`."""

    def read(root: Path | None, train: int = 20_000, test: int = 1_000, **options: Any) -> Source:
        return scene_source(lambda _, n, seed: draw(n, seed=seed, **options), train, test)

    return read


SCENES: dict[str, tuple[Callable[..., Source], Callable]] = {
    "multi-digits": (multi_digits, gray_scenes),
    "multi-mnist": (multi_mnist, gray_scenes),
    "multi-sprites": (made_of(sprite_scenes), sprite_scenes),
    "tetrominoes": (made_of(tetromino_scenes), tetromino_scenes),
}


def scene_reader(kind: str, settings: str | None = None) -> Callable[[Path | None, Any], Source]:
    """Return the reader of a data set of scenes with options such as "most=3,overlap=1" applied.

    Raises:
        ValueError: an option that the data set does not have, or that is no number.
    """
    read, draw = SCENES[kind]
    arguments = {**inspect.signature(read).parameters, **inspect.signature(draw).parameters}
    fixed_names = ("root", "options", "digits", "labels", "number", "grounds", "seed")
    names = [n for n in arguments if n not in fixed_names]
    options: dict[str, Any] = {}
    for word in [] if settings is None else settings.split(","):
        name, _, value = word.partition("=")
        if name not in names:
            raise ValueError(f"{kind} has no option {name!r}; its options are {', '.join(names)}")
        kind_of = type(arguments[name].default)
        try:
            options[name] = kind_of(int(value)) if kind_of is bool else kind_of(value)
        except ValueError:
            raise ValueError(f"{name} of {kind} must be a number, not {value!r}") from None

    return lambda root, size: read(root, **options).resize(size)
