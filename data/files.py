"""Files that are written whole or not at all, and where those that are downloaded or made lie."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.request import urlopen


class MissingData(ValueError):
    """The files of a data set are not where they were looked for, or cannot be read."""


def user_cache() -> Path:
    """The folder for files that are downloaded or made once."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "capsule-zoo"


@contextmanager
def written_whole(file: Path) -> Iterator[IO[bytes]]:
    """A stream that becomes `file` when its block ends well; until then `file` is as it was.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike, content: bytes) -> None:
    """Write a file so that `path` holds either all of `content` or what it held before.

    Raises:
        OSError: it could not be written.
    """
    with written_whole(Path(path)) as stream:
        stream.write(content)


def fetch(url: str, file: Path) -> None:
    """Download a file, whole or not at all.

    Raises:
        OSError: it cannot be reached or written, or what came is not as long as was announced.
    """
    with written_whole(file) as stream, urlopen(url, timeout=60) as reply:
        shutil.copyfileobj(reply, stream)
        announced, came = reply.headers["Content-Length"], stream.tell()
        if announced is not None and int(announced) != came:
            raise OSError(f"{came:,} bytes of {int(announced):,} came from {url}")
