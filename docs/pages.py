"""Pages of the site are filled in from the registry and the records when the site is built.

A page requests such a part by a comment on its own line, as the README's tables do, so that no
number and no list is typed by hand:

    <!-- entry: part-whole -->           a registered entry, and what it consists of
    <!-- experiments: part-whole -->     its experiments: commands, records, figures
    <!-- results: part-whole -->         the page of its results, `results/part-whole/README.md`
    <!-- reference: capsule_zoo.inference fit evaluate -->  these names that a package exports
    <!-- modules: capsule_zoo.models --> names in a package's modules that it does not export
    <!-- commands -->                    the command line's help
    <!-- others -->                      the pages that `write_others` writes for other models
    <!-- gallery -->                     the first picture of every page of results, as a link

An entry shows its plate diagram too, if `write_diagrams` could draw one.

Tables of chosen metrics are requested as in the README: see `capsule_zoo.pages.markdown`.
"""

import inspect
import pkgutil
import re
import shutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from pyro.infer.inspect import render_model

from capsule_zoo import registry
from capsule_zoo.discovery import describe
from capsule_zoo.experiments import find_experiment, list_experiments
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.pages import markdown as readme
from capsule_zoo.pages.stories import read_story, remainder
from capsule_zoo.records import figures_of, metric_title, read_record

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "results"
OTHERS = "others"
DIAGRAMS = "diagrams"
COMMAND_LINE = ("__main__",)  # documented by `commands`
FRONT = ("runs",)  # sub-packages of capsule_zoo whose modules the reference lists
_COMMENT = re.compile(
    r"^<!-- (?P<what>\w+)(?:: (?P<name>\S+)(?P<more>.*))? -->$", flags=re.MULTILINE
)
_PICTURE = re.compile(r"!\[(?P<words>[^]]*)\]\((?P<path>[^):]+)\)")
_VERDICTS = re.compile(r"^\| question .*\n(?:\|.*\n)+", flags=re.MULTILINE)
_LINK = re.compile(r"(?P<picture>!?)\[(?P<words>[^]]*)\]\((?P<path>[^):]+)\)")


def fill_source(app, page: str, source: list[str]) -> None:
    """Fill in one page as Sphinx reads it."""
    if not page.startswith("notebooks/"):
        up = "../" * (page.count("/") + 1)
        source[0] = fill(source[0], root=up)


def fill(text: str, root: str = "../") -> str:
    """Return the text with every comment replaced by the part that it requests.

    Args:
        root: the relative path from the page to the repository's root.
    """
    makers = {
        "entry": lambda name: entry(name, root),
        "experiments": lambda family: experiments(family, root),
        "results": lambda family: results(family, root),
        "modules": modules,
        "commands": lambda _: commands(),
        "others": lambda _: "\n".join(f"{OTHERS}/{page}" for page in others()),
        "gallery": lambda _: gallery(root),
    }

    def made(comment: re.Match[str]) -> str:
        if comment["what"] in ("record", "end"):  # the table of a record is there already
            return ""
        if comment["what"] == "reference":
            return _rst(_reference(import_module(comment["name"]), comment["more"].split()))
        if comment["what"] not in makers:
            raise ValueError(f"{comment[0]} is unknown; a page may ask for {', '.join(makers)}")
        return makers[comment["what"]](comment["name"])

    return _COMMENT.sub(made, readme.fill(text, RESULTS))


@cache
def others() -> dict[str, str]:
    """Return a page for each model without a page in `models/`, by the name of its module."""
    written = "".join(path.read_text("utf-8") for path in (DOCS / "models").glob("*.md"))
    families: dict[str, list[str]] = {}
    for name in registry.list_models():
        home = describe(name).home
        if not {f"<!-- entry: {name} -->", f".. automodule:: {home}"} & {*written.splitlines()}:
            families.setdefault(home, []).append(name)
    return {home.rpartition(".")[2]: _page(home, names) for home, names in families.items()}


def write_others(folder: Path) -> None:
    """Write the pages of `others` into a separate folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for page, text in others().items():
        (folder / f"{page}.md").write_text(text, "utf-8")


def _page(home: str, names: list[str]) -> str:
    """Return a module's story, its entries with their experiments, and its other public names."""
    module = import_module(home)
    in_reference = home.startswith("capsule_zoo.models.")
    documented = [] if in_reference else _module_definitions(module)
    reference = _reference(module, documented)
    parts = [
        f"# {read_story(module.__doc__).title}\n",
        "After this page you can create this model, and read what it draws and what it reaches.\n",
        _rst(f".. automodule:: {home}\n   :no-members:"),
        "## In the zoo\n",
        *(f"<!-- entry: {name} -->\n" for name in names),
        *(f"<!-- experiments: {name} -->\n" for name in names if list_experiments(f"{name}/*")),
    ]
    return "\n".join([*parts, "## Reference\n", _rst(reference)] if reference else parts)


def write_diagrams(folder: Path) -> None:
    """Draw every entry's plate diagram into a separate folder, if graphviz is installed.

    Both are needed: the Python package (`pip install capsule-zoo[viz]`) and the program `dot`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if find_spec("graphviz") is None or shutil.which("dot") is None:
        return
    folder.mkdir()
    for name in registry.list_models():
        (folder / f"{name}.svg").write_bytes(diagram(name))


def diagram(name: str) -> bytes:
    """Return the plate diagram of a registered entry, made small, as an SVG file."""
    with use_seed(0):
        model = registry.create(name, **registry.small_settings(name)).model
        drawn = render_model(model, model_kwargs={"batch_size": 2})
    return drawn.pipe(format="svg")


def entry(name: str, root: str = "../") -> str:
    """Return the section of a registered entry: its plate diagram, and what it consists of.

    Args:
        root: the relative path from the page to the repository's root.
    """
    linked = re.sub(r"`([A-Z]\w*)`", lambda code: _link(code[1]), str(describe(name)))
    return f"### `{name}`\n\n{_picture(name, root)}\n{linked}\n"


def _picture(name: str, root: str) -> str:
    if not (DOCS / DIAGRAMS / f"{name}.svg").is_file():
        return ""
    caption = "Plates and sites, at a small size; the image is drawn, not observed."
    return f"![Plate diagram of {name}]({root}docs/{DIAGRAMS}/{name}.svg)\n\n{caption}\n"


def results(family: str, root: str) -> str:
    """Return the text of a family's page of results, below its title, with its pictures.

    Other links lead to files outside the site, and are left as words.
    """
    _, _, text = (RESULTS / family / "README.md").read_text("utf-8").partition("\n")

    def move_link(link: re.Match[str]) -> str:
        if link["picture"]:
            return f"![{link['words']}]({root}results/{family}/{link['path']})"
        return link["words"]

    text = _LINK.sub(move_link, re.sub("^#", "##", text, flags=re.MULTILINE))
    return _VERDICTS.sub(r":::{container} verdicts\n\n\g<0>:::\n", text)


def gallery(root: str) -> str:
    """Return the first picture of every model's page of results, as a link to the model's page.

    Args:
        root: the relative path from the page to the repository's root.
    """
    tiles = []
    for page in sorted((DOCS / "models").glob("*.md")):
        family = page.stem.replace("_", "-")
        if not (RESULTS / family / "README.md").is_file():
            continue
        picture = _PICTURE.search((RESULTS / family / "README.md").read_text("utf-8"))
        if picture:
            title = page.read_text("utf-8").partition("\n")[0].removeprefix("# ")
            image = f"![{picture['words']}]({root}results/{family}/{picture['path']})"
            tiles.append(f"[{image}](models/{page.name}) [{title}](models/{page.name})")
    return "\n\n".join(['<div class="gallery">', *tiles, "</div>"])


def experiments(family: str, root: str) -> str:
    """Return the experiments of a family: first those with a record, then the others."""
    measured, waiting = [], []
    for name in list_experiments(f"{family}/*"):
        (measured if (RESULTS / f"{name}.json").is_file() else waiting).append(name)
    parts = [_results_section(name, root) for name in measured]
    if waiting:
        rows = ["| command | what it shows |", "|---|---|"]
        for name in waiting:
            rows.append(f"| `capsule-zoo reproduce {name}` | {find_experiment(name).summary} |")
        parts.append("\n".join(["### Not measured yet", "", *rows, ""]))
    return "\n".join(parts)


def _results_section(name: str, root: str) -> str:
    experiment = find_experiment(name)
    text = f"{experiment.summary}\n\n{remainder(experiment.function.__doc__)}"
    paths = (path.relative_to(RESULTS) for path in figures_of(name, RESULTS))
    pictures = [
        f"![{metric_title(path.stem)}]({root}results/{path.as_posix()})\n" for path in paths
    ]
    table = readme.table(read_record(name, RESULTS))
    return "\n".join([f"### {name}", "", text, "", *pictures, table])


def modules(package: str) -> str:
    """Return the public names that a package does not export, and the stories of their modules.

    A story that has its own page (by `automodule`) is not repeated.
    """
    home = import_module(package)
    exports, documented, parts = set(getattr(home, "__all__", ())), find_documented_modules(), []
    for name in _modules_in(home):
        module, short = import_module(name), name.removeprefix(f"{package}.")
        rest = [thing for thing in _module_definitions(module) if thing not in exports]
        if not rest:
            continue
        clash = "   :no-index:\n" if short.rpartition(".")[2] in exports else ""
        story = f".. automodule:: {name}\n   :no-members:\n{clash}"
        head = f".. currentmodule:: {name}\n" if name in documented else story
        parts.append(f"### {short}\n\n{_rst(head + chr(10) + _reference(module, rest))}")
    return "\n".join(parts)


def _modules_in(package: ModuleType) -> Iterator[str]:
    """Yield the dotted names of a package's modules, including the modules of its sub-packages.

    For `capsule_zoo` only the sub-packages in `FRONT` count: the others have their own pages.
    """
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        short = info.name.rpartition(".")[2]
        if not info.ispkg and short not in COMMAND_LINE:
            yield info.name
        elif info.ispkg and (package.__name__ != "capsule_zoo" or short in FRONT):
            yield from _modules_in(import_module(info.name))


def _reference(module: ModuleType, names: list[str]) -> str:
    """Return the autodoc directives that document these names of a module.

    What another layer defines is in the index by the page of that layer, but families have none.
    """
    kinds = {True: "autoclass", False: "autofunction"}
    written = []
    for name in names:
        thing = getattr(module, name)
        is_local = thing.__module__.startswith((module.__name__, "capsule_zoo.zoo."))
        kind = kinds[inspect.isclass(thing)]
        written.append(
            f".. {kind}:: {module.__name__}.{name}\n" + "   :no-index:\n" * (not is_local)
        )
    return "\n".join(written)


def _module_definitions(module: ModuleType) -> list[str]:
    """Return the public classes and functions that a module defines, in the order of its file."""
    return [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__module__ == module.__name__
    ]


@cache
def find_documented_modules() -> set[str]:
    """Return the modules whose docstrings are included by name in some page."""
    texts = (
        path.read_text("utf-8") for path in DOCS.rglob("*.md") if "notebooks" not in path.parts
    )
    return {name for text in texts for name in re.findall(r"automodule:: (\S+)", text)}


def commands() -> str:
    """Return the help text of every command."""
    from typer.testing import CliRunner

    from capsule_zoo.cli import app

    parts, asked = [], CliRunner(env={"COLUMNS": "88", "TERMINAL_WIDTH": "88"})
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        usage = asked.invoke(app, [name, "--help"], prog_name="capsule-zoo").output
        parts.append(f"## {name}\n\n```text\n{usage.strip()}\n```\n")
    return "\n".join(parts)


def _rst(text: str) -> str:
    return f"```{{eval-rst}}\n{text}\n```\n"


def _link(name: str) -> str:
    """Return a class's name, as a link if the name is public."""
    from docstrings import public_names

    names = public_names()
    return f"{{py:obj}}`~{names[name]}`" if name in names else f"`{name}`"
