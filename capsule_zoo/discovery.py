"""Descriptions of the zoo's contents: trained weights and the components of an entry.

>>> list_weights()                       # name -> Weights: entry, data, headline, bytes
>>> describe("part-whole")               # settings, guides, sites, objective, weights, ...
>>> describe("part-whole-mnist").parameters
"""

import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from capsule_zoo import registry
from capsule_zoo.data.registration import without_partials
from capsule_zoo.inference import is_bound
from capsule_zoo.inference.evaluation.prepare import relaxed_sites
from capsule_zoo.inference.training.settings import Group
from capsule_zoo.models import Site
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.pages.markdown import duration, with_error
from capsule_zoo.pages.stories import first_line, read_story, remainder
from capsule_zoo.records import metric_title, plain
from capsule_zoo.registry import Entry, create, list_models, pair_of, read_recipe
from capsule_zoo.runs.recipe import settings_of
from capsule_zoo.settings import Argument, as_tuple, flat, flat_arguments, nest_settings


@dataclass(frozen=True)
class Weights:
    """The description of trained weights, which `load(name)` opens.

    Attributes:
        name: the name that `load` takes.
        entry: the entry that was trained.
        data: the data set that it was trained on.
        guide: the guide that it was trained with.
        headline: the number that identifies the weights: `on`, `metric`, `value`, `se` and `n`.
        bytes: number of bytes of the file.
        preset: the preset of the entry; None for its own defaults.
    """

    name: str
    entry: str
    data: str
    guide: str
    headline: dict[str, Any]
    bytes: int
    preset: str | None = None

    @property
    def card(self) -> dict[str, Any]:
        """The contents of the weights' card: model and guide, training, checks and records."""
        return read_recipe(self.name)

    def __str__(self) -> str:
        metric: Any = self.headline
        preset = f" ({self.preset})" if self.preset else ""
        return (
            f"{self.entry}{preset}, {self.guide} guide, trained on {self.data}: "
            f"{metric_title(metric['metric'])} {with_error(metric)} on {metric['on']}; "
            f"{self.bytes / 1e6:.1f} MB"
        )


@dataclass(frozen=True)
class GuideDescription:
    """The description of a fitting guide: its name, class, summary, and whether it is used."""

    name: str
    kind: str
    description: str
    default: bool


@dataclass(frozen=True)
class Description:
    """The components of an entry, as `capsule-zoo show` and the documentation site display them.

    Printed, a description is Markdown; `as_dict` returns it in plain types.

    Attributes:
        name: name of the entry.
        source: the described object: the entry, trained weights or a run folder.
        summary: a one-line summary of the entry.
        text: the text of its model's docstring after the first line.
        data: the data set that it is trained on, if no other is named.
        settings: the arguments of `create`, by dotted name, with their values.
        presets: the presets of the entry, by name, with their summaries.
        guides: the guides that fit.
        sites: the latent sites of the model at these settings.
        relaxed: the discrete sites that are continuous in training.
        objective: the training objective of the entry.
        training: further settings for `fit`.
        figures: names of the pictures that `capsule-zoo figure` draws.
        parameters: number of learned parameters, in the `model` and in the `guide`.
        weights: trained weights of the entry.
        home: the module of the model, which tells its story.
        references: publications of the model.
        card: how described weights were made, checked and measured; empty for what has no card.
    """

    name: str
    source: str
    summary: str
    text: str
    data: str
    settings: dict[str, Argument]
    presets: dict[str, str]
    guides: tuple[GuideDescription, ...]
    sites: tuple[Site, ...]
    relaxed: tuple[str, ...]
    objective: str
    training: dict[str, Any]
    figures: tuple[str, ...]
    parameters: dict[str, int]
    weights: tuple[Weights, ...]
    home: str
    references: str
    card: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the description in JSON-compatible types."""
        settings = {
            name: {"value": argument.default, "type": argument.type, "what": argument.description}
            for name, argument in self.settings.items()
        }
        return plain({**vars(self), "settings": settings})

    def __str__(self) -> str:
        return f"{self.overview()}\n\n{self.settings_list}"

    __repr__ = __str__

    @property
    def settings_list(self) -> str:
        """A Markdown list of the settings with types, values and meanings."""
        lines = (
            f"- `{name}: {argument.type} = {argument.default!r}`: {argument.description}"
            for name, argument in self.settings.items()
        )
        return "\n".join(["Settings, as `create(...)` or `--set` takes them:\n", *lines])

    @property
    def settings_names(self) -> str:
        """The names of the settings with their values, without their meanings."""
        values = (f"{name}={argument.default!r}" for name, argument in self.settings.items())
        return f"Settings, with their values: {', '.join(values)}"

    def overview(self, published: str = "") -> str:
        """Return the whole description except the settings, as Markdown.

        Args:
            published: text on published numbers, which follows the trained weights.
        """
        source = "" if self.source == self.name else f" ({self.source})"
        counts = [f"{number:,} in the {part}" for part, number in self.parameters.items()]
        kind, _, never = self.objective.partition(" ")
        settings = ", ".join(f"{name}={value}" for name, value in self.training.items())
        lists: dict[str, Iterable[str]] = {
            "Presets": (
                f"- `preset={name!r}`{summary and f': {summary}'}"
                for name, summary in self.presets.items()
            ),
            "Guides": (
                f"- `{g.name}`{' (default)' * g.default}, `{g.kind}`: {g.description}"
                for g in self.guides
            ),
            "Latent sites": (
                f"- `{s.name}`, {' x '.join(s.plates)}: {_kind(s, self.relaxed)}"
                for s in self.sites
            ),
            "Training": [
                f"- data: `{self.data}`{' by default' * (not self.card)}",
                f"- objective: `{kind}` {never}".rstrip(),
                f"- settings: {f'`{settings}`' if settings else 'the defaults of `fit`'}",
                f"- learned numbers: {', '.join(counts)}",
            ],
            "Figures": [f"- {', '.join(f'`{n}`' for n in self.figures)}"] * bool(self.figures),
            "Trained weights": [f"- `load({w.name!r})`: {w}" for w in self.weights] or ["- none"],
            "Published numbers": [published] * bool(published),
        }
        parts = [f"{self.name}{source}: {self.summary}", *filter(None, [self.text])]
        for title, lines in lists.items():
            if body := "\n".join(lines):
                parts.append(f"{title}:\n\n{body}")
        parts.append(f"References: {self.references}")
        if self.card:
            parts.append(f"### how {self.source} was made\n\n{history(self.card)}")
        return "\n\n".join(parts)


def list_weights(pattern: str = "*") -> dict[str, Weights]:
    """Return the zoo's trained weights that match a shell pattern, by name and sorted."""
    weights: dict[str, Weights] = {}
    for name in registry.trained_names():
        file = registry.WEIGHTS / f"{name}.safetensors"
        if fnmatch(name, pattern) and file.is_file():
            card = {"data": "unknown data", **read_recipe(name)}
            fields = {field: card[field] for field in ("entry", "data", "guide", "headline")}
            fields["preset"] = card.get("settings", {}).get("preset")
            weights[name] = Weights(name, bytes=file.stat().st_size, **fields)
    return weights


def describe(entry: str | Path | Entry) -> Description:
    """Describe an entry: its settings, guides, latent sites, weights and references.

    Args:
        entry: the name of an entry, the name of trained weights, the folder of a run, or an entry
            that `create` or `load` has made.

    Raises:
        ValueError: an unknown name; the message has the nearest ones.
    """
    if isinstance(entry, Entry):
        return _describe(entry, entry.name)
    source = str(entry)
    if source in list_models():
        with use_seed(0):
            return _describe(create(source), source)
    if not registry.recipe_path(source):
        names = sorted({*list_models(), *list_weights()})
        raise ValueError(registry.unknown_source("entry or trained entry", source, names))
    made = read_recipe(source)
    card = made if "headline" in made else {}
    with use_seed(0):
        if "entry" not in made:
            raise ValueError(
                f"{source} holds a pair that save() wrote, which is no entry of the zoo"
            )
        description = _describe(registry.rebuild(made), source)
        return replace(description, card=card, data=made.get("data", description.data))


def _describe(entry: Entry, source: str) -> Description:
    registration = registry.find_registration(entry.name).with_preset(entry.settings)
    asked = nest_settings(entry.settings, registration.arguments, entry.name)
    arguments = flat_arguments(registration.arguments)
    whole = {name: value for name, value in asked.items() if name in arguments}  # mappings too
    values = {**flat(asked), **settings_of(pair_of(entry.model, entry.guide)), **whole}
    values = {name: as_tuple(value) for name, value in values.items()}
    settings = {
        name: replace(argument, default=values.get(name, argument.default))
        for name, argument in arguments.items()
    }
    never = "" if is_bound(entry.objective) else " (never a bound)"
    home = type(entry.model).__module__
    return Description(
        name=entry.name,
        source=source,
        summary=registration.summary,
        text=remainder(type(entry.model).__doc__),
        data=registration.data,
        settings=settings,
        presets={n: p.get("summary", "") for n, p in registration.presets.items()},
        guides=tuple(describe_guides(entry)),
        sites=entry.model.sites,
        relaxed=relaxed_sites(entry.model),
        objective=type(entry.objective).__name__ + never,
        training={name: _setting(value) for name, value in entry.training.items()},
        figures=tuple(entry.figures),
        parameters={"model": entry.model.num_parameters, "guide": entry.guide.num_parameters},
        weights=tuple(w for w in list_weights().values() if w.entry == entry.name),
        home=home,
        references=read_story(sys.modules[home].__doc__).references,
    )


def describe_guides(entry: Entry) -> Iterator[GuideDescription]:
    """Yield a description of every guide of an entry."""
    for name, maker in entry.guides.items():
        with use_seed(0):
            kind = type(entry.make_guide(name))
        text = first_line(without_partials(maker).__doc__) or first_line(kind.__doc__)
        yield GuideDescription(name, kind.__name__, text, name == entry.default_guide)


def _setting(value: object) -> object:
    """Return a setting in printable form: optimizers and groups by name and arguments."""
    if isinstance(value, Group):
        return repr(value)
    if isinstance(value, partial):
        arguments = ", ".join(f"{name}={argument!r}" for name, argument in value.keywords.items())
        return f"{value.func.__name__}({arguments})"
    return value.__name__ if inspect.isclass(value) or inspect.isfunction(value) else value


def history(card: dict[str, Any]) -> str:
    """Return how weights were trained, checked and measured, as lines of code in Markdown."""
    made, split = card["training"], card.get("split", {})
    steps = f"{made['steps']:,} steps, " if "steps" in made else ""
    rows = {
        "command": [made["command"]],
        "took": [f"{steps}{duration(made['seconds'])}, {made['machine']}"],
        "seed": [str(card["seed"])],
        "settings": [", ".join(f"{k}={v}" for k, v in settings_of(card["pair"]).items())],
        "images": [", ".join(f"{number:,} {part}" for part, number in split.items())],
        "versions": [", ".join(f"{name} {number}" for name, number in made["versions"].items())],
        "checks": card["checks"],
        "records": [record["command"] for record in card["records"].values()],
    }
    lines = (
        (title * (n == 0), line)
        for title, entries in rows.items()
        for n, line in enumerate(entries)
    )
    return "\n".join(f"    {title:10}{line}" for title, line in lines)


def _kind(site: Site, relaxed: tuple[str, ...]) -> str:
    terms = ["discrete" if site.discrete else "continuous"]
    if site.name in relaxed:
        terms = ["discrete, relaxed in training"]
    terms += [f"event rank {site.event_dim}"] * (site.event_dim > 0)
    return ", ".join([*terms, *["summed out by the model"] * site.enumerated])
