"""The commands that show the zoo: `list`, `show`, `published`, and `--version`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from capsule_zoo._version import __version__
from capsule_zoo.cli.options import AsJson, EntryArgument, print_json, print_list
from capsule_zoo.records import RESULTS, read_records


def list_entries(
    pattern: Annotated[str, typer.Argument(metavar="PATTERN", help='Such as "part*".')] = "*",
    weights: Annotated[
        bool,
        typer.Option(
            "--weights", help="List the trained weights, with their data, result and size."
        ),
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
    from capsule_zoo.discovery import list_weights
    from capsule_zoo.registry import list_models, summary

    descriptions: dict[str, Any]
    if weights:
        descriptions, kind, all_names = (
            list_weights(pattern),
            "trained weights match",
            list(list_weights()),
        )
    else:
        descriptions = {name: summary(name) for name in list_models(pattern)}
        kind, all_names = "entry matches", list_models()
    if not descriptions:
        raise ValueError(f"no {kind} {pattern!r}; there are {', '.join(all_names)}")
    print_list({name: str(description) for name, description in descriptions.items()})
    if not weights:
        print("\nOne of them in full: capsule-zoo show ENTRY")
        print("Trained weights: capsule-zoo list --weights")
    print_json(as_json, descriptions)


def show(
    name: EntryArgument,
    settings: Annotated[
        bool, typer.Option("--settings", help="Show the type and meaning of each setting.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the components of an entry and its settings.

    Prints its guides, latent sites, data, objective, training settings, figures, trained weights,
    published numbers and references, and the names of its settings with their values.

    \b
    Examples:
      capsule-zoo show part-whole
      capsule-zoo show part-whole --settings
      capsule-zoo show part-whole-mnist --json
    """
    from textwrap import fill

    from capsule_zoo.discovery import describe
    from capsule_zoo.pages.published import goals_of, lines

    description = describe(name)
    goals = [goal for goal in goals_of(read_records(RESULTS)) if goal.entry == description.name]
    published = lines(goals).partition("\n\n")[2]
    print(f"{description.overview(published)}\n")
    print(
        description.settings_list
        if settings
        else fill(description.settings_names, 100, break_on_hyphens=False)
    )
    if not settings:
        print(f"\nWhat each of them means: capsule-zoo show {name} --settings")
    print_json(as_json, description.as_dict())


def print_version(wanted: bool) -> None:
    """Print the version and exit, if `wanted` is true."""
    if wanted:
        print(f"capsule-zoo {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=print_version, is_eager=True, help="Print the version and exit."
    ),
]
Modules = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import a module with entries, guides, data sets or experiments; may be repeated.",
    ),
]


def options(version: Version = False, modules: Modules = None) -> None:
    """Take the options of all commands."""
    if modules:
        from capsule_zoo.data.registration import import_by_name

        for module in modules:
            import_by_name(module)


def published(
    entry: Annotated[
        str | None, typer.Argument(metavar="ENTRY", help="Leave out for all entries.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Folder of the records.  [default: the zoo's own]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the numbers that papers published, next to ours.

    A number is reached or missed only if both numbers are measured alike. It is undecided within
    two standard errors, or if ours has no standard error. If we have two bounds, the worse counts.

    \b
    Examples:
      capsule-zoo published
      capsule-zoo published shape-codes --json
    """
    from capsule_zoo.models.checks import check_known
    from capsule_zoo.pages.published import count, goals_of, lines

    goals = goals_of(read_records(results or RESULTS))
    names = sorted({goal.entry for goal in goals})
    if entry is not None:
        check_known("entry with published numbers", entry, names)
    selected = [goal for goal in goals if entry in (None, goal.entry)]
    print(lines(selected))
    print("\n" + ", ".join(f"{number} {label}" for label, number in count(selected).items()))
    print_json(as_json, [goal.as_dict() for goal in selected])
