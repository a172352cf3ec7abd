"""The contents of the report: every model with its story, records, pictures and benchmarks.

A family is a module that holds a model, with the entries made from it. Experiments and trained
weights are assigned to families by name. Only the choices of the first things to show are listed by
hand: `LEADS`, `COMPARISONS` and `BENCHMARKED`.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from capsule_zoo.experiments import find_experiment, list_experiments
from capsule_zoo.records import figures_of, read_record
from capsule_zoo.registry import WEIGHTS, create, list_models, read_recipe, small_sizes, summary
from capsule_zoo.report.pictures import Picture, picture
from capsule_zoo.report.published import PUBLISHED, Published
from capsule_zoo.report.stories import Story, first_line, read_story, remainder
from capsule_zoo.report.tables import Grid, as_grids, in_words

BENCHMARKS = "benchmarks"  # folder of speeds, among records and among scripts

# Pictures that open a model's section, the best first.
LEADS = {
    "part-whole": ("classify_parses", "digits_parses"),
    "capsule-rbm": ("mnist_sums", "mnist_samples", "learning-curve"),
    "capsule-helmholtz": ("mnist_sums", "mnist_samples"),
    "generative-capsnet": ("rotate-beyond_painted", "shift_painted", "rotate_painted"),
    "matrix-capsules": ("viewpoints", "votes", "mnist"),
    "recurrent-capsules": ("steps", "mnist_strokes"),
    "constellations": ("parse_025", "parse_01"),
}
# The experiment that compares a model's guides, routings or decoders.
COMPARISONS = {
    "part-whole": "guides",
    "capsule-rbm": "mean-field",
    "capsule-helmholtz": "objectives",
    "generative-capsnet": "rotate-beyond",
    "matrix-capsules": "routing",
    "recurrent-capsules": "ablations",
    "constellations": "parse",
}
# The model of a benchmark whose name does not begin with the name of the model.
BENCHMARKED = {"render": "part-whole", "rbm": "capsule-rbm", "routing": "matrix-capsules"}


@dataclass(frozen=True)
class Finding:
    """An experiment and its results.

    Attributes:
        name: `<model>/<name>`.
        summary, about: description in a line and in paragraphs.
        command: the command that runs it, or ran it.
        record: its record; None until it has been run.
        figures: the figures of the record.
    """

    name: str
    summary: str
    about: list[str]
    command: str
    record: dict | None
    figures: list[Picture] = field(default_factory=list)

    @property
    def grids(self) -> tuple[list[Grid], list[str]]:
        """Return the metrics as tables, and the names of metrics in no table."""
        return as_grids(list(self.record["metrics"])) if self.record else ([], [])


@dataclass(frozen=True)
class Goal:
    """A published number next to our number."""

    published: Published
    command: str
    metric: dict | None

    @property
    def verdict(self) -> str:
        """ "reached", "near" (within two standard errors), "missed" or "" (not measured)."""
        if self.metric is None:
            return ""
        gain = self.metric["value"] - self.published.value
        gain = gain if self.published.higher else -gain
        if gain >= 0:
            return "reached"
        return "near" if -gain <= 2 * (self.metric["se"] or 0) else "missed"


class Race(Finding):
    """A benchmark that compares our time and memory with those of peers."""

    @property
    def peers(self) -> list[str]:
        """The names of the peers that it is compared with."""
        metrics = self.record["metrics"] if self.record else {}
        return [name.removeprefix("ratio_") for name in metrics if name.startswith("ratio_")]

    @property
    def ours(self) -> str:
        """The name of our contestant; memory is measured only for it and its peers."""
        metrics = self.record["metrics"] if self.record else {}
        weighed = [n.removeprefix("mebibytes_") for n in metrics if n.startswith("mebibytes_")]
        return next((name for name in weighed if name not in self.peers), "")


@dataclass(frozen=True)
class Inhabitant:
    """An entry: its name, its summary, and its guides as (name, class, summary)."""

    name: str
    words: str
    guides: list[tuple[str, str, str]]
    default_guide: str


@dataclass(frozen=True)
class Trained:
    """The trained weights of an entry: name, card, and size in bytes."""

    name: str
    card: dict
    size: int


@dataclass
class Family:
    """The section of one model."""

    story: Story
    entries: list[Inhabitant]
    lead: Picture | None = None
    comparison: Finding | None = None
    findings: list[Finding] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
    weights: list[Trained] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return self.entries[0].name

    @property
    def all_findings(self) -> list[Finding]:
        return [*([self.comparison] if self.comparison else []), *self.findings]

    @property
    def measured(self) -> int:
        """The number of its experiments that have a record."""
        return sum(finding.record is not None for finding in self.all_findings)

    @property
    def faster(self) -> tuple[int, int]:
        """The number of peers slower than our code, and the number of all peers."""
        ratios = [
            race.record["metrics"][f"ratio_{peer}"]["value"]
            for race in self.races
            if race.record
            for peer in race.peers
        ]
        return sum(ratio > 1 for ratio in ratios), len(ratios)

    @property
    def is_baseline(self) -> bool:
        return not self.all_findings


@dataclass(frozen=True)
class Gallery:
    """All contents of the report.

    Attributes:
        families: models with experiments, those with most records first.
        baselines: models without experiments of their own.
        others: records and benchmarks that belong to no known model.
    """

    families: list[Family]
    baselines: list[Family]
    others: list[Finding]
    other_races: list[Race]


def gather(folder: Path) -> Gallery:
    """Collect everything from the registry, the cards and the records in `folder`.

    Raises:
        ValueError: the folder has no records, or a file that is not a record.
    """
    records = read_records(folder)
    findings, races = findings_of(records, folder), races_of(records, folder.parent / BENCHMARKS)
    families = [fill(family, findings, races, records, folder) for family in find_families()]
    own = {id(f) for family in families for f in family.all_findings}
    raced = {id(r) for family in families for r in family.races}
    return Gallery(
        sorted((f for f in families if not f.is_baseline), key=lambda f: (-f.measured, f.anchor)),
        [family for family in families if family.is_baseline],
        [finding for finding in findings.values() if id(finding) not in own],
        [race for race in races if id(race) not in raced],
    )


def read_records(folder: Path) -> dict[str, dict]:
    """Return every record below a folder, by name."""
    names = sorted(path.relative_to(folder).with_suffix("") for path in folder.glob("*/*.json"))
    if not names:
        raise ValueError(
            f"there are no records in {folder}; they lie in a checkout, under results/: call this "
            "there, name their folder by --results, or make one: capsule-zoo reproduce"
        )
    return {name.as_posix(): read_record(name.as_posix(), folder) for name in names}


def find_families() -> list[Family]:
    """Return one family for each module that holds the model of an entry."""
    members: dict[str, list[Inhabitant]] = {}
    with torch.random.fork_rng(devices=[]):
        for name in list_models():
            entry = create(name, **small_sizes(name))
            kinds = {guide: type(entry.make_guide(guide)) for guide in entry.guides}
            guides = [(g, kind.__name__, first_line(kind.__doc__)) for g, kind in kinds.items()]
            inhabitant = Inhabitant(name, summary(name), guides, entry.default_guide)
            members.setdefault(type(entry.model).__module__, []).append(inhabitant)
    return [
        Family(read_story(sys.modules[module].__doc__), in_order(entries, module))
        for module, entries in members.items()
    ]


def in_order(entries: list[Inhabitant], module: str) -> list[Inhabitant]:
    """Return the entries, with the one that the module is named after first."""
    own = module.rpartition(".")[2].replace("_", "-")
    return sorted(entries, key=lambda entry: (entry.name != own, entry.name))


def fill(
    family: Family,
    findings: Mapping[str, Finding],
    races: list[Race],
    records: Mapping[str, dict],
    folder: Path,
) -> Family:
    """Return a family with all its contents filled in."""
    names = {entry.name for entry in family.entries}
    own = {n: finding for n, finding in findings.items() if n.partition("/")[0] in names}
    family.comparison = own.pop(f"{family.anchor}/{COMPARISONS.get(family.anchor)}", None)
    family.findings = sorted(own.values(), key=lambda finding: finding.record is None)
    family.races = [race for race in races if race_of(race) in names]
    family.weights = [trained for trained in trained_weights() if trained.card["entry"] in names]
    for published in PUBLISHED:
        if published.experiment in {finding.name for finding in family.all_findings}:
            record = records.get(published.experiment)
            metric = record["metrics"].get(published.metric) if record else None
            command = findings[published.experiment].command
            family.goals.append(Goal(published, command, metric))
    family.lead = lead_of(family, folder)
    drop_repeated(family)
    return family


def lead_of(family: Family, folder: Path) -> Picture | None:
    """Return the first picture of the section: one of `LEADS`, or any available one."""
    for name in LEADS.get(family.anchor, ()):
        path, (stem, *_) = folder / family.anchor / f"{name}.png", name.split("_")
        if path.is_file():
            return picture(path, caption(path, f"{family.anchor}/{stem}"))
    return next((p for finding in family.all_findings for p in finding.figures), None)


def drop_repeated(family: Family) -> None:
    """Remove repeated pictures of a section, so that each is shown once."""
    seen = {digest(family.lead)} if family.lead else set()
    for finding in family.all_findings:
        for figure in list(finding.figures):
            if digest(figure) in seen:
                finding.figures.remove(figure)
            seen.add(digest(figure))


def digest(shown: Picture) -> str:
    """Return a digest that is equal for pictures that look the same."""
    return hashlib.sha256(shown.uri.encode()).hexdigest()


def findings_of(records: Mapping[str, dict], folder: Path) -> dict[str, Finding]:
    """Return every experiment that is registered or has a record."""
    registered = list_experiments()
    found = {}
    for name in sorted({*registered, *records}):
        if is_speed(name):
            continue
        summary, about = "", []
        if name in registered:
            experiment = find_experiment(name)
            summary, about = experiment.summary, remainder(experiment.function.__doc__)
        record = records.get(name)
        command = record["command"] if record else f"capsule-zoo reproduce {name}"
        paths = figures_of(name, folder) if record else []
        figures = [picture(path, caption(path, name)) for path in paths]
        found[name] = Finding(name, summary, about, command, record, figures)
    return found


def caption(path: Path, name: str) -> str:
    """Return the caption of a figure of an experiment."""
    which = path.stem.removeprefix(name.partition("/")[2]).strip("_")
    return f"{name}: {in_words(which)}" if which else name


def races_of(records: Mapping[str, dict], scripts: Path) -> list[Race]:
    """Return every benchmark that has a record or, in a checkout, a script."""
    known = dict(benchmark_scripts(scripts))
    found = []
    for name in sorted({*known, *(name for name in records if is_speed(name))}):
        record, (script, summary) = records.get(name), known.get(name, ("", ""))
        command = record["command"] if record else f"python {BENCHMARKS}/{script}"
        found.append(Race(name, summary, [], command, record))
    return found


def is_speed(name: str) -> bool:
    """Return True if a record belongs to a benchmark."""
    return name.startswith(f"{BENCHMARKS}/")


def benchmark_scripts(folder: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the record name, file name and first line of every benchmark in a folder."""
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()
        for name in re.findall(r'\bBenchmark\(\s*"(\w+)"', text):
            yield (
                f"{BENCHMARKS}/{name}",
                (path.name, first_line(ast.get_docstring(ast.parse(text)))),
            )


def race_of(race: Race) -> str:
    """Return the name of the entry that a benchmark is about."""
    name = race.name.partition("/")[2]
    named = [entry for entry in list_models() if name.startswith(entry.replace("-", "_"))]
    return BENCHMARKED.get(name) or max(named, key=len, default="")


def trained_weights() -> list[Trained]:
    """Return every card among the zoo's weights, with the size of its weights."""
    found = []
    for path in sorted(WEIGHTS.glob("*.json")):
        weights = path.with_suffix(".safetensors")
        size = weights.stat().st_size if weights.is_file() else 0
        found.append(Trained(path.stem, read_recipe(path.stem), size))
    return found
