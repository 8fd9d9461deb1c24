"""Rows of one file: JSON lines, JSON, CSV, Parquet and Arrow, each with its place.

A row is a dict; a CSV file's values are texts, as they stand there.
"""

import codecs
import csv
import gzip
import io
import json
import math
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from model.errors import BadInput

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")

Found = tuple[str, dict | BadInput]
"""A row, or why it is none, behind its place: `file:line`, or `file, row n`."""


def suffix_of(path: Path) -> str:
    """The one of SUFFIXES that a name ends in, without `.gz`; "" where it ends in none."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix if name.endswith(SUFFIXES) else ""


def find_in_file(path: Path) -> list[Found]:
    """Each row or what is wrong with it. Raises BadInput for a fault of the whole file."""
    match suffix_of(path):
        case ".jsonl":
            return find_json_lines(path)
        case ".json":
            return _json(path)
        case ".csv":
            return _csv(path)
        case ".parquet":
            return _parquet(path)
    raise BadInput(f"{path} must end in one of {', '.join(SUFFIXES)}.")


def find_json_lines(path: Path) -> list[Found]:
    """Each line's object, whatever the file's name ends in."""
    # by b"\n" alone: str.splitlines also cuts at U+2028 and U+0085, which a JSON string may hold
    lines = enumerate(_read_bytes(path).split(b"\n"), start=1)
    return [(f"{path}:{number}", _object(line)) for number, line in lines if line.strip()]


def read_json(path: Path) -> Any:
    """A whole file's value. Raises BadInput where it holds none."""
    try:
        return _parse(_read_bytes(path))
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error


def read_csv_records(path: Path) -> list[tuple[str, list[str]]]:
    """The records of a CSV file (RFC 4180: quotes, and newlines within them), a header's among
    them, each with the `file:line` that it begins at. Blank lines are passed over."""
    try:
        text = _text(_read_bytes(path))
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    records: list[tuple[str, list[str]]] = []
    # the library's limit of 131,072 characters a field is one for the whole process
    limit = csv.field_size_limit(max(len(text), csv.field_size_limit()))
    # newline="": a quoted field keeps its line ends, and only \n and \r end a line
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        for record in reader:
            if record:
                records.append((f"{path}:{line}", record))
            line = reader.line_num + 1
    except csv.Error as error:
        raise BadInput(f"{path}:{line}: this is not CSV ({error}).") from error
    finally:
        csv.field_size_limit(limit)
    return records


def find_arrow(path: Path) -> list[Found]:
    """The rows of a file as `datasets` writes it."""
    import pyarrow.ipc  # slow to import

    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            return _numbered(path, stream.read_all().to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{path} can't be read as Arrow: {error}") from error


def _parquet(path: Path) -> list[Found]:
    import pyarrow.parquet  # slow to import, and few runs read Parquet

    try:
        # read_table would make columns of folders such as `lang=en` above the file
        with pyarrow.parquet.ParquetFile(path) as file:
            return _numbered(path, file.read().to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{path} can't be read as Parquet: {error}") from error


def _json(path: Path) -> list[Found]:
    content = read_json(path)
    if isinstance(content, dict):
        content = content.get("data")
    if not isinstance(content, list):
        raise BadInput(
            f'{path} must hold a list of objects or {{"data": [...]}};'
            " a file with one object a line is to be named .jsonl."
        )
    return _numbered(path, [row if isinstance(row, dict) else _no_object(row) for row in content])


def _csv(path: Path) -> list[Found]:
    records = read_csv_records(path)
    if not records:
        return []
    (place, names), *rest = records
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"{place}: the header has the columns {twice} more than once.")
    expected = f"expected {len(names)} fields, as in the header ({', '.join(names)})"
    return [
        (
            place,
            dict(zip(names, record, strict=True))
            if len(record) == len(names)
            else BadInput(f"{expected}; came {len(record)}."),
        )
        for place, record in rest
    ]


def _numbered(path: Path, rows: list[dict | BadInput]) -> list[Found]:
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if path.name.lower().endswith(".gz"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path} can't be read: {error}") from error
    return content.removeprefix(codecs.BOM_UTF8)


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"this is not UTF-8 text ({error}).") from error


def _parse(content: bytes) -> Any:
    try:
        # NaN and the infinities are no JSON, though common in files; they read as null
        value = json.loads(
            _text(content),
            parse_constant=lambda _: None,
            parse_float=_finite,
            object_pairs_hook=_each_once,
        )
        if b"\\ud" in content.lower():
            # An escape may name half of a surrogate pair, which no tokenizer takes.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except BadInput:
        raise
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("ascii", "backslashreplace").decode()
        raise BadInput(f"{half} is half of a character (a surrogate without its pair).") from error
    except (ValueError, RecursionError) as error:
        message = str(error)
        if "Extra data" in message:
            message += "; a file with one object a line is to be named .jsonl"
        raise BadInput(f"this is not JSON ({message}).") from error


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None  # 1e999


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise BadInput(f"{', '.join(map(repr, twice))} stands there twice.")
    return row


def _object(line: bytes) -> dict | BadInput:
    try:
        row = _parse(line)
    except BadInput as error:
        return error
    return row if isinstance(row, dict) else _no_object(row)


def _no_object(row: Any) -> BadInput:
    return BadInput(f"expected a JSON object, got {str(row)[:80]!r}.")
