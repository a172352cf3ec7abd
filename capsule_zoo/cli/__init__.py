"""The command line: `capsule-zoo`. This package alone knows typer.

`app` is the program; every other file holds commands, and `options` what they share. A command
imports what it needs when it is called, so that help and lists come at once.
"""

from capsule_zoo.cli.app import app, main

__all__ = ["app", "main"]
