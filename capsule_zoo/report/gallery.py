"""The contents of the report: every model with its story, records, pictures and benchmarks.

A family is a module that holds a model, with the entries made from it. Experiments, benchmarks and
trained weights say which entry they are about. The registration of an experiment also says whether
it opens the section of its model.
"""

import base64
import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from PIL import Image

from capsule_zoo.discovery import Description, Weights, describe, list_weights
from capsule_zoo.experiments import Experiment, find_experiment, list_experiments
from capsule_zoo.records import figures_of, read_record
from capsule_zoo.registry import create, list_models, small_sizes
from capsule_zoo.report.markdown import Grid, grids_of, in_words
from capsule_zoo.report.published import RESULTS, TABLE, Goal, goals_of
from capsule_zoo.report.stories import Story, read_story, remainder

BENCHMARKS = "benchmarks"  # the folder of speeds, among records


@dataclass(frozen=True)
class Finding:
    """An experiment and its results.

    Attributes:
        name: `<model>/<name>`.
        summary: description in a line.
        command: the command that runs it, or ran it.
        record: its record; None until it has been run.
        about: name of the entry whose family it belongs to.
        text: description in paragraphs.
        figures: the figures of the record.
        lead: the figure that opens the model's section, if it is one of this experiment's.
        is_comparison: True if it compares the model's guides, routings or decoders.
    """

    name: str
    summary: str
    command: str
    record: dict | None
    about: str
    text: list[str] = field(default_factory=list)
    figures: "list[Picture]" = field(default_factory=list)
    lead: "Picture | None" = None
    is_comparison: bool = False

    @property
    def grids(self) -> tuple[list[Grid], list[str]]:
        """Return the metrics as tables, and the names of metrics in no table."""
        return grids_of(self.record) if self.record else ([], [])


class Race(Finding):
    """A benchmark that compares our time and memory with those of peers."""

    def metric(self, quantity: str, contestant: str) -> dict | None:
        """Return a measurement of a contestant, or None if it was not taken."""
        name = self._named(quantity).get(contestant)
        return self.record["metrics"][name] if self.record and name else None

    def key(self, quantity: str, contestant: str) -> str:
        """Return the record and the name of a measurement."""
        return f"{self.name}:{self._named(quantity).get(contestant, '')}"

    @property
    def peers(self) -> list[str]:
        """The names of the peers that it is compared with."""
        return list(self._named("ratio"))

    @property
    def ours(self) -> str:
        """The name of our contestant; memory is measured only for it and its peers."""
        return next((name for name in self._named("mebibytes") if name not in self.peers), "")

    def _named(self, quantity: str) -> dict[str, str]:
        """Return the names of a quantity's metrics by contestant."""
        return self.record["tables"].get("", {}).get(quantity, {}) if self.record else {}


@dataclass
class Family:
    """The section of one model."""

    story: Story
    entries: list[Description]
    lead: "Picture | None" = None
    comparison: Finding | None = None
    findings: list[Finding] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """The name of the first entry, to which links lead."""
        return self.entries[0].name

    @property
    def all_findings(self) -> list[Finding]:
        """The experiments of the family, the comparison first."""
        return [*([self.comparison] if self.comparison else []), *self.findings]

    @property
    def measured(self) -> int:
        """The number of its experiments that have a record."""
        return sum(finding.record is not None for finding in self.all_findings)

    @property
    def faster(self) -> tuple[int, int]:
        """The number of peers slower than our code, and the number of all peers."""
        ratios = [race.metric("ratio", peer) for race in self.races for peer in race.peers]
        return sum(ratio["value"] > 1 for ratio in ratios if ratio), len(ratios)

    def goals_in(self, *states: str) -> int:
        """Return the number of published numbers in these states."""
        return sum(goal.state in states for goal in self.goals)

    @property
    def is_baseline(self) -> bool:
        """True if the family has no experiments of its own."""
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
    findings = findings_of(records, folder)
    races = [
        Race(name, record.get("summary", ""), record["command"], record, record.get("about", ""))
        for name, record in sorted(records.items())
        if is_speed(name)
    ]
    goals = goals_of(records) if (RESULTS / TABLE).is_file() else []  # a wheel has no table
    families = [fill(family, findings, races, goals) for family in find_families()]
    entries = {entry.name for family in families for entry in family.entries}
    return Gallery(
        sorted((f for f in families if not f.is_baseline), key=lambda f: (-f.measured, f.anchor)),
        [family for family in families if family.is_baseline],
        [finding for finding in findings.values() if finding.about not in entries],
        [race for race in races if race.about not in entries],
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
    members: dict[str, list[Description]] = {}
    with torch.random.fork_rng(devices=[]):
        for name in list_models():
            entry = create(name, **small_sizes(name))
            members.setdefault(type(entry.model).__module__, []).append(describe(entry))
    return [
        Family(read_story(sys.modules[module].__doc__), in_order(entries, module))
        for module, entries in members.items()
    ]


def in_order(entries: list[Description], module: str) -> list[Description]:
    """Return the entries, with the one that the module is named after first."""
    own = module.rpartition(".")[2].replace("_", "-")
    return sorted(entries, key=lambda entry: (entry.name != own, entry.name))


def fill(
    family: Family, findings: Mapping[str, Finding], races: list[Race], goals: Sequence[Goal]
) -> Family:
    """Return a family with all its contents filled in."""
    names = {entry.name for entry in family.entries}
    own = [finding for finding in findings.values() if finding.about in names]
    family.comparison = next((finding for finding in own if finding.is_comparison), None)
    rest = (finding for finding in own if finding is not family.comparison)
    family.findings = sorted(rest, key=lambda finding: finding.record is None)
    family.races = [race for race in races if race.about in names]
    family.weights = [weights for weights in list_weights().values() if weights.entry in names]
    family.goals = [goal for goal in goals if goal.entry in names]
    pictures = (figure for finding in family.all_findings for figure in finding.figures)
    leads = (finding.lead for finding in own if finding.lead)
    family.lead = next(leads, None) or next(pictures, None)
    drop_repeated(family)
    return family


def drop_repeated(family: Family) -> None:
    """Remove repeated pictures of a section, so that each is shown once."""
    seen = {family.lead.uri} if family.lead else set()
    for finding in family.all_findings:
        for figure in list(finding.figures):
            if figure.uri in seen:
                finding.figures.remove(figure)
            seen.add(figure.uri)


def findings_of(records: Mapping[str, dict], folder: Path) -> dict[str, Finding]:
    """Return every experiment that is registered or has a record."""
    registered = list_experiments()
    names = sorted({*registered, *(name for name in records if not is_speed(name))})
    return {
        name: finding_of(
            name, find_experiment(name) if name in registered else None, records.get(name), folder
        )
        for name in names
    }


def finding_of(
    name: str, experiment: Experiment | None, record: dict | None, folder: Path
) -> Finding:
    """Return an experiment with its results; None stands for one that is not registered."""
    command = record["command"] if record else f"capsule-zoo reproduce {name}"
    model, _, own = name.partition("/")
    paths = figures_of(name, folder) if record else []
    shown = {path.stem.removeprefix(own).strip("_"): path for path in paths}
    summary = (record or {}).get("summary", name) if experiment is None else experiment.summary
    figures = {which: picture(path, caption(summary, which)) for which, path in shown.items()}
    found = Finding(name, summary, command, record, model, figures=list(figures.values()))
    if experiment is None:
        return found
    return replace(
        found,
        about=experiment.about,
        text=remainder(experiment.function.__doc__),
        lead=None if experiment.lead is None else figures.get(experiment.lead),
        is_comparison=experiment.role == "comparison",
    )


def caption(summary: str, figure: str) -> str:
    """Return what a figure shows, if it has a name, and what its experiment does, in words."""
    does = re.sub(r" \([^)]*\)\.$", ".", summary)  # without how long it takes
    shows = re.sub(r"^.", lambda m: m[0].upper(), in_words(figure))
    return f"{shows}. {does}" if shows else does


def is_speed(name: str) -> bool:
    """Return True if a record belongs to a benchmark."""
    return name.startswith(f"{BENCHMARKS}/")


WIDTH = 900  # pixels, at most
QUALITY = 40  # the report stays below 5.5 megabytes


@dataclass(frozen=True)
class Picture:
    """An image that needs no separate file.

    Attributes:
        uri: the image itself, as WebP.
        width, height: size in pixels, so that the page reserves room for it.
        words: description of the image.
    """

    uri: str
    width: int
    height: int
    words: str

    @property
    def is_wide(self) -> bool:
        """True if the picture is too wide to be read at the width of a phone."""
        return self.width > 2 * self.height


def picture(path: Path, words: str) -> Picture:
    """Return a PNG file as a picture of moderate width."""
    with Image.open(path) as opened:
        image = opened.convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if image.width > WIDTH:
        size = WIDTH, round(image.height * WIDTH / image.width)
        image = image.resize(size, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "webp", quality=QUALITY, method=6)
    code = base64.b64encode(buffer.getvalue()).decode()
    return Picture(f"data:image/webp;base64,{code}", image.width, image.height, words)
