"""Sessions: the folder of an unfinished experiment, and the time that was spent on it."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from capsule_zoo._version import __version__
from capsule_zoo.experiments.options import Options
from capsule_zoo.records import write_json

UNFINISHED = ".unfinished"
_CLOCK = "clock.json"


@dataclass(frozen=True)
class Session:
    """The work on an experiment between two interruptions.

    Attributes:
        folder: folder of the training runs of the experiment.
        seconds_before: time that earlier sessions spent on them, until they last saved anything.
        began: when this session began, in seconds of `time.time`.
    """

    folder: Path
    seconds_before: float
    began: float

    @classmethod
    def begin(
        cls, records: Path, name: str, options: Options, settings: Mapping[str, object]
    ) -> Session:
        """Begin or go on with an experiment.

        Only the same experiment with the same options, settings and version of the zoo goes on.

        Args:
            records: folder of the records, in which the folder of the session lies.
        """
        chosen = {
            "version": __version__,
            "minutes": options.minutes,
            "seed": options.seed,
            "run": options.run,
            "device": options.device,
            "data_root": None if options.data_root is None else str(options.data_root),
            "settings": dict(settings),
        }
        key = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]
        folder = records / UNFINISHED / name / key
        before = _seconds_spent(folder)
        began = time.time()
        write_json(folder / _CLOCK, {**chosen, "seconds": before, "began": began})
        return cls(folder, before, began)

    @property
    def seconds(self) -> float:
        """The time spent by all sessions."""
        return self.seconds_before + time.time() - self.began

    def delete(self) -> None:
        """Delete the training runs."""
        shutil.rmtree(self.folder)
        _delete_empty(self.folder.parent)

    def move(self, target: Path) -> None:
        """Move the training runs to a new folder; if there are none, delete the empty folder."""
        (self.folder / _CLOCK).unlink()
        if any(self.folder.iterdir()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(self.folder, target)
        else:
            self.folder.rmdir()
        _delete_empty(self.folder.parent)


def _seconds_spent(folder: Path) -> float:
    """Return the time of all earlier sessions, each until it last saved anything."""
    clock = folder / _CLOCK
    if not clock.is_file():
        return 0.0
    earlier = json.loads(clock.read_text())
    last = max(path.stat().st_mtime for path in folder.rglob("*"))
    return earlier["seconds"] + max(0.0, last - earlier["began"])


def _delete_empty(folder: Path) -> None:
    """Delete the folders above a session that are empty, up to the folder of all sessions."""
    while folder.name and UNFINISHED in folder.parts and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
