"""Commands say what they are about to do and how far they are; a log gets whole lines only."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from terminal import run, small_words

from capsule_zoo.data import progress
from capsule_zoo.experiments import study
from capsule_zoo.experiments.study import side_by_side

SIZES = ["--set", "image_shape=[1, 12, 12]", *small_words("vae", "image_shape")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "vae"
    assert run("train", "vae", *SIZES, "--steps", 3, "--out", folder, "--quiet") == 0
    return folder


@pytest.fixture
def printed(monkeypatch, capsys):
    """Return a function that runs a command and returns the lines of stderr and of stdout."""
    monkeypatch.setattr(progress, "SECONDS_TO_FIRST_LINE", 0)

    def lines(*arguments: object) -> tuple[list[str], list[str]]:
        assert run(*arguments) == 0
        out, err = capsys.readouterr()
        assert err.replace("\n", "").isprintable()
        return err.splitlines(), out.splitlines()

    return lines


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (("evaluate", "--images", 3), "evaluating: 1 of 1 passes"),
        (("figure", "samples"), "drawing samples"),
        (("figure", "samples"), "drawing images: 1 of 1 batches"),
        (("compare", "--images", 3, "--guides", "auto_normal", "--tune-steps", 2), "guide 1 of 1:"),
        (("compare", "--images", 3, "--guides", "auto_normal", "--tune-steps", 2), "training: 1 o"),
    ],
)
def test_measuring_shows_progress_beside_its_result(command, line, printed, trained):
    name, *options = command
    where = [*options[:1], trained, *options[1:]] if name == "figure" else [trained, *options]
    messages, result = printed(name, *where)
    assert any(message.startswith(line) for message in messages), messages
    assert result and not any(message.startswith(line) for message in result)


@pytest.fixture
def threads(monkeypatch):
    """Run the jobs of a study in threads, which start at once."""
    monkeypatch.setattr(study, "ProcessPoolExecutor", lambda n, *_: ThreadPoolExecutor(n))


@pytest.mark.usefixtures("threads")
def test_an_error_ends_the_jobs_that_have_not_begun():
    calls, number_of_jobs = [], 6_000  # ten minutes, which no busy machine takes to notice

    def job(number: int) -> None:
        calls.append(number)
        if number == 1:
            raise KeyError("the reason")
        time.sleep(0.2)

    with pytest.raises(KeyError, match="the reason"):
        side_by_side(job, range(number_of_jobs), 2)
    assert len(calls) < number_of_jobs
