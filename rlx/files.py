"""Files that are either whole or as they were."""

import os
from pathlib import Path

from model.errors import BadInput


def check_output(path: Path) -> None:
    """Makes the folder of `--output`. Raises BadInput where no file can be written there: before
    the work whose fruit it is to hold."""
    if path.is_dir():
        raise BadInput(f"--output: expected the name of a file; {path} is a folder.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(path)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise BadInput(f"--output: {path} can't be written; {error.strerror}.") from error


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def write_atomically(path: Path, text: str) -> None:
    """A reader, or a crash, sees the old file or the new one, never a part."""
    partial = _partial(path)
    with partial.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
