"""The commands that show the contents of the zoo: `list`, `show`, and `--version`."""

from __future__ import annotations

from typing import Annotated

import typer

from capsule_zoo._version import __version__
from capsule_zoo.cli.options import AsJson, print_json, print_list


def list_entries(
    pattern: Annotated[str, typer.Argument(help='Such as "part*".')] = "*",
    weights: Annotated[
        bool, typer.Option("--weights", help="List trained weights: data, headline, size.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the entries, or with --weights the trained weights.

    \b
    Examples:
      capsule-zoo list
      capsule-zoo list "part*"
      capsule-zoo list --weights
    """
    if weights:
        _list_weights(pattern, as_json)
        return
    from capsule_zoo.registry import list_models, summary

    found = {name: summary(name) for name in list_models(pattern)}
    if not found:
        raise ValueError(f"no entry matches {pattern!r}; there are {list_models()}")
    print_list(found)
    print("\nOne of them in full: capsule-zoo show ENTRY")
    print("Trained weights: capsule-zoo list --weights")
    print_json(as_json, found)


def show(
    name: Annotated[
        str, typer.Argument(metavar="ENTRY", help="An entry, trained weights, or a run folder.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show the components of an entry and its settings.

    Prints its sizes with defaults and types, guides, latent sites, objective, training settings,
    figures, trained weights and references.

    \b
    Examples:
      capsule-zoo show part-whole
      capsule-zoo show part-whole-mnist --json
    """
    from capsule_zoo.discovery import describe

    found = describe(name)
    print(found)
    _print_published(found.name)
    print_json(as_json, found.as_dict())


def _print_published(entry: str) -> None:
    """Print the published numbers of an entry, in a checkout, which has the records."""
    from capsule_zoo.report.gallery import read_records
    from capsule_zoo.report.published import RESULTS, goals_of, lines

    if not RESULTS.is_dir():
        return
    own = [g for g in goals_of(read_records(RESULTS)) if g.published.entry == entry]
    if own:
        print("\npublished, ours, state\n" + "\n".join(lines(own)[1:]))


def print_version(wanted: bool) -> None:
    """Print the version and exit, if `wanted` is true."""
    if wanted:
        print(f"capsule-zoo {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module with entries, guides, data sets or experiments; may be repeated.",
        ),
    ] = None,
) -> None:
    """Take the options of all commands."""
    if modules:
        from capsule_zoo.data.plugins import import_by_name

        for module in modules:
            import_by_name(module)


def _list_weights(pattern: str, as_json: bool) -> None:
    from capsule_zoo.discovery import list_weights

    found = list_weights(pattern)
    if not found:
        raise ValueError(f"no trained weights match {pattern!r}; there are {list(list_weights())}")
    print_list({name: str(weights) for name, weights in found.items()})
    print_json(as_json, found)
