"""Files that are either whole or as they were."""

import contextlib
import gzip
import os
import sys
from io import TextIOBase
from pathlib import Path

from model.errors import BadInput


def check_output(path: Path) -> None:
    """Makes the folder of `--output`. Raises BadInput where no file can be written there: before
    the work whose fruit it is to hold."""
    if path.is_dir():
        raise BadInput(f"--output: expected the name of a file; {path} is a folder.")
    if not _replaceable(path):
        if not os.access(path, os.W_OK):
            raise BadInput(f"--output: {path} can't be written.")
        return
    try:
        partial = _partial(path.resolve())
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise BadInput(f"--output: {path} can't be written; {error.strerror}.") from error


def standard_stream(path: Path) -> TextIOBase | None:
    """This process's own output, where the path leads to what it was turned to."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        with contextlib.suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(number)):
                return stream
    return None


def _replaceable(path: Path) -> bool:
    """Whether another file may take its place: not that of /dev/null, a terminal or a pipe."""
    return standard_stream(path) is None and (path.is_file() or not path.exists())


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def write_atomically(path: Path, text: str) -> None:
    """A reader, or a crash, sees the old file or the new one, never a part.

    A link stays one. A name that ends in `.gz` is compressed. What is no file, such as /dev/stdout,
    is written to.
    """
    if stream := standard_stream(path):
        # A second way into the same file would write over the first.
        stream.write(text)
        stream.flush()
        return
    content = text.encode("utf-8", errors="replace")
    if path.name.lower().endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    if not _replaceable(path):
        path.write_bytes(content)
        return
    path = path.resolve()
    partial = _partial(path)
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
