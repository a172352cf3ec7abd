"""The registry: entries are registered, created by name, saved and loaded.

An entry is data: a model with its default guide, the other guides that fit, an objective, and
suitable training settings. It is registered in `capsule_zoo/zoo/<family>/entry.py`:

    register(
        "vae",
        model=VariationalAutoencoder,
        guides={"convolutional": ConvolutionalEncoder},
        objective=TraceMeanField_ELBO,
        training=dict(lr=1e-3, batch_size=128),
    )

Its settings are the arguments of these classes, see `capsule_zoo.settings`:

>>> create("vae", latent=16, **{"guide.hidden": 128})

Every model of images takes `image_shape`, so that any data set can be tried on any of them; a model
of points does not. An entry of another package registers as well, once its module has been
imported, and so does a guide to one of the zoo's entries (`register_guide`).
"""

import fnmatch
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pyro.infer import ELBO, Trace_ELBO
from torch import nn

from capsule_zoo.data.datasets import NAME as NAME
from capsule_zoo.data.registration import (
    Settings,
    modules_outside,
    refuse_taken,
    runs_again,
    without_partials,
)
from capsule_zoo.entry import Entry as Entry
from capsule_zoo.entry import GuideMaker
from capsule_zoo.entry import draw_figure as draw_figure
from capsule_zoo.guides.base import Guide
from capsule_zoo.inference.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_known, unknown_name_message
from capsule_zoo.models.specification import build, is_submodule, spec
from capsule_zoo.pages.stories import first_line
from capsule_zoo.records import write_json
from capsule_zoo.registered import Registered as Registered
from capsule_zoo.settings import flat, nest_settings
from capsule_zoo.zoo import import_entries

WEIGHTS = Path(__file__).resolve().parent / "weights"
if not WEIGHTS.is_dir():  # a checkout keeps it next to this folder
    WEIGHTS = Path(__file__).resolve().parent.parent / "weights"


_registered: dict[str, Registered] = {}
_PRESETS: dict[str, tuple[str, str]] = {  # by the names that they had as entries before 0.3
    "broadcast-autoencoder": ("conditional-autoencoder", "broadcast"),
    "generative-capsnet-continuous": ("generative-capsnet", "continuous"),
    "overlapping-capsule-network": ("capsule-network", "overlapping"),
    "overlapping-capsules": ("recurrent-capsules", "overlapping"),
}


def register(
    name: str,
    *,
    model: Callable[..., Model],
    guides: Mapping[str, GuideMaker],
    guide: GuideMaker | None = None,
    objective: Callable[..., ELBO] = Trace_ELBO,
    **parts: Any,
) -> None:
    """Register an entry under a name.

    Args:
        name: lower case with hyphens.
        model: the class of the model, a partial of it, or a function that returns a model.
        guides: makers of the guides that fit, by name, the default guide first: a class, a partial
            of a class, or a function of the entry, which may make a variant of `entry.guide`.
        guide: the class of the default guide, if `guides` makes it by a function.
        objective: the class of the training objective, a partial of it, or a function.
        parts: `training`, settings for `fit`; `figures` and `stages`, see `Entry`; `presets`, by
            name other values of all these arguments, for `create(..., preset=NAME)`; `small`,
            settings at which it is created and runs quickly, as tests need; `data`, the data set
            that it is trained on if no other is named; `summary`, by default the first line of the
            model.

    Raises:
        ValueError: the name is taken outside of a notebook, or not of that form; or no guide.
    """
    if not re.fullmatch(NAME, name):
        raise ValueError(f"an entry's name is lower case with hyphens, such as vae, not {name!r}")
    if not isinstance(guides, Mapping) or not guides:
        raise ValueError('register an entry with guides={"name": GuideClass}')
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if modules_outside(caller):
        import_entries()  # the zoo's own entries keep their names
    holder = _registered.get(name)
    refuse_taken("an entry", name, holder and holder.module, caller)
    first = guide or next(iter(guides.values()))
    parts.setdefault("summary", first_line(without_partials(model).__doc__))
    _registered[name] = Registered(name, model, guides, first, objective, **parts, module=caller)


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
    makers = find_registration(entry).guides
    if name in makers and not runs_again(makers[name]):
        raise ValueError(f"{entry} has a guide named {name!r} already; choose another name")

    def decorate(maker: GuideMaker) -> GuideMaker:
        old = _registered[entry]
        _registered[entry] = replace(old, guides={**old.guides, name: maker})
        return maker

    return decorate


def list_models(pattern: str = "*") -> list[str]:
    """Return the sorted names of entries that match a shell pattern such as `"part*"`."""
    import_entries()
    return sorted(fnmatch.filter(_registered, pattern))


def find_registration(name: str) -> Registered:
    """Return the registration of an entry; raise ValueError for an unknown name."""
    import_entries()
    if name not in _registered:
        if name in _PRESETS:
            raise ValueError(_preset_in_words(name))
        check_known("entry", name, list_models())
    return _registered[name]


def _preset_in_words(name: str) -> str:
    """Return an error message for the old name of an entry that became a preset."""
    entry, preset = _PRESETS[name]
    return (
        f"{name!r} is a preset of {entry} since 0.3: give the entry {entry} and "
        f'preset="{preset}", on the command line --set preset={preset}'
    )


def summary(name: str) -> str:
    """Return the one-line summary of a registered entry."""
    return find_registration(name).summary


def small_settings(name: str, preset: str | None = None) -> dict:
    """Return settings that make a registered entry small and quick, for tests."""
    settings = {} if preset is None else {"preset": preset}
    return {**find_registration(name).with_preset(settings).small, **settings}


def takes_images(name: str) -> bool:
    """Return whether an entry's model takes `image_shape`; a model of points does not."""
    return "image_shape" in find_registration(name).arguments


def create(name: str, **settings: Any) -> Entry:
    """Create a new, untrained entry.

    Args:
        name: one of `list_models()`.
        settings: arguments of the model; of the guide and the objective in mappings, or by dotted
            names such as `**{"guide.reader.channels": 32}`; see `describe(name)`.

    Raises:
        ValueError: unknown name or setting (with the nearest ones), a value of another type, or one
            that a constructor refuses.
    """
    return find_registration(name).create(settings)


def pair_of(model: Model, guide: Guide) -> dict[str, Any]:
    """Return the specifications from which `load` rebuilds a model and a guide.

    Raises:
        ValueError: the guide uses the weights of another module, which would not be saved.
    """
    parts = {*model.modules(), *guide.modules()}
    hidden = {
        id(value) for group in vars(guide).values() if type(group) is tuple for value in group
    }
    for name, value in guide.arguments.items():
        is_outside = isinstance(value, nn.Module) and id(value) in hidden and value not in parts
        if is_outside and [*value.parameters()]:
            raise ValueError(
                f"{type(guide).__name__} uses the weights of its {name}, a {type(value).__name__}, "
                f"which are no part of it and would be lost; save {type(value).__name__} instead, "
                f"and make the {type(guide).__name__} again after load"
            )
    return {"model": spec(model), "guide": spec(guide, model=model)}


def save(model: Model, guide: Guide, folder: str | Path, /, **config: object) -> None:
    """Save any model and guide in a folder, from which `load` rebuilds them.

    The files are `model.safetensors`, `guide.safetensors`, and `config.json`, which holds the
    arguments of both. The models of objects in scenes are saved too, and so is a guide from which
    the guide was initialized.

    Args:
        config: further settings for `config.json`, such as the data set and the seed.

    Raises:
        ValueError: the guide was made from another model, or uses weights that are no part of it,
            or an argument of a constructor cannot be written as JSON, such as a function.
    """
    if not isinstance(guide, Guide):
        raise ValueError(
            f"guide must be a guide of the zoo, whose arguments are known, not "
            f"{type(guide).__name__}; fit_guide('free_form', ...) has normal distributions too"
        )
    if guide.model is not model:
        raise ValueError(
            "guide was made from another model, and both could not be rebuilt as a pair; make it "
            "anew from this model, or copy both at once: copy.deepcopy((model, guide))"
        )
    made: dict[str, Any] = {"pair": pair_of(model, guide)}
    if modules := modules_outside(type(model), type(guide)):
        made["modules"] = modules
    _write(model, guide, Path(folder), {**made, **config})


def save_entry(entry: Entry, folder: str | Path, /, **config: object) -> None:
    """Save an entry that `create` made in a run folder, and any other entry as `save` does.

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
    """Load a trained entry from the zoo's weights, by name, or from a run folder.

    From a folder that `save` wrote, the entry has the model and the guide, and no figures. Only
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
    entry = rebuild(read_recipe(source))
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


def rebuild(config: Mapping[str, Any]) -> Entry:
    """Build the untrained entry that a `config.json` or a card describes.

    Raises:
        CheckpointError: it describes no pair, or one of classes that are not defined; the message
            names the modules to import.
        ValueError: the entry or its guide is unknown; the message names the modules to import.
    """
    names = list_models()  # imports the zoo's entries, which define its classes
    modules = config.get("modules", ())
    if (name := config.get("entry", "")) and name not in _PRESETS:
        _check_imported(modules, "entry", name, names)
    try:
        model = build(config["pair"]["model"])
        guide = build(config["pair"]["guide"], model=model)
        for part, kind in ((model, Model), (guide, Guide)):
            if not isinstance(part, kind):
                raise TypeError(f"its {kind.__name__.lower()} is a {type(part).__name__}")
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        first = "".join(f"; import {module} first" for module in modules)
        raise CheckpointError(f"config.json describes no pair: {error}{first}") from error
    if not name:
        makers: dict[str, GuideMaker] = {"saved": lambda entry: copy_of(entry.guide)}
        return Entry(model, makers, Trace_ELBO(), guide=guide)
    settings = config.get("settings", {})
    made = find_registration(name).with_preset(settings)
    entry = made.entry_of(model, nest_settings(settings, made.arguments, name), guide)
    entry.default_guide = config.get("guide", entry.default_guide)
    _check_imported(modules, "guide", entry.default_guide, list(entry.guides))
    return entry


def copy_of(guide: Guide) -> Guide:
    """Copy a guide with its weights; the copy is a guide to the original model."""
    return deepcopy(guide, {id(guide.model): guide.model})


def _tensors_of(card: Path) -> Path:
    """Return the path of a card's file of tensors; the wheel leaves out large files."""
    tensors = card.with_suffix(".safetensors")
    if not tensors.is_file():
        raise CheckpointError(
            f"the installed package has the card of {card.stem} but not its tensors, which are too "
            f"large for a wheel: install from a checkout (pip install -e .), or copy its file "
            f"weights/{tensors.name} into {card.parent}"
        )
    return tensors


def read_recipe(source: str | Path) -> dict:
    """Read the `config.json` or the card of a trained entry.

    Raises:
        ValueError: neither a run folder nor the name of trained weights.
        CheckpointError: the file is damaged.
    """
    path = _recipe_path(source)
    try:
        config = json.loads(path.read_text())
        kinds = {"pair": dict, "settings": dict, "modules": list, "entry": str, "guide": str}
        if (
            isinstance(config, dict)
            and "pair" in config
            and all(isinstance(config.get(key, kind()), kind) for key, kind in kinds.items())
        ):
            return config
        reason = "it does not hold the pair of model and guide; write it with save()"
        if isinstance(config, dict) and "sizes" in config:
            reason = "a version before 0.3 wrote it, which read sizes; train it again"
    except (ValueError, AttributeError) as error:
        reason = str(error)
    raise CheckpointError(f"{path} does not describe an entry of the zoo: {reason}")


def recipe_path(source: str | Path) -> Path | None:
    """Return the path of a trained entry's `config.json` or card; None for no such entry."""
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


def unknown_source(kind: str, source: str | Path, names: Collection[str]) -> str:
    """Return an error message for a source that is neither a known name nor a run folder.

    A path is taken for a folder; the message names the nearest runs next to it or inside it.
    """
    folder = Path(source)
    if str(source) in _PRESETS:
        return _preset_in_words(str(source))
    if len(folder.parts) < 2 and not folder.is_dir():
        return f"{unknown_name_message(kind, str(source), names)}; or give the folder of a run"
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
    """Write a card `<name>.json` and tensors `<name>.safetensors`, for `load(name)`."""
    states = {"model": entry.model.state_dict(), "guide": entry.guide.state_dict()}
    save_checkpoint(card.with_suffix(".safetensors"), states)
    write_json(card, {**made_by(entry), **content})


def made_by(entry: Entry) -> dict:
    """Return the fields of `config.json` that describe an entry: name, settings, guide, pair.

    `modules` names the modules outside the zoo that have to be imported first, if any.

    Raises:
        ValueError: the guide was made by another name than the entry's `default_guide`.
    """
    if (name := entry.guide_name) != entry.default_guide:
        raise ValueError(
            f"entry.guide was made as {name!r}, but default_guide, which load makes, is "
            f"{entry.default_guide!r}; call entry.use_guide({name!r}) before training, or set "
            f"entry.default_guide = {name!r}"
        )
    made = {
        "entry": entry.name,
        "settings": spec(entry.settings),
        "guide": entry.default_guide,
        "pair": pair_of(entry.model, entry.guide),
    }
    registration = find_registration(entry.name).with_preset(entry.settings)
    makers = registration.model, registration.module, entry.guides[entry.default_guide]
    parts = [type(part) for part in (entry.model, entry.guide)]
    values = flat(entry.settings).values()
    made_from = [v for v in values if is_submodule(v)]
    settings = [type(v) for v in values if isinstance(v, Settings)]
    modules = modules_outside(*makers, *parts, *made_from, *settings)
    return {**made, "modules": modules} if modules else made


def _check_imported(modules: Collection[str], kind: str, name: str, names: list[str]) -> None:
    """Raise ValueError, with a remedy, unless a name in a configuration is known."""
    if name in names:
        return
    modules = modules or ("MODULE",)
    options = " ".join(f"--import {module}" for module in modules)
    raise ValueError(
        f"{unknown_name_message(kind, name, names)}. If another package adds this {kind}, import "
        f"its module first: import {', '.join(modules)}; or capsule-zoo {options}"
    )
