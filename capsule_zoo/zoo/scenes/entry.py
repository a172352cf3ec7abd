"""Scenes: several objects on a ground, each drawn by any image model of the zoo."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from capsule_zoo.figures.generic import samples
from capsule_zoo.guides import AttendInferRepeat, Guide, Peeling, SlotAttention
from capsule_zoo.guides.scenes.windows import WindowReader
from capsule_zoo.inference import Pace, SummedPresences
from capsule_zoo.models import Scenes, check_at_least
from capsule_zoo.models.scenes.grounds import GROUNDS
from capsule_zoo.registry import (
    Entry,
    copy_of,
    create,
    list_models,
    load,
    recipe_path,
    register,
    takes_images,
    trained_names,
    unknown_source,
)
from capsule_zoo.zoo.scenes.figures import found_objects

VAE: dict[str, Any] = dict(latent=20, channels=8, guide=dict(hidden=128))
_readers: WeakKeyDictionary[Scenes, tuple[Guide, Guide | None]] = WeakKeyDictionary()


def part_entry(
    name: str,
    defaults: Mapping[str, Any],
    settings: Mapping[str, Any],
    role: str,
    others: tuple[str, ...] = (),
) -> Entry:
    """Return the entry whose model draws objects or grounds, untrained or from trained weights.

    Poses that are points in its guide become normal, with unchanged weights, because presences of
    slots follow from densities, and points have no density.

    Args:
        name: the name of an entry, or of trained weights or a run folder.
        settings: settings of an untrained entry, unless `settings` replace them.
        role: the name of the argument of `scenes`.
        others: further values of the argument.

    Raises:
        ValueError: an unknown name; an entry of points; settings for trained weights.
    """
    if name in list_models():
        if not takes_images(name):
            raise ValueError(f"{role} {name!r} draws points and no images; choose another entry")
        entry = create(name, **{**defaults, **settings})
    elif not recipe_path(name):
        message = unknown_source(role, name, [*others, *list_models(), *trained_names()])
        raise ValueError(f"{message}; a run that is the {role} has to stay in its folder")
    elif settings:
        raise ValueError(f"{name} is trained and has its settings; leave out {role}_settings")
    else:
        entry = load(name)
    return entry.use_guide("normal") if entry.default_guide == "delta" else entry


def readers_of(entry: Entry) -> dict[str, Any]:
    """Copy the guides that infer an object and the ground, because a guide has one owner."""
    if isinstance(entry.guide, WindowReader):
        readers = entry.guide.reader, entry.guide.ground_reader
    else:
        readers = _readers[entry.model]
    reader, ground_reader = (guide and copy_of(guide) for guide in readers)
    return {"reader": reader, "ground_reader": ground_reader}


def pair_with_canvas(entry: Entry, height: int, width: int, slots: int) -> Entry:
    """Return a model and guide of scenes for another canvas and number of slots.

    Objects keep their size in pixels. The odds of a slot are one half.
    """
    model = entry.model.with_canvas(height, width, slots, rate=0.5)
    return replace(entry, model=model, guide=entry.guide_of(WindowReader).on_model(model))


def scenes(
    image_shape: tuple[int, int, int] = (1, 50, 50),
    thing: str = "vae",
    thing_settings: Mapping[str, Any] = {},  # never changed, as ground_settings
    window: int = 28,
    texture: bool = False,
    train_thing: bool = True,
    ground: str = "black",
    ground_settings: Mapping[str, Any] = {},
    train_ground: bool = True,
    **options: Any,
) -> Scenes:
    """Several objects on a ground, each drawn by any image model of the zoo.

    Args:
        image_shape: (channels, height, width).
        thing: the model of an object: the name of an entry, which is trained with the scenes, of
            trained weights or of a run folder.
        thing_settings: settings of the entry `thing`.
        window: height and width of an object's own picture, in pixels, where `thing` is an entry.
        texture: objects have colors inside, and not one color each.
        train_thing: train the object model too; it is best kept as it is where it is trained.
        ground: argument of `Scenes`, or the model of the ground: the name of an entry, of trained
            weights or of a run folder.
        ground_settings: settings of the entry `ground`.
        train_ground: train the ground model too. Its guide is trained in any case, because objects
            hide parts of a ground.
        options: arguments of `Scenes`.
    """
    check_at_least(1, window=window)
    channels = image_shape[0]
    defaults: dict[str, Any] = {"image_shape": (1 + channels if texture else 1, window, window)}
    if thing == "vae":
        defaults |= {**VAE, "guide": {**VAE["guide"], "context": channels}}
        if "guide" in thing_settings:
            thing_settings = {
                **thing_settings,
                "guide": defaults["guide"] | thing_settings["guide"],
            }
    inner, behind = part_entry(thing, defaults, thing_settings, "thing"), None
    if ground in GROUNDS and ground_settings:
        raise ValueError(f"ground {ground!r} has no settings; leave out ground_settings")
    if ground not in GROUNDS:
        behind = part_entry(
            ground, {"image_shape": image_shape}, ground_settings, "ground", GROUNDS
        )
    model = Scenes(image_shape, inner.model, ground=behind.model if behind else ground, **options)
    if not train_thing:
        for program in (inner.model, inner.guide):
            program.make_constant()
    if behind and not train_ground:
        behind.model.make_constant()
    _readers[model] = inner.guide, behind.guide if behind else None
    return model


def peeling(
    entry: Entry, glimpse: int = 20, hidden: int = 200, blur: float = 0.23, temperature: float = 0.0
) -> Peeling:
    """Objects are inferred one after the other, each from what the earlier ones do not explain.

    Args:
        glimpse, hidden, blur, temperature: arguments of `Peeling`.
    """
    options: dict[str, Any] = dict(
        glimpse=glimpse, hidden=hidden, blur=blur, temperature=temperature
    )
    return Peeling(entry.model, **readers_of(entry), **options)


def two_sweeps(entry: Entry) -> Peeling:
    """Peeling, then each object is inferred again from what all others leave unexplained."""
    arguments = {**entry.guide_of(Peeling).arguments, **readers_of(entry)}
    return Peeling(**{**arguments, "model": entry.model, "sweeps": 2})


def recurrent(entry: Entry, hidden: int = 200) -> AttendInferRepeat:
    """A recurrent network finds objects one after the other (attend, infer, repeat).

    Args:
        hidden: argument of `AttendInferRepeat`.
    """
    return AttendInferRepeat(entry.model, **readers_of(entry), hidden=hidden)


def slot_attention(entry: Entry, width: int = 64) -> SlotAttention:
    """All objects are inferred at once, by slots that compete for pixels.

    Args:
        width: argument of `SlotAttention`.
    """
    return SlotAttention(entry.model, **readers_of(entry), width=width)


register(
    "scenes",
    model=scenes,
    guides={
        "peeling": peeling,
        "two-sweeps": two_sweeps,
        "recurrent": recurrent,
        "slot-attention": slot_attention,
    },
    objective=SummedPresences,
    training=dict(lr=1e-3, pace=Pace("cosine"), batch_size=64),
    figures={"objects": found_objects, "samples": samples},
    small=dict(
        image_shape=(1, 12, 10),
        slots=2,
        size=6.0,
        window=5,
        thing_settings=dict(latent=2, channels=3, guide=dict(hidden=5)),
        guide=dict(glimpse=4, hidden=6),
        guides={"recurrent": dict(hidden=6), "slot-attention": dict(width=6)},
    ),
    data="multi-digits",
)
