"""Progress of long work on stderr: bars in a terminal or a notebook, elsewhere lines.

>>> with show_progress():
...     for batch in track(images.split(100), "classifying", "batches"):
...         ...

A log file gets whole lines without control characters: the first after five seconds, then one every
ten. Loops are silent unless `show_progress` is on, as it is for every command of the command line.
"""

import io
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager, nullcontext, redirect_stderr
from contextvars import ContextVar
from typing import Any, Self, TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")

SECONDS_TO_FIRST_LINE = 5.0
SECONDS_BETWEEN_LINES = 10.0
SECONDS_TO_BAR = 2.0  # a loop that ends earlier draws no bar
TIMED = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"  # format of a tqdm bar without its rate
COUNTED = "{l_bar}{bar}| {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}{postfix}]"

_enabled: ContextVar[bool] = ContextVar("show_progress", default=False)
_plan: ContextVar[str | None] = ContextVar("plan", default=None)


@contextmanager
def show_progress(enabled: bool = True) -> Iterator[None]:
    """Show the progress of all loops inside the context, or of no loop."""
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def is_progress_shown() -> bool:
    """Return whether the call is inside `show_progress()`."""
    return _enabled.get()


def announce(line: str) -> None:
    """Print a line on the work that begins, if progress is shown."""
    if _enabled.get():
        write_line(line)


@contextmanager
def announce_plan(line: str | None) -> Iterator[None]:
    """Print a plan before the first line or lasting bar inside the context.

    A command that is refused before it begins prints no plan.
    """
    token = _plan.set(line)
    try:
        yield
    finally:
        _plan.reset(token)


def write_line(line: str | None = None) -> None:
    """Print the plan, if any, and a line on stderr, above the bars of a terminal."""
    for text in filter(None, (_plan.get(), line)):
        tqdm.write(text, file=sys.stderr)
    _plan.set(None)
    sys.stderr.flush()


@contextmanager
def without_bars_in_logs() -> Iterator[None]:
    """Hide the progress bars of other libraries unless stderr is a terminal or notebook."""
    with nullcontext() if _draws_bars() else redirect_stderr(io.StringIO()):
        yield


def track(
    values: Iterable[T], task: str, unit: str, total: int | None = None, enabled: bool | None = None
) -> Iterator[T]:
    """Yield values, and show the progress of the loop over them.

    Args:
        task: the task of the loop, such as "evaluating".
        unit: the values' noun in the plural, such as "batches".
        total: the number of values; by default their length, if they have one.
        enabled: whether progress is shown; by default inside `show_progress()`.
    """
    if not (_enabled.get() if enabled is None else enabled):
        yield from values
        return
    if total is None and isinstance(values, Sized):
        total = len(values)
    with Bar(task, unit, total) as bar:
        for done, value in enumerate(values, 1):
            yield value
            bar.advance(done)


class Bar:
    """The progress of one task, shown while the bar is open as a context.

    Args:
        task: the task, such as "training".
        unit: the unit of the progress in the plural, such as "steps"; "%" for percents of a time.
        total: the number of units of the whole task; None if unknown.
        done: the number of units that were done earlier.
        enabled: False shows nothing.
        lasting: the bar appears at once and stays in the terminal afterwards. Other bars appear
            after two seconds, and are removed at the end.
    """

    def __init__(
        self,
        task: str,
        unit: str,
        total: float | None,
        *,
        done: float = 0,
        enabled: bool = True,
        lasting: bool = False,
    ) -> None:
        self.task = task
        self.unit = unit
        self.total = total
        self.lasting = lasting
        self.before = self.done = done
        self.notes = ""
        self.began = time.monotonic()
        self.due = self.began + SECONDS_TO_FIRST_LINE
        self.printed: str | None = None
        if enabled and lasting:
            write_line()  # the plan
        self.lines = enabled and not _draws_bars()
        self.bar: Any = self._tqdm() if enabled and not self.lines else None

    def _tqdm(self) -> Any:
        has_total = self.total is not None
        return tqdm(
            desc=self.task,
            total=self.total,
            initial=self.before,
            unit=f" {self.unit}",
            bar_format=(TIMED if self.unit == "%" else COUNTED) if has_total else None,
            leave=self.lasting,
            delay=0 if self.lasting else SECONDS_TO_BAR,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
        elif self.lines and (self.lasting or self.printed):
            self._print()

    @property
    def is_enabled(self) -> bool:
        """Whether the bar shows anything."""
        return self.lines or self.bar is not None

    def advance(self, done: float, notes: str = "") -> None:
        """Show that `done` units are done, with notes such as "loss 3.25"."""
        if self.bar is not None:
            self.bar.set_postfix_str(notes, refresh=done == self.done)
            self.bar.update(min(done, self.total or done) - self.bar.n)
        self.done, self.notes = done, notes
        if self.lines and time.monotonic() >= self.due:
            self._print()

    def _print(self) -> None:
        self.due = time.monotonic() + SECONDS_BETWEEN_LINES
        line = ", ".join(filter(None, [f"{self.task}: {self._position()}", self.notes]))
        if line != self.printed:
            write_line(line)
        self.printed = line

    def _position(self) -> str:
        """Return the position as text: units done, units that remain, and the remaining time."""
        if self.total is None:
            return f"{self.done:,.0f} {self.unit}"
        percent = f"{min(self.done / self.total, 1):.0%}"
        if self.unit != "%":
            percent = f"{self.done:,.0f} of {self.total:,.0f} {self.unit}, {percent}"
        elapsed = time.monotonic() - self.began
        if self.done <= self.before:
            return f"{percent}, {tqdm.format_interval(elapsed)} so far"
        if self.done >= self.total:
            return percent
        left = elapsed / (self.done - self.before) * (self.total - self.done)
        return f"{percent}, {tqdm.format_interval(left)} left"


def _draws_bars() -> bool:
    """Return whether stderr can redraw a line: a terminal or the stream of a notebook."""
    is_terminal = getattr(sys.stderr, "isatty", bool)()
    return is_terminal or type(sys.stderr).__module__.startswith("ipykernel")
