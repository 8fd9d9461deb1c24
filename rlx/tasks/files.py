"""Rows from files: JSON lines, JSON, Parquet, or a folder of those. Errors name file and line."""

import codecs
import json
from pathlib import Path
from typing import Any

from model.errors import BadInput

SUFFIXES = (".jsonl", ".json", ".parquet")
SPLITS = ("train", "test", "validation", "valid", "val", "dev")
# a data set folder's own description, beside its rows
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")


def read_rows(path: str | Path) -> list[dict]:
    """The rows of a file or folder, in order, a folder's files by name."""
    return [row for _, row in read_located_rows(path)]


def read_located_rows(path: str | Path) -> list[tuple[str, dict]]:
    """Each row with the place it came from (`file:line`, or `file, row n`), for messages.

    Raises BadInput where nothing can be read, with the place and what was expected there.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        rows = [row for file in _files_of(path) for row in read_located_rows(file)]
    elif not path.exists():
        raise BadInput(f"There is no file or folder {path}.")
    elif path.suffix == ".jsonl":
        rows = read_json_lines(path)
    elif path.suffix == ".json":
        rows = _read_json(path)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        raise BadInput(f"{path} must end in one of {', '.join(SUFFIXES)}.")
    if not rows:
        raise BadInput(f"{path} holds no rows.")
    return rows


def read_json_lines(path: Path) -> list[tuple[str, dict]]:
    """Each line's object with its `file:line`; the file's name may end in anything.

    Blank lines and a byte order mark are passed over.
    """
    rows = []
    # by b"\n" alone: str.splitlines also cuts at U+2028 and U+0085, which a JSON string may hold
    for number, line in enumerate(_read_bytes(path).split(b"\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            rows.append((place, _as_row(_parse(line, place), place)))
    return rows


def _files_of(folder: Path) -> list[Path]:
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix in SUFFIXES and file.is_file() and file.name not in DESCRIPTIONS
    )
    if not files:
        raise BadInput(f"The folder {folder} holds no {', '.join(SUFFIXES)} file.")
    splits = {split for file in files if (split := _split_of(file))}
    if len(splits) > 1:
        # read together, the test split would be trained on
        names = ", ".join(str(file.relative_to(folder)) for file in files)
        raise BadInput(f"The folder {folder} holds several splits ({names}); name one of them.")
    return files


def _split_of(file: Path) -> str:
    stem = file.stem.lower()
    return next((s for s in SPLITS if stem == s or stem.startswith((s + "-", s + "_"))), "")


def _read_json(path: Path) -> list[tuple[str, dict]]:
    content = _parse(_read_bytes(path), str(path))
    if isinstance(content, dict):
        content = content.get("data")
    if not isinstance(content, list):
        raise BadInput(
            f'{path} must hold a list of objects or {{"data": [...]}};'
            " a file with one object a line is to be named .jsonl."
        )
    places = [f"{path}, row {number}" for number in range(1, len(content) + 1)]
    return [(place, _as_row(row, place)) for place, row in zip(places, content, strict=True)]


def _read_parquet(path: Path) -> list[tuple[str, dict]]:
    import pyarrow.parquet  # slow to import, and few runs read Parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{path} can't be read as Parquet: {error}") from error
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise BadInput(f"{path} can't be read: {error}") from error


def _parse(content: bytes, place: str) -> Any:
    try:
        # NaN and the infinities are no JSON, though common in files; they read as null
        return json.loads(content.decode("utf-8"), parse_constant=lambda _: None)
    except UnicodeDecodeError as error:
        raise BadInput(f"{place}: this is not UTF-8 text ({error}).") from error
    except (ValueError, RecursionError) as error:
        message = str(error)
        if "Extra data" in message:
            message += "; a file with one object a line is to be named .jsonl"
        raise BadInput(f"{place}: this is not JSON ({message}).") from error


def _as_row(row: Any, place: str) -> dict:
    if not isinstance(row, dict):
        raise BadInput(f"{place}: expected a JSON object, got {str(row)[:80]!r}.")
    return row
