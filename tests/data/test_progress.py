"""Progress: whole lines in a log, a bar in a terminal, nothing unless it is asked for."""

import io
import sys
from types import SimpleNamespace

import pytest

from capsule_zoo.data import progress
from capsule_zoo.data.progress import Bar, announce, announce_plan, show_progress, track, write_line


@pytest.fixture
def seconds(monkeypatch):
    """Return the clock of the bars, which only the test moves."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "SECONDS_TO_FIRST_LINE", 5.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class Terminal(io.StringIO):
    """A stream that can redraw its last line."""

    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_after_five_seconds_and_then_every_ten(seconds, capsys):
    with show_progress():
        for _ in track(range(60), "reading", "files"):
            seconds.now += 0.5
    assert capsys.readouterr().err.splitlines() == [
        "reading: 10 of 60 files, 17%, 00:25 left",
        "reading: 30 of 60 files, 50%, 00:15 left",
        "reading: 50 of 60 files, 83%, 00:05 left",
        "reading: 60 of 60 files, 100%",
    ]


def test_a_short_loop_says_nothing_and_a_lasting_bar_ends_with_a_line(seconds, capsys):
    with show_progress():
        assert [*track(range(4), "reading", "files")] == [0, 1, 2, 3]
    with Bar("training", "steps", 4, lasting=True) as bar:
        bar.advance(4, "loss 2.50")
    assert capsys.readouterr().err == "training: 4 of 4 steps, 100%, loss 2.50\n"


def test_time_left_is_counted_from_what_was_done_before(seconds, capsys):
    with Bar("training", "steps", 100, done=80) as bar:
        seconds.now = 6.0
        bar.advance(90)
    assert "90 of 100 steps, 90%, 00:06 left" in capsys.readouterr().err


def test_nothing_is_shown_unless_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_TO_FIRST_LINE", 0)
    for enabled, lines in ((None, 0), (True, 2)):  # the first and the last
        assert [*track(range(3), "reading", "files", enabled=enabled)] == [0, 1, 2]
        assert capsys.readouterr().err.count("\n") == lines
    announce("drawing morphs")
    with show_progress():
        announce("drawing samples")
        with show_progress(False):
            announce("drawing parses")
    announce("drawing kinds")
    assert capsys.readouterr().err == "drawing samples\n"


@pytest.mark.parametrize(
    ("unit", "total", "position"), [("steps", 8, " 4/8 steps [0"), ("%", 8, " 50%|")]
)
def test_a_terminal_gets_a_bar_on_one_line(monkeypatch, unit, total, position):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Bar("training", unit, total, lasting=True) as bar:
        bar.advance(4, "2.5 steps/s, loss 3.25")
    drawn = terminal.getvalue().split("\r")
    assert position in drawn[-1] and drawn[-1].count("s/s") == 1
    assert "training" in drawn[-1] and "2.5 steps/s, loss 3.25" in drawn[-1]


def test_a_plan_is_printed_before_the_first_line_that_follows_it(seconds, capsys):
    for begin in (lambda: write_line("stage 1"), lambda: Bar("training", "steps", 2, lasting=True)):
        with announce_plan("training for two steps"):
            assert capsys.readouterr().err == ""
            begin()
            begin()
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "training for two steps" and lines.count(lines[0]) == 1
    with announce_plan("training for two steps"):
        Bar("training", "steps", 2, lasting=True, enabled=False)
    write_line("the end")
    assert capsys.readouterr().err == "the end\n"
