"""A registered entry: the classes of its model, guides and objective, and its presets."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from pyro.infer import ELBO

from capsule_zoo.data.registration import without_partials
from capsule_zoo.entry import Entry, GuideMaker
from capsule_zoo.guides.base import Guide
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_at_least, check_known
from capsule_zoo.settings import PARTS, Argument, arguments_of, name_of, nest_settings, values_of


@dataclass(frozen=True)
class Registered:
    """The arguments of one call of `register`, with the module of the call.

    `guides` also holds the guides of `register_guide`.
    """

    name: str
    model: Callable[..., Model]
    guides: Mapping[str, GuideMaker]
    guide: GuideMaker
    objective: Callable[..., ELBO]
    training: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    stages: Callable[[Entry], Sequence[Any]] | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    data: str = "digits"
    summary: str = ""
    module: str = ""

    @cached_property
    def arguments(self) -> dict[str, Argument]:
        """The settings of the model, the guides and the objective, by name."""
        others = {name: arguments_of(maker, 1) for name, maker in list(self.guides.items())[1:]}
        guides = {
            name: Argument(name, {}, Mapping[str, Any], "settings of this guide", model_arguments)
            for name, model_arguments in others.items()
            if model_arguments
        }
        objective = arguments_of(
            self.objective, inspect.isfunction(without_partials(self.objective))
        )
        described = {name: argument for name, argument in objective.items() if argument.description}
        model_arguments = arguments_of(self.model)
        if self.presets:
            names = " or ".join(f'"{name}"' for name in self.presets)
            text = f"{names}; None for the settings below"
            model_arguments = {
                "preset": Argument("preset", None, str | None, text)
            } | model_arguments
        return model_arguments | {
            name: Argument(name, {}, Mapping[str, Any], text, inner)
            for name, text, inner in (
                ("guide", "settings of the guide", arguments_of(self.guide, 1)),
                ("guides", "settings of other guides", guides),
                ("objective", "settings of the objective", described),
            )
            if inner
        }

    def with_preset(self, settings: Mapping[str, Any]) -> "Registered":
        """Return this registration with the preset `settings["preset"]` applied, if one is given.

        Raises:
            ValueError: there is no such preset.
        """
        name = settings.get("preset")
        if name is None:
            return self
        if not isinstance(name, str):
            raise ValueError(f"preset of an entry must be a word or None, not {name!r}")
        check_known("preset", name, self.presets)
        fields = dict(self.presets[name])
        if "guides" in fields:
            fields.setdefault("guide", next(iter(fields["guides"].values())))
        return replace(self, **fields)

    def create(self, settings: Mapping[str, Any]) -> Entry:
        """Return a new, untrained entry; see `capsule_zoo.registry.create`."""
        made = self.with_preset(settings)
        asked = nest_settings(settings, made.arguments, self.name)
        values = values_of(asked, made.arguments, self.name)
        check_at_least(1, image_shape=values.get("image_shape", 1))
        for part in ("preset", *PARTS):
            values.pop(part, None)
        try:
            model = made.model(**values)
        except TypeError as error:
            reason = str(error).partition("\n")[0]  # torch goes on with its own stack
            raise ValueError(f"{self.name} does not take these settings: {reason}") from error
        return made.entry_of(model, asked)

    def entry_of(self, model: Model, asked: Mapping[str, Any], guide: Guide | None = None) -> Entry:
        """Return the entry of a model, with a new default guide unless `guide` is given.

        Args:
            asked: the settings that the user gave, by their first names; see `nest_settings`.

        Raises:
            ValueError: settings of a guide or the objective are no mapping, or do not fit.
        """
        for part in PARTS:
            if not isinstance(value := asked.get(part, {}), Mapping):
                raise ValueError(f"{part} of {self.name} must be a mapping, not {value!r}")
        settings = {part: dict(asked.get(part, {})) for part in PARTS}
        first, by_name = next(iter(self.guides)), {}
        if settings["guides"]:
            inner = self.arguments["guides"].inner
            by_name = nest_settings(settings["guides"], inner, f"{self.name}'s guides")
        if self.guides[first] is self.guide:
            by_name[first] = settings["guide"]
        guides = {n: self._bound(maker, by_name.get(n)) for n, maker in self.guides.items()}
        if guide is None and not inspect.isfunction(without_partials(self.guide)):
            guide = self._bound(self.guide, settings["guide"])(model)
        of_model = inspect.isfunction(without_partials(self.objective))
        objective = self._bound(self.objective, settings["objective"], leading=of_model)
        return Entry(
            model,
            guides,
            objective(model) if of_model else objective(),
            dict(self.training),
            self.figures,
            self.stages,
            name=self.name,
            settings=dict(asked),
            guide=guide,
        )

    def _bound(self, maker: Any, settings: Mapping[str, Any] | None, leading: int = 1) -> Any:
        """Return the maker of a guide or an objective, with settings bound to it."""
        if not settings:
            return maker
        schema = arguments_of(maker, leading)
        return partial(maker, **values_of(settings, schema, f"{self.name}'s {name_of(maker)}"))
