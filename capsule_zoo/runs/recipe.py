"""Recipes: all settings that reproduce a training run, as data.

>>> recipe = Recipe("part-whole", data="mnist", transform="rotate=20", limits={"steps": 500})
>>> recipe.differences(Recipe("part-whole", data="mnist", limits={"steps": 900}))
{'transform': ('rotate=20', None), 'limits': ({'steps': 500}, {'steps': 900})}

`config.json` of a run folder is a recipe, and so is a part of the card of trained weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import pyro.infer
from pyro.infer import ELBO

from capsule_zoo import inference
from capsule_zoo.data.transforms import Rotate, Shift
from capsule_zoo.inference import objectives
from capsule_zoo.inference.training.settings import Inputs, combine_settings
from capsule_zoo.models.checks import check_known
from capsule_zoo.records import plain
from capsule_zoo.settings import flat

LIMITS = ("epochs", "steps", "minutes")
EPOCHS = 10  # epochs of a run if neither the recipe nor the entry gives a limit
BATCH_SIZE = 128  # images of a batch if neither the recipe nor the entry gives a number
TRANSFORMS: Mapping[str, Callable[[Any], Any]] = {"rotate": Rotate, "shift": Shift}


@dataclass(frozen=True)
class Recipe:
    """The recipe of a training run.

    Attributes:
        entry: name of the entry.
        settings: settings that replace the entry's defaults.
        guide: one of the entry's guides; None for its default guide.
        modules: modules outside the zoo that are imported first.
        data: the data set's name.
        size: pixels of the images, such as "28" or "28x20"; None for the data set's own.
        transform: `rotate=DEGREES` or `shift=PIXELS`, of every training batch.
        objective: a class of `capsule_zoo.inference` or `pyro.infer`, such as "Trace_ELBO", with
            its default arguments; None for the entry's own objective.
        seed: seed of all random numbers.
        batch_size: images of a step; None for the entry's own.
        lr: learning rate, or one for model and guide each; None for the entry's own.
        limits: limits of the run in epochs, steps or minutes; empty for the entry's own.
        pair: the specifications of model and guide; empty for a new run.
        experiment: True for a run of an experiment, which only that experiment can resume.
    """

    entry: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    guide: str | None = None
    modules: tuple[str, ...] = ()
    data: str = "digits"
    size: str | None = None
    transform: str | None = None
    objective: str | None = None
    seed: int = 0
    batch_size: int | None = None
    lr: float | Mapping[str, float] | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    pair: Mapping[str, Any] = field(default_factory=dict)
    experiment: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Return the recipe in a `config.json` or a card, whose further fields are ignored.

        Raises:
            ValueError: it describes a pair that `save` wrote, which no entry makes.
        """
        if "entry" not in config:
            raise ValueError(
                "this folder holds a pair that save(model, guide, folder) wrote, which is no entry "
                "of the zoo: it can be loaded, evaluated and compared, but not trained or shown"
            )
        held = {f.name: config[f.name] for f in fields(cls) if f.name in config}
        return cls(**{**held, "modules": tuple(held.get("modules", ()))})

    def config(self) -> dict[str, Any]:
        """Return this recipe as the contents of a `config.json`."""
        optional = ("modules", "pair", "experiment")
        return {name: value for name, value in vars(self).items() if value or name not in optional}

    def differences(self, other: "Recipe") -> dict[str, tuple[Any, Any]]:
        """Return the fields and single settings in which another recipe differs.

        Returns:
            This recipe's value and the other's, by field, or by the dotted name of a setting.
        """
        mine, theirs = (
            plain({**vars(recipe), "settings": None, "pair": None, **recipe.all_settings})
            for recipe in (self, other)
        )
        pairs = {name: (mine.get(name), theirs.get(name)) for name in mine | theirs}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def all_settings(self) -> dict[str, Any]:
        """All settings of a run, or the given settings of a new recipe, by dotted name."""
        return settings_of(self.pair) if self.pair else flat(self.settings)

    def for_fit(self, training: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
        """Return the arguments of `fit`: an entry's training settings, overridden by these."""
        settings = {"batch_size": BATCH_SIZE, **training, "seed": self.seed}
        overrides = {"lr": self.lr, "batch_size": self.batch_size}
        settings |= {key: value for key, value in overrides.items() if value is not None}
        if self.limits or not any(key in settings for key in LIMITS):
            settings = {key: value for key, value in settings.items() if key not in LIMITS}
            settings |= self.limits or {"epochs": EPOCHS}
        inputs = Inputs(make_transform(self.transform), device=device)
        return combine_settings(settings, {"inputs": inputs})


def settings_of(pair: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the specifications of model and guide, by dotted name."""
    guide = {k: v for k, v in pair.get("guide", {}).items() if k != "model"}
    return flat({**pair.get("model", {}), "guide": guide})


def length_of(settings: Mapping[str, Any]) -> str:
    """Return the limits of a training as text, such as "300 steps or 2 minutes"."""
    limits = {name: settings[name] for name in LIMITS if settings.get(name)}
    return " or ".join(f"{limit:g} {name}" for name, limit in limits.items())


def make_transform(text: str | None) -> Any:
    """Make the transform named `rotate=DEGREES` or `shift=PIXELS`; None for no name.

    Raises:
        ValueError: the transform does not exist, or its number is not a number.
    """
    if text is None:
        return None
    name, _, number = text.partition("=")
    check_known("transform", name, TRANSFORMS)
    try:
        return TRANSFORMS[name](float(number))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"transform {text!r} is not of the form {name}=20: {error}") from error


def words_of(transform: Any) -> str | None:
    """Return the name from which `make_transform` makes a transform; None if it has none."""
    names = [name for name, kind in TRANSFORMS.items() if type(transform) is kind]
    return f"{names[0]}={next(iter(vars(transform).values()))}" if names else None


def make_objective(name: str) -> ELBO:
    """Make the objective of a name, with its default arguments.

    Raises:
        ValueError: there is no such objective, or it needs arguments.
    """
    places = (pyro.infer, inference, objectives)
    offered = {name: getattr(place, name) for place in places for name in place.__all__}
    candidates = {k: v for k, v in offered.items() if hasattr(v, "differentiable_loss")}
    del candidates["Objective"]  # which is abstract
    check_known("objective", name, sorted(candidates))
    try:
        return candidates[name]()
    except TypeError as error:
        raise ValueError(f"objective {name} needs arguments: {error}; train by fit") from error
