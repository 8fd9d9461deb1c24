"""Files that are either whole or as they were."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """A reader, or a crash, sees the old file or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
