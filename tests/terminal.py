"""Command lines as a user types them: their exit status, and what the terminal shows."""

import json

import pytest
from variants import small_settings

from capsule_zoo import cli

PATIENCE = 1800  # seconds after which a started program counts as hung, also on a busy machine


def run(*arguments: object) -> int | None:
    """Return the exit status of a command line."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in arguments])
    return ended.value.code


def small_words(name: str, *without: str, **others: object) -> list[str]:
    """Return an entry's small sizes, without some and with others, as words of a command line."""
    sizes = {key: size for key, size in small_settings(name).items() if key not in without} | others
    return [w for key, size in sizes.items() for w in ("--set", f"{key}={json.dumps(size)}")]


class Terminal:
    """A terminal that runs command lines and keeps their output."""

    def __init__(self, capsys: pytest.CaptureFixture) -> None:
        self.capsys = capsys

    def run(self, *arguments: object, status: int = 0) -> str:
        """Return the output of a command; a refused command writes to stderr."""
        exit_status = run(*arguments)
        printed = self.capsys.readouterr()
        assert exit_status == status, printed.err
        return printed.err if status else printed.out

    def refused(self, *arguments: object) -> str:
        """Return the one line that a refused command prints."""
        message = self.run(*arguments, status=2)
        assert message.startswith("capsule-zoo: ") and message.count("\n") == 1, message
        return message

    def json(self, *arguments: object) -> dict:
        return json.loads(self.run(*arguments, "--json").splitlines()[-1])
