"""The registry of the zoo's entries, which are created by name, saved and loaded.

An entry is a model with its default guide, the other guides that fit, an objective, and suitable
training settings. It is registered in `capsule_zoo/zoo/<family>/entry.py`, by the class of its
model, or by a factory where there is more to say:

    register("cnn", guides={"exact": ExactLabel}, objective=Trace_ELBO())(ConvolutionalClassifier)

    @register("part-whole")
    def part_whole(image_shape=(1, 28, 28), **sizes) -> Entry[PartWholeCapsules, Guide]: ...

Every model of images takes `image_shape` first, so that any data set can be tried on any of them; a
model of points does not. A class or a factory outside the zoo registers as well, once its module
has been imported, and so does a guide to one of the zoo's entries (`register_guide`).
"""

import fnmatch
import json
import re
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import Any, TypeVar

from pyro.infer import ELBO, Trace_ELBO

from capsule_zoo.data.datasets import NAME as NAME
from capsule_zoo.data.registration import modules_outside, refuse_taken, runs_again
from capsule_zoo.entry import Entry as Entry
from capsule_zoo.entry import GuideMaker
from capsule_zoo.guides.base import Guide
from capsule_zoo.inference.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_at_least, unknown
from capsule_zoo.models.checks import check_known as check_known
from capsule_zoo.models.common.modes import seeded
from capsule_zoo.models.routing.parent_law import Routing
from capsule_zoo.models.specification import build, spec
from capsule_zoo.records import write_json
from capsule_zoo.runs.recipe import Recipe
from capsule_zoo.sizes import (
    Size,
    Takes,
    check_sizes,
    constructor_sizes,
    is_open,
    known_sizes,
    sized,
)
from capsule_zoo.zoo import import_entries

WEIGHTS = Path(__file__).resolve().parent / "weights"
if not WEIGHTS.is_dir():  # a checkout keeps it next to this folder
    WEIGHTS = Path(__file__).resolve().parent.parent / "weights"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class _Registered:
    """A factory, its small sizes, the constructors to which it passes sizes, and its data set.

    `guides` holds makers of further guides, by name, from `register_guide`.
    """

    factory: Callable[..., Entry]
    small: Mapping[str, Any]
    takes: Mapping[str, Takes]
    data: str
    guides: dict[str, GuideMaker] = field(default_factory=dict)


_registered: dict[str, _Registered] = {}


def register(
    name: str,
    *,
    small: Mapping[str, Any] | None = None,
    takes: Mapping[str, Takes] | None = None,
    data: str = "digits",
    **parts: Any,
) -> Callable[[F], F]:
    """Return a decorator that registers a class of models, or a factory of entries.

    Of a class, the signature gives names, types and defaults of the sizes, and its docstring says
    what they are; of an argument such as `painting=Painting()` the fields are sizes. The size
    `guide` holds arguments of its default guide.

    Args:
        name: lower case with hyphens.
        small: small sizes at which the entry is created and runs quickly, as tests need.
        takes: for each parameter that holds further sizes, such as `**sizes`, the constructor that
            takes them; `create` then knows their names and types.
        data: the data set that the entry is trained on if no other is named.
        parts: of a class: fields of `Entry` (`guides`, `objective`, `training`, `figures`,
            `stages`).

    Raises:
        ValueError: the name is taken outside of a notebook, or not of that form.
    """
    if not re.fullmatch(NAME, name):
        raise ValueError(f"an entry's name is lower case with hyphens, such as vae, not {name!r}")

    def decorate(made: F) -> F:
        factory, passes = _by_class(made, **parts) if isinstance(made, type) else (made, takes)
        if modules_outside(factory):
            import_entries()  # the zoo's own entries keep their names
        held = _registered.get(name)
        refuse_taken("an entry", name, held and held.factory, factory)
        _registered[name] = _Registered(factory, dict(small or {}), dict(passes or {}), data)
        return made

    return decorate


def _by_class(
    kind: type[Model], guides: Any = None, objective: ELBO | None = None, **parts: Any
) -> tuple[Callable[..., Entry], dict[str, Takes]]:
    """Return a factory of entries of a class, with its signature, and what it passes on."""
    if not isinstance(guides, Mapping) or not guides or objective is None:
        raise ValueError('register a class with guides={"name": ...} and objective=Trace_ELBO()')
    default, first = next(iter(guides.items()))
    words, takes = cleandoc(kind.__doc__ or ""), {"sizes": Takes(kind, options=False)}

    def factory(*, guide: Mapping[str, Any] = {}, **sizes: Any) -> Entry:
        own = {default: lambda entry: sized(first, entry.model, **guide)} if guide else {}
        return Entry(sized(kind, **sizes), {**guides, **own}, deepcopy(objective), **parts)

    own = signature(factory).parameters
    known = [
        Parameter(size.name, Parameter.KEYWORD_ONLY, default=size.default, annotation=size.hint)
        for size in constructor_sizes(takes["sizes"]).values()
    ]
    if isinstance(first, type) and len(signature(first).parameters) > 1:  # more than the model
        takes["guide"] = Takes(first)
        known.append(own["guide"])
        line = f"    guide: arguments of `{first.__name__}`.\n"
        words = words.replace("Args:\n", f"Args:\n{line}", 1)
    factory.__dict__["__signature__"] = Signature([*known, own["sizes"]])
    factory.__annotations__ = {size.name: size.annotation for size in known}
    factory.__doc__, factory.__module__, factory.__name__ = words, kind.__module__, kind.__name__
    return factory, takes


def register_guide(entry: str, name: str) -> Callable[[GuideMaker], GuideMaker]:
    """Return a decorator that adds a guide to a registered entry, under `name`.

    >>> @register_guide("part-whole", "mine")
    ... def mine(entry: Entry) -> Guide:
    ...     return MyGuide(entry.model)

    Raises:
        ValueError: the entry is unknown, or has a guide of that name, or the name is not lower case
            with hyphens.
    """
    if not re.fullmatch(NAME, name):
        raise ValueError(f"a guide's name is lower case with hyphens, not {name!r}")
    with seeded(0):
        taken = create(entry, **small_sizes(entry)).guides
    if name in taken and not runs_again(_registered[entry].guides.get(name)):
        raise ValueError(f"{entry} has a guide named {name!r} already; choose another name")

    def decorate(maker: GuideMaker) -> GuideMaker:
        _registered[entry].guides[name] = maker
        return maker

    return decorate


def list_models(pattern: str = "*") -> list[str]:
    """Return the sorted names of entries that match a shell pattern such as `"part*"`."""
    import_entries()
    return sorted(fnmatch.filter(_registered, pattern))


def summary(name: str) -> str:
    """Return the summary of a registered entry: the first line of its factory's docstring."""
    return (factory_of(name).__doc__ or "").strip().partition("\n")[0]


def small_sizes(name: str) -> dict:
    """Return sizes for `create` at which a registered entry is small and runs quickly."""
    return dict(_look_up(name).small)


def default_data(name: str) -> str:
    """Return the name of the data set that an entry is trained on if no other is named."""
    return _look_up(name).data


def takes_images(name: str) -> bool:
    """Return False for an entry of points: its factory takes no `image_shape`."""
    return "image_shape" in sizes_of(name)


def sizes_of(name: str) -> dict[str, Size]:
    """Return the sizes that `create` takes for a registered entry, by name."""
    found = _look_up(name)
    return known_sizes(found.factory, found.takes)


def check_sizes_of(name: str, sizes: Mapping[str, object]) -> None:
    """Raise ValueError unless `create` knows these sizes of a registered entry, and their types."""
    found = _look_up(name)
    check_sizes(name, sizes, sizes_of(name), is_open(found.factory, found.takes))


def create(name: str, **sizes: object) -> Entry:
    """Create a new, untrained entry.

    Args:
        name: one of `list_models()`.
        sizes: passed to the entry's factory; every factory takes `image_shape=(C, H, W)`.

    Raises:
        ValueError: unknown name or size (with the nearest ones), a size of another type, or one
            that the factory refuses.
    """
    check_sizes_of(name, sizes)
    found = _look_up(name)
    factory = found.factory
    image_shape: Any = sizes.get("image_shape", 1)
    check_at_least(1, image_shape=image_shape)
    try:
        entry = factory(**sizes)
    except TypeError as error:
        reason = str(error).partition("\n")[0]  # torch goes on with its own stack
        raise ValueError(f"{name} does not take these sizes: {reason}") from error
    if not isinstance(entry, Entry):
        raise ValueError(f"the factory of {name} must return an Entry, not {type(entry).__name__}")
    entry.guides = {**entry.guides, **found.guides}
    entry.name = name
    known = signature(factory).parameters.values()
    defaults = {p.name: p.default for p in known if p.default is not p.empty}
    entry.sizes = {**defaults, **sizes}  # so that a later change of defaults breaks no saved run
    return entry


def save(model: Model, guide: Guide, folder: str | Path, /, **config: object) -> None:
    """Write any pair of model and guide into a folder, from which `load` builds it again.

    The files are `model.safetensors`, `guide.safetensors`, and `config.json`, which says what both
    were made with. The models of objects in scenes, and the guides that a guide starts from, are
    part of it.

    Args:
        config: further settings for `config.json`, such as the data set and the seed.

    Raises:
        ValueError: the guide was made from another model, or an argument of a constructor cannot
            be written as JSON, such as a function.
    """
    if guide.model is not model:
        raise ValueError(
            "guide was made from another model, and both could not be rebuilt as a pair; make it "
            "anew from this model, or copy both at once: copy.deepcopy((model, guide))"
        )
    made: dict[str, Any] = {"pair": {"model": spec(model), "guide": spec(guide, model=model)}}
    if modules := modules_outside(type(model), type(guide)):
        made["modules"] = modules
    _write(model, guide, Path(folder), {**made, **config})


def save_entry(entry: Entry, folder: str | Path, /, **config: object) -> None:
    """Write an entry that `create` made into a run folder; any other as `save` does.

    Raises:
        ValueError: the guide was made by another name than the entry's `default_guide`.
    """
    if entry.name:
        _write(entry.model, entry.guide, Path(folder), {**made_by(entry), **config})
    else:
        save(entry.model, entry.guide, folder, **config)


def _write(model: Model, guide: Guide, folder: Path, config: Mapping[str, object]) -> None:
    save_checkpoint(folder / "model.safetensors", model.state_dict())
    save_checkpoint(folder / "guide.safetensors", guide.state_dict())
    write_json(folder / "config.json", dict(config))


def load(source: str | Path) -> Entry:
    """Load a trained entry, by name from the zoo's weights or from a run folder.

    Of a pair that `save` wrote, the entry has the model and the guide, and no figures. Only
    safetensors are read, never a pickle.

    Raises:
        ValueError: neither a run folder nor the name of trained weights.
        CheckpointError: files are missing (a wheel leaves out the largest), damaged or of another
            model.
    """
    path = _recipe_path(source)
    if path.name == "config.json":
        places = {p: path.parent / f"{p}.safetensors" for p in ("model", "guide")}
        if not places["model"].exists() and (path.parent / "checkpoint.safetensors").exists():
            raise CheckpointError(
                f"the run in {source} has not ended; go on with it by capsule-zoo train "
                f"{read_recipe(source)['entry']} --resume --out {source}"
            )
        states = {p: load_checkpoint(place) for p, place in places.items()}
    else:
        states = load_checkpoint(_tensors_of(path))
    made = read_recipe(source)
    entry = _built(made) if "pair" in made else rebuild(Recipe.read(made))
    for part, state in states.items():
        module = getattr(entry, part)
        kinds = (state[name].dtype for name, _ in module.named_parameters() if name in state)
        module.to(next(kinds, None))  # as it was saved
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            kind = type(module).__name__
            raise CheckpointError(f"{source} does not fit this {kind}: {error}") from error
    return entry


def _built(made: Mapping[str, Any]) -> Entry:
    """Return an untrained entry of the pair that `save` wrote."""
    import_entries()  # which define the zoo's classes
    try:
        model = build(made["pair"]["model"])
        guide = build(made["pair"]["guide"], model=model)
    except (ValueError, KeyError) as error:
        first = "".join(f"; import {module} first" for module in made.get("modules", ()))
        raise CheckpointError(f"config.json describes no pair: {error}{first}") from error
    makers: dict[str, GuideMaker] = {"saved": lambda entry: copy_of(entry.guide)}
    return Entry(model, makers, Trace_ELBO(), guide=guide)


def copy_of(guide: Guide) -> Guide:
    """Return a copy of a guide, with its weights, to the same model."""
    return deepcopy(guide, {id(guide.model): guide.model})


def _tensors_of(card: Path) -> Path:
    """Return the file of tensors that belongs to a card; the wheel leaves out the large ones."""
    tensors = card.with_suffix(".safetensors")
    if not tensors.is_file():
        raise CheckpointError(
            f"the installed package has the card of {card.stem} but not its tensors, which are too "
            f"large for a wheel: install from a checkout (pip install -e .), or copy its file "
            f"weights/{tensors.name} into {card.parent}"
        )
    return tensors


def read_recipe(source: str | Path) -> dict:
    """Read the recipe of a trained entry, and all that was saved with it; see `Recipe.read`.

    Raises:
        ValueError: neither a run folder nor the name of trained weights.
        CheckpointError: the file is damaged.
    """
    path = _recipe_path(source)
    try:
        found = json.loads(path.read_text())
        if isinstance(found, dict) and isinstance(found.get("pair"), dict):
            return found
        kinds = {"entry": str, "sizes": dict, "guide": str}
        if all(isinstance(found.get(key), kind) for key, kind in kinds.items()):
            return found
        reason = "it does not say entry, guide (words) and sizes (by name); write it with save()"
    except (ValueError, AttributeError) as error:
        reason = str(error)
    raise CheckpointError(f"{path} does not describe an entry of the zoo: {reason}")


def recipe_path(source: str | Path) -> Path | None:
    """Return the file that describes a trained entry; None if there is no such entry."""
    card = f"{source}.json"
    places = Path(source) / "config.json", WEIGHTS / card, Path(card)
    return next(filter(Path.is_file, places), None)


def trained_names() -> list[str]:
    """Return the names of the zoo's trained weights, with or without their tensors."""
    return sorted(path.stem for path in WEIGHTS.glob("*.json"))


def _recipe_path(source: str | Path) -> Path:
    if path := recipe_path(source):
        return path
    raise ValueError(unknown_source("trained entry", source, trained_names()))


def unknown_source(kind: str, source: str | Path, known: Collection[str]) -> str:
    """Return a message for what is neither a known name nor the folder of a run.

    A path is taken for a folder, and the nearest runs beside it or inside it are named.
    """
    folder = Path(source)
    if len(folder.parts) < 2 and not folder.is_dir():
        return f"{unknown(kind, str(source), known)}; or give the folder of a run"
    missing = "no such run folder"
    if folder.is_dir():
        missing = "no run in the folder, which holds no config.json"
    place = folder if folder.is_dir() else folder.parent
    runs = sorted(str(path.parent) for path in place.glob("*/config.json"))
    published = (path.with_suffix("") for path in place.glob("*.safetensors"))
    runs += sorted(str(path) for path in published if recipe_path(path))
    near = get_close_matches(str(folder), runs, cutoff=0) or runs[:3]
    hint = f"did you mean {' or '.join(near)}?" if near else "make one by: capsule-zoo train ENTRY"
    return f"{missing}: {source}; {hint}"


def save_weights(entry: Entry, card: Path, content: dict) -> None:
    """Write a card `<name>.json` and `<name>.safetensors`, from which `load(name)` rebuilds."""
    states = {"model": entry.model.state_dict(), "guide": entry.guide.state_dict()}
    save_checkpoint(card.with_suffix(".safetensors"), states)
    write_json(card, {**made_by(entry), **content})


def made_by(entry: Entry) -> dict:
    """Return the part of a recipe that rebuilds an entry, except its weights.

    `modules` is there if modules outside the zoo have to be imported first.

    Raises:
        ValueError: the guide was made by another name than the entry's `default_guide`.
    """
    if (name := entry.guide_name) != entry.default_guide:
        raise ValueError(
            f"entry.guide was made as {name!r}, but default_guide, which load makes, is "
            f"{entry.default_guide!r}; call entry.use_guide({name!r}) before training, or set "
            f"entry.default_guide = {name!r}"
        )
    sizes = {name: _as_json(value) for name, value in entry.sizes.items()}
    made = {"entry": entry.name, "sizes": sizes, "guide": entry.default_guide}
    kinds = [type(value) for value in entry.sizes.values() if isinstance(value, Routing)]
    makers = factory_of(entry.name), entry.guides[entry.default_guide]
    modules = modules_outside(*makers, *kinds)
    return {**made, "modules": modules} if modules else made


def factory_of(name: str) -> Callable[..., Entry]:
    """Return the factory of a registered entry; raise ValueError for an unknown name."""
    return _look_up(name).factory


def _look_up(name: str) -> _Registered:
    check_known("entry", name, list_models())
    return _registered[name]


def rebuild(recipe: Recipe) -> Entry:
    """Create an untrained entry from its recipe.

    Raises:
        ValueError: the entry or its guide is unknown; the message names the modules to import.
    """
    _check_imported(recipe, "entry", recipe.entry, list_models())
    sizes = {name: _from_json(value, recipe) for name, value in recipe.sizes.items()}
    entry = create(recipe.entry, **sizes)
    guide = recipe.guide or entry.default_guide
    _check_imported(recipe, "guide", guide, list(entry.guides))
    return entry.use_guide(guide)


def _as_json(value: Any) -> Any:
    """Return a size as JSON holds it: of a routing, its class and its attributes."""
    if isinstance(value, Routing):
        return {"routing": type(value).__qualname__, **asdict(value)}
    if isinstance(value, tuple | list):
        return [_as_json(each) for each in value]
    return value.item() if hasattr(value, "item") else value  # a number of NumPy


def _from_json(value: Any, recipe: Recipe) -> Any:
    """Return a size that `_as_json` wrote, after a round trip."""
    if not (isinstance(value, dict) and "routing" in value):
        return value
    kinds = {kind.__qualname__: kind for kind in Routing.kinds()}
    _check_imported(recipe, "routing", value["routing"], list(kinds))
    return kinds[value["routing"]](**{k: each for k, each in value.items() if k != "routing"})


def _check_imported(recipe: Recipe, kind: str, name: str, known: list[str]) -> None:
    """Raise ValueError, with a remedy, unless the name in a recipe is known."""
    if name in known:
        return
    modules = recipe.modules or ("MODULE",)
    options = " ".join(f"--import {module}" for module in modules)
    raise ValueError(
        f"{unknown(kind, name, known)}. If another package adds this {kind}, import its "
        f"module first: import {', '.join(modules)}; or capsule-zoo {options}"
    )
