"""The contents of the report: every model with its story, records, pictures and benchmarks.

A family is a module that holds a model, with the entries made from it. Experiments, benchmarks and
trained weights say which entry they are about. The registration of an experiment also says whether
it opens the section of its model.
"""

import base64
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from capsule_zoo.discovery import Description, Weights, describe
from capsule_zoo.experiments import Experiment, find_experiment, list_experiments
from capsule_zoo.records import figures_of, in_words, read_records
from capsule_zoo.registry import list_models
from capsule_zoo.report import markdown
from capsule_zoo.report.published import Goal, goals_of
from capsule_zoo.report.stories import Story, read_story, remainder

BENCHMARKS = "benchmarks/"  # the folder of speeds, among records


@dataclass(frozen=True)
class Finding:
    """An experiment or a benchmark, and its results.

    Attributes:
        name: `<model>/<name>`, or `benchmarks/<name>`.
        summary: description in a line.
        record: its record; empty until it has been run.
        about: name of the entry whose family it belongs to.
        text: further description, in Markdown.
        figures: the figures of the record.
        lead: the figure that opens the model's section, if it is one of this experiment's.
        is_comparison: True if it compares the model's guides, routings or decoders.
    """

    name: str
    summary: str
    record: dict[str, Any]
    about: str
    text: str = ""
    figures: "list[Picture]" = field(default_factory=list)
    lead: "Picture | None" = None
    is_comparison: bool = False

    @property
    def table(self) -> str:
        """The tables of the record in Markdown, with exact values."""
        return markdown.table(self.record, exact=True)


@dataclass(frozen=True)
class Family:
    """The section of one model.

    Attributes:
        story: the story of the model.
        entries: the entries made from it.
        findings: its experiments: first the comparison, last those without a record.
        races: its benchmarks.
        goals: published numbers of its entries.
    """

    story: Story
    entries: list[Description]
    findings: list[Finding]
    races: list[Finding]
    goals: list[Goal]

    @property
    def anchor(self) -> str:
        """The name of the first entry, to which links lead."""
        return self.entries[0].name

    @property
    def lead(self) -> "Picture | None":
        """The picture that opens the section."""
        leads = [finding.lead for finding in self.findings if finding.lead]
        return next(iter([*leads, *(f for each in self.findings for f in each.figures)]), None)

    @property
    def weights(self) -> list[Weights]:
        """The trained weights of its entries."""
        return [weights for entry in self.entries for weights in entry.weights]

    @property
    def measured(self) -> int:
        """The number of its experiments that have a record."""
        return sum(bool(finding.record) for finding in self.findings)

    @property
    def speeds(self) -> str:
        """The ratios to peers, as a Markdown table."""
        return markdown.speeds(race.record for race in self.races).replace("_", " ")

    @property
    def faster(self) -> tuple[int, int]:
        """The number of peers slower than our code, and the number of all peers."""
        ratios = [time for race in self.races for time, _ in markdown.peers(race.record).values()]
        return sum(ratio["value"] > 1 for ratio in ratios), len(ratios)


@dataclass(frozen=True)
class Gallery:
    """All contents of the report.

    Attributes:
        families: all models, those with most records first.
        others: records that belong to no known model.
    """

    families: list[Family]
    others: list[Finding]


def gather(folder: Path) -> Gallery:
    """Collect everything from the registry, the cards and the records in `folder`.

    Raises:
        ValueError: the folder has no records, or a file that is not a record.
    """
    records = read_records(folder)
    registered = {name: find_experiment(name) for name in list_experiments()}
    findings = [
        finding_of(name, registered.get(name), records.get(name, {}), folder)
        for name in sorted({*registered, *records})
    ]
    goals = goals_of(records)
    homes: dict[str, list[Description]] = {}
    for found in map(describe, list_models()):
        homes.setdefault(found.home, []).append(found)
    families = [family_of(home, entries, findings, goals) for home, entries in homes.items()]
    return Gallery(
        sorted(families, key=lambda family: (-family.measured, family.anchor)),
        [f for f in findings if f.about not in list_models()],
    )


def family_of(
    home: str, entries: list[Description], findings: Sequence[Finding], goals: Sequence[Goal]
) -> Family:
    """Return the section of the model in a module, which begins with the entry of that name."""
    first = home.rpartition(".")[2].replace("_", "-")
    names = {entry.name for entry in entries}
    own = [finding for finding in findings if finding.about in names]
    races = [finding for finding in own if finding.name.startswith(BENCHMARKS)]
    rest = [finding for finding in own if finding not in races]
    return Family(
        read_story(sys.modules[home].__doc__),
        sorted(entries, key=lambda entry: (entry.name != first, entry.name)),
        sorted(rest, key=lambda each: (not each.is_comparison, not each.record)),
        races,
        [goal for goal in goals if goal.entry in names],
    )


def finding_of(name: str, known: Experiment | None, record: dict, folder: Path) -> Finding:
    """Return an experiment with its results; None stands for one that is not registered."""
    model, _, own = name.partition("/")
    summary = known.summary if known else record.get("summary", name)
    paths = figures_of(name, folder) if record else []
    shown = {path.stem.removeprefix(own).strip("_"): path for path in paths}
    figures = {which: picture(path, caption(summary, which)) for which, path in shown.items()}
    found = Finding(name, summary, record, record.get("about", model), figures=[*figures.values()])
    if known is None:
        return found
    return replace(
        found,
        about=known.about,
        text=remainder(known.function.__doc__),
        lead=None if known.lead is None else figures.get(known.lead),
        is_comparison=known.role == "comparison",
    )


def caption(summary: str, figure: str) -> str:
    """Return what a figure shows, if it has a name, and what its experiment does, in words."""
    does = re.sub(r" \([^)]*\)\.$", ".", summary)  # without how long it takes
    shows = re.sub(r"^.", lambda m: m[0].upper(), in_words(figure))
    return f"{shows}. {does}" if shows else does


WIDTH = 900  # pixels, at most
QUALITY = 38  # the report stays below 5.5 megabytes


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
