"""Scenes: several objects on a ground, each drawn by any image model of the zoo."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from capsule_zoo.figures.generic import samples
from capsule_zoo.guides import AttendInferRepeat, Guide, Peeling, SlotAttention
from capsule_zoo.guides.scenes.windows import WindowReader
from capsule_zoo.inference import Pace, SummedPresences
from capsule_zoo.models import Scenes, check_at_least
from capsule_zoo.models.scenes.grounds import GROUNDS
from capsule_zoo.registry import (
    Entry,
    create,
    list_models,
    load,
    recipe_path,
    register,
    takes_images,
    trained_names,
    unknown_source,
)
from capsule_zoo.sizes import Takes
from capsule_zoo.zoo.scenes.figures import found_objects

VAE_SIZES: dict[str, Any] = dict(latent=20, channels=8, hidden=128)


def part_entry(
    name: str,
    given: Mapping[str, Any],
    sizes: Mapping[str, Any],
    what: str,
    others: tuple[str, ...] = (),
) -> Entry:
    """Return the entry whose model draws objects or grounds: an untrained one, or trained weights.

    Where poses are points in its guide they become normal, with the same weights: which slots hold
    an object follows from densities, and points have none.

    Args:
        name: the name of an entry, or of trained weights or a run folder.
        given: sizes of an untrained entry, unless `sizes` replace them.
        what: the name of the argument of `scenes`.
        others: further values of it.

    Raises:
        ValueError: an unknown name; an entry of points; sizes are given for trained weights, whose
            sizes are theirs.
    """
    if name in list_models():
        if not takes_images(name):
            raise ValueError(f"{what} {name!r} draws points and no images; choose another entry")
        entry = create(name, **{**given, **sizes})
    elif not recipe_path(name):
        words = unknown_source(what, name, [*others, *list_models(), *trained_names()])
        raise ValueError(f"{words}; a run that is the {what} has to stay in its folder")
    elif sizes:
        raise ValueError(f"{name} is trained and has its own sizes; leave out {what}_sizes")
    else:
        entry = load(name)
    return entry.use_guide("normal") if entry.default_guide == "delta" else entry


def reader_of(inner: Entry) -> Guide:
    """Return a copy of an entry's guide to the entry's own model; a guide has one owner."""
    return copy.deepcopy(inner.guide, {id(inner.model): inner.model})


def on_canvas(entry: Entry, height: int, width: int, slots: int) -> Entry:
    """Return the pair for another canvas with so many slots, of which each has odds of one half.

    Objects keep their size in pixels.
    """
    model = entry.model.on_canvas(height, width, slots, rate=0.5)
    return replace(entry, model=model, guide=entry.guide_of(WindowReader).on_model(model))


@register(
    "scenes",
    small=dict(
        image_shape=(1, 12, 10),
        slots=2,
        size=6.0,
        window=5,
        thing_sizes=dict(latent=2, channels=3, hidden=5),
        glimpse=4,
        hidden=6,
        width=6,
    ),
    takes={"sizes": Takes(Scenes, without=("thing", "ground"))},
    data="multi-digits",
)
def scenes(
    image_shape: tuple[int, int, int] = (1, 50, 50),
    thing: str = "vae",
    thing_sizes: Mapping[str, Any] = {},  # it is read only
    window: int = 28,
    texture: bool = False,
    train_thing: bool = True,
    ground: str = "black",
    ground_sizes: Mapping[str, Any] = {},
    train_ground: bool = True,
    glimpse: int = 20,
    hidden: int = 200,
    blur: float = 0.23,
    temperature: float = 0.0,
    width: int = 64,
    **sizes: Any,
) -> Entry:
    """Several objects on a ground, each drawn by any image model of the zoo.

    Args:
        image_shape: (channels, height, width).
        thing: what draws an object: the name of an entry, which is trained with the scenes, or of
            trained weights or a run folder.
        thing_sizes: sizes of the entry `thing`.
        window: height and width of an object's own picture, in pixels, where `thing` is an entry.
        texture: objects have colors inside, and not one color each.
        train_thing: train the object model too; it is best kept as it is where it is trained.
        ground: argument of `Scenes`, or what draws the ground: the name of an entry, or of trained
            weights or a run folder.
        ground_sizes: sizes of the entry `ground`.
        train_ground: train the ground model too. Its guide is trained in any case, because objects
            hide parts of a ground.
        glimpse: argument of `Peeling`.
        hidden: argument of `Peeling`, and of `AttendInferRepeat`.
        blur: argument of `Peeling`.
        temperature: argument of `Peeling`.
        width: argument of `SlotAttention`.
        sizes: arguments of `Scenes`.

    Guides:
        peeling: objects are inferred one after the other, each from what the earlier ones leave
            unexplained.
        two-sweeps: peeling, and then each object again from what all others leave unexplained.
    """
    check_at_least(1, glimpse=glimpse, hidden=hidden, width=width)
    check_at_least(1, window=window)
    channels = image_shape[0]
    given: dict[str, Any] = {"image_shape": (1 + channels if texture else 1, window, window)}
    if thing == "vae":
        given |= {**VAE_SIZES, "context": channels}
    inner, behind = part_entry(thing, given, thing_sizes, "thing"), None
    if ground in GROUNDS and ground_sizes:
        raise ValueError(f"ground {ground!r} has no sizes; leave out ground_sizes")
    if ground not in GROUNDS:
        behind = part_entry(ground, {"image_shape": image_shape}, ground_sizes, "ground", GROUNDS)
    model = Scenes(image_shape, inner.model, ground=behind.model if behind else ground, **sizes)
    if not train_thing:
        for program in (inner.model, inner.guide):
            program.make_constant()
    if behind and not train_ground:
        behind.model.make_constant()

    def of(kind: Callable[..., Guide], **how: Any) -> Callable[[Entry], Guide]:
        def made(entry: Entry) -> Guide:
            ground_reader = behind and reader_of(behind)
            return kind(entry.model, reader_of(inner), ground_reader=ground_reader, **how)

        return made

    peeling = dict(glimpse=glimpse, hidden=hidden, blur=blur, temperature=temperature)
    return Entry(
        model=model,
        guides={
            "peeling": of(Peeling, **peeling),
            "two-sweeps": of(Peeling, sweeps=2, **peeling),
            "recurrent": of(AttendInferRepeat, hidden=hidden),
            "slot-attention": of(SlotAttention, width=width),
        },
        objective=SummedPresences(),
        figures={"objects": found_objects, "samples": samples},
        training=dict(lr=1e-3, pace=Pace("cosine"), batch_size=64),
    )
