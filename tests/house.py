"""Measurements of the house: its size, and which file imports which. `make house` prints them."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("models", "guides", "inference", "data", "experiments", "weights")
# What several families share; every other folder belongs to one family, or to the command line.
SHARED = (
    "models/networks",
    "models/parts",
    "models/routing",
    "models/units",
    "guides/per_image",
    "inference/training",
    "inference/training/starts",
    "inference/evaluation",
    "inference/objectives",
    "capsule_zoo/figures",
    "capsule_zoo/runs",
    "experiments/common",
)
LAYERS = ("data", "models", "guides", "inference", "capsule_zoo", "experiments")


@dataclass(frozen=True)
class House:
    """The Python files of a checkout, outside the tests.

    Attributes:
        root: the folder of the checkout.
    """

    root: Path = ROOT

    @cached_property
    def files(self) -> dict[str, ast.Module]:
        """The syntax trees of all files under version control, by path."""
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
            cwd=self.root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        paths = [f for f in listed if not f.startswith("tests/") and (self.root / f).is_file()]
        return {file: ast.parse((self.root / file).read_text()) for file in paths}

    def lines(self, *without: str) -> int:
        """Return the number of lines, without some top-level folders."""
        paths = (f for f in self.files if f.partition("/")[0] not in without)
        return sum((self.root / file).read_text().count("\n") for file in paths)

    @property
    def lines_in_the_wheel(self) -> int:
        """The number of lines of the package, without the experiments of families."""
        packages = "capsule_zoo", *MAPPED
        paths = (
            f
            for f in self.files
            if f.partition("/")[0] in packages and not re.match("experiments/.*/", f)
        )
        return sum((self.root / file).read_text().count("\n") for file in paths)

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The files that each file imports when it is itself imported, by path."""
        return self._imports({file: tree.body for file, tree in self.files.items()})

    @cached_property
    def used(self) -> dict[str, set[str]]:
        """The files that each file imports at some time, in its functions too, by path."""
        return self._imports({file: list(ast.walk(tree)) for file, tree in self.files.items()})

    def _imports(self, nodes: Mapping[str, Sequence[ast.AST]]) -> dict[str, set[str]]:
        modules = {module_of(file): file for file in self.files}
        graph: dict[str, set[str]] = defaultdict(set)
        for file, statements in nodes.items():
            for name in _imported(statements):
                target = modules.get(name)
                if target not in (None, file):
                    graph[file].add(target)
        return graph

    def users(self, file: str) -> set[str]:
        """Return the files that import a file at some time; the face of a package counts."""
        return {user for user, used in self.used.items() if file in used}

    @property
    def lonely(self) -> list[str]:
        """The files of shared folders that one file of another folder uses, and none else.

        A file that only its neighbour uses is a part of what the neighbour does, and a name that
        the face of a package exports has users outside the zoo.
        """
        return sorted(
            file
            for file in self.files
            if (folder := file.rpartition("/")[0]) in SHARED
            and not file.endswith("__init__.py")
            and len(users := self.users(file)) < 2
            and not any(u.endswith("__init__.py") or u.startswith(folder) for u in users)
        )

    @property
    def upward(self) -> list[tuple[str, str]]:
        """The imports of a layer above the file's own, from file to file."""
        return sorted(
            (file, used)
            for file, all_used in self.imports.items()
            if file.partition("/")[0] in LAYERS
            for used in all_used
            if _layer(used) > _layer(file)
        )

    @property
    def circles(self) -> list[list[str]]:
        """The groups of files that import each other in a circle."""
        return [sorted(group) for group in _components(self.imports) if len(group) > 1]


def module_of(file: str) -> str:
    """Return the name by which a file is imported."""
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"capsule_zoo.{name}" if file.partition("/")[0] in MAPPED else name


def _imported(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the names of modules that the import statements among some nodes name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _layer(file: str) -> int:
    """Return how far up a file lies; the version, which imports nothing, lies below all others."""
    top = file.partition("/")[0]
    return -1 if file == "capsule_zoo/_version.py" or top not in LAYERS else LAYERS.index(top)


def _components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            cut = stack.index(node)
            components.append(stack[cut:])
            del stack[cut:]

    for node in list(graph):
        if node not in index:
            visit(node)
    return components


def report(house: House) -> str:
    """Return the measurements as text."""
    rows = {
        "lines of source without experiments and benchmarks": house.lines(
            "experiments", "benchmarks", "docs"
        ),
        "lines of source with experiments": house.lines("benchmarks", "docs"),
        "lines of Python in the wheel": house.lines_in_the_wheel,
        "circles of files": len(house.circles),
        "imports of a layer above": len(house.upward),
        "files of shared folders with one user": len(house.lonely),
    }
    return "\n".join(f"{value:>8,.0f}  {label}" for label, value in rows.items())


if __name__ == "__main__":
    house = House()
    print(report(house))
    for group in house.circles:
        print("circle:", *group)
    for file, used in house.upward:
        print("upward:", file, "->", used)
    for file in house.lonely:
        print("one user:", file, "by", *house.users(file))
