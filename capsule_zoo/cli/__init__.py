"""The command line `capsule-zoo`, in the only package that uses typer.

`options` holds the commands' common code, and every other file holds commands. A command imports
its dependencies when it is called, so help and lists appear at once. Errors that a user can fix (a
wrong name, absent data or devices, a damaged file, a loss that is not finite, too little memory)
are reported in a line or two without a traceback. The exit status is then 2.
"""

import io
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from itertools import islice
from typing import Any

import typer

from capsule_zoo.cli import discovery, explore, objects, reproduce, run_commands

app = typer.Typer(
    name="capsule-zoo",
    help="Capsule models as joint distributions; routings as guides and objectives over them.",
    epilog="Begin with: capsule-zoo reproduce shape-codes/digits",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit, with status 2 for errors that the user can fix."""
    warnings.formatwarning = lambda message, *_: f"capsule-zoo: warning: {message}\n"
    warnings.simplefilter("ignore", FutureWarning)  # what other libraries plan, such as ArviZ
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without ± shows a ?
            stream.reconfigure(errors="replace")
    try:
        app(args=_imports_first(sys.argv[1:] if arguments is None else arguments))
    except (ValueError, OSError, RuntimeError) as error:
        text = _error_message(error)
        if text is None:
            raise
        print(f"capsule-zoo: {text}", file=sys.stderr)
        sys.exit(2)


def _with_progress(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with progress bars, which `quiet` turns off."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        from capsule_zoo.data.progress import show_progress

        with show_progress(not options.get("quiet", False)):
            command(*arguments, **options)

    return run


def _imports_first(arguments: list[str]) -> list[str]:
    """Move every `--import MODULE` to the front, because it may also follow a command."""
    first: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)
    for word in remaining:
        if word == "--import":
            first += [word, *islice(remaining, 1)]
        else:
            (first if word.startswith("--import=") else rest).append(word)
    return first + rest


def _error_message(error: ValueError | OSError | RuntimeError) -> str | None:
    """Return the message for an error that the user can fix; None for any other error."""
    if isinstance(error, (ValueError, OSError)):
        return str(error)
    from torch import OutOfMemoryError

    from capsule_zoo.inference import NonFiniteLoss

    if isinstance(error, OutOfMemoryError):
        return f"{str(error).partition(chr(10))[0]} Give a lower --batch-size, or smaller settings."
    return str(error) if isinstance(error, NonFiniteLoss) else None


app.callback(help=app.info.help)(discovery.options)
app.command("list")(discovery.list_entries)


COMMANDS: tuple[Callable[..., None], ...] = (  # in the order of the help, after `list`
    discovery.show,
    run_commands.train,
    run_commands.evaluate,
    run_commands.compare,
    run_commands.figure,
    objects.segment,
    reproduce.reproduce,
    explore.explore,
    discovery.published,
)
for command in COMMANDS:
    app.command()(_with_progress(command))
