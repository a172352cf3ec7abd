"""The command line `capsule-zoo`, in the only package that uses typer.

`app` is the program, `options` holds shared code, and every other file holds commands. A command
imports its dependencies when it is called, so help and lists appear at once.
"""

from capsule_zoo.cli.app import app, main

__all__ = ["app", "main"]
