"""Atomic writing of files, downloads, and the folder of cached files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.request import urlopen

from capsule_zoo.data.progress import track

MEGABYTE = 10**6


class MissingData(ValueError):
    """Error: files of a data set are absent or cannot be read."""


def user_cache() -> Path:
    """Return the cache folder for files that are downloaded or computed once."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "capsule-zoo"


def expand_home(path: str | os.PathLike) -> Path:
    """Expand `~` or `~user` in a path, if the home folder exists."""
    return Path(os.path.expanduser(path))


@contextmanager
def written_whole(file: Path) -> Iterator[IO[bytes]]:
    """Yield a stream whose content replaces `file` when the block ends without an error.

    Raises:
        OSError: the file could not be written; `file` is then unchanged.
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
    """Write a file atomically: `path` holds either all of `content` or its earlier content.

    Raises:
        OSError: the file could not be written.
    """
    with written_whole(Path(path)) as stream:
        stream.write(content)


def fetch(url: str, file: Path) -> None:
    """Download a file atomically.

    Raises:
        OSError: the file cannot be reached or written, or it is not as long as announced.
    """
    with written_whole(file) as stream, urlopen(url, timeout=60) as reply:
        announced = reply.headers["Content-Length"]
        parts = None if announced is None else -(-int(announced) // MEGABYTE)
        blocks = iter(lambda: reply.read(MEGABYTE), b"")
        for block in track(blocks, f"downloading {file.name}", "MB", parts):
            stream.write(block)
        came = stream.tell()
        if announced is not None and int(announced) != came:
            raise OSError(f"{came:,} bytes of {int(announced):,} came from {url}")
