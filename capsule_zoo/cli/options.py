"""Common code of the commands: their options, and functions that print results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from capsule_zoo.settings import Argument

EntryArgument = Annotated[
    str, typer.Argument(metavar="ENTRY", help="An entry, trained weights, or a run folder.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run folder, or the name of trained weights.")
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Data set, or a folder or .npz file of pictures.  [default: the one trained on]",
    ),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(help="Folder of torchvision's data.  [default: $CAPSULE_ZOO_DATA, or download]"),
]
AllImages = Annotated[
    int | None, typer.Option(help="Number of test images.  [default: all]", min=1)
]
Images = Annotated[int, typer.Option(help="Number of test images.", min=1)]
Particles = Annotated[int, typer.Option(help="Draws for each image, K.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.", min=0, max=2**63 - 1)]
AsJson = Annotated[
    bool, typer.Option("--json", help="Also print the result as JSON, on the last line.")
]
Device = Annotated[str, typer.Option(help="A torch device, such as cuda.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress, only the result.")]


def print_list(descriptions: dict[str, str]) -> None:
    """Print names and descriptions in two columns."""
    width = max(map(len, descriptions), default=0)
    for name, description in descriptions.items():
        print(f"{name:{width}}  {description}")


def print_metrics(metrics: dict[str, Any]) -> None:
    """Print each metric on one line; a pair is a value and its standard error."""
    texts = {}
    for name, value in metrics.items():
        value, error = value if isinstance(value, tuple) else (value, metrics.get(f"{name}_se"))
        if name.endswith("_se") or value != value:
            continue
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        has_error = error is not None and error == error  # NaN where one image was measured
        texts[name] = f"{text} (s.e. {error:.2g})" if has_error else text
    print_list(texts)


def print_json(wanted: bool, content: dict | list) -> None:
    """Print one JSON value on a line of its own, if `wanted` is true."""
    if wanted:
        from capsule_zoo.records import plain

        print(json.dumps(plain(content)), flush=True)


def user_settings(**settings: Any) -> dict[str, Any]:
    """Return the settings that the user gave on the command line."""
    return {name: value for name, value in settings.items() if value is not None}


def read_settings(
    assignments: list[str] | None, arguments: "Mapping[str, Argument]"
) -> dict[str, Any]:
    """Parse settings of the form KEY=VALUE; values are JSON, or else taken as text.

    The word none is None for a setting that may be None and takes no text.

    Args:
        arguments: the settings by name, with their types.

    Raises:
        ValueError: a word is not of this form.
    """
    from capsule_zoo.settings import fits, flat_arguments

    settings, arguments = {}, flat_arguments(arguments)
    for word in assignments or []:
        key, equals, value = word.partition("=")
        if not (equals and all(part.replace("-", "_").isidentifier() for part in key.split("."))):
            raise ValueError(f"--set takes KEY=VALUE, such as objects=16, not {word!r}")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        hint = arguments[key].hint if key in arguments else Any
        if value.lower() == "none" and fits(None, hint) and not fits(value, hint):
            parsed = None
        settings[key] = tuple(parsed) if isinstance(parsed, list) else parsed
    return settings
