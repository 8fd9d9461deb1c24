"""Rows from files: one file, a folder of files or of `datasets`, or a hub's data set by its name.

Errors name file and line.
"""

import re
from pathlib import Path
from typing import Any

from model.errors import BadInput
from rlx.tasks.formats import (
    SUFFIXES,
    Found,
    find_arrow,
    find_in_file,
    find_json_lines,
    read_json,
    suffix_of,
)

SPLITS = ("train", "test", "validation", "valid", "val", "dev")
# a data set folder's own description, beside its rows
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+){0,2}")
"""`org/name`, `org/name:split` or `org/name:configuration:split`."""


def read_rows(path: str | Path) -> list[dict]:
    """The rows of a file or folder, in order, a folder's files by name."""
    return [row for _, row in read_located_rows(path)]


def read_located_rows(path: str | Path) -> list[tuple[str, dict]]:
    """Each row with the place it came from (`file:line`, or `file, row n`), for messages.

    Raises BadInput where nothing can be read, with the place and what was expected there.
    """
    return _sound(find_rows(path))


def read_json_lines(path: Path) -> list[tuple[str, dict]]:
    """Each line's object with its `file:line`; the file's name may end in anything.

    Blank lines and a byte order mark are passed over.
    """
    return _sound(find_json_lines(path))


def find_rows(path: str | Path) -> list[Found]:
    """Each row or what is wrong with it, behind its place.

    Raises BadInput for a fault of the whole: no such file, no rows, text that is no JSON or CSV.
    """
    if not str(path):
        raise BadInput("`file` must name the rows to read; it is empty.")
    name, path = str(path), Path(path).expanduser()
    if path.is_dir():
        rows = _folder(path)
    elif path.exists():
        rows = find_in_file(path)
    elif _on_a_hub(name, path):
        rows = _hub(name)
    else:
        raise BadInput(f"There is no file or folder {path}.")
    if not rows:
        raise BadInput(f"{path} holds no rows.")
    return rows


def _sound(found: list[Found]) -> list[tuple[str, dict]]:
    for place, row in found:
        if isinstance(row, BadInput):
            raise BadInput(f"{place}: {row}")
    return found


def _folder(folder: Path) -> list[Found]:
    if (folder / "dataset_dict.json").is_file():
        splits = _listed(folder / "dataset_dict.json", "splits")
        return _folder(folder / _only_split(splits, folder))
    if (folder / "state.json").is_file():
        # by the list that is in there: beside the data may lie what the library cached of it
        files = _listed(folder / "state.json", "_data_files")
        return [row for file in files for row in find_arrow(folder / file["filename"])]
    return [row for file in _files_of(folder) for row in find_in_file(file)]


def _files_of(folder: Path) -> list[Path]:
    files = sorted(
        file
        for file in folder.rglob("*")
        if suffix_of(file) and file.is_file() and file.name not in DESCRIPTIONS
    )
    if not files:
        raise BadInput(f"The folder {folder} holds no {', '.join(SUFFIXES)} file.")
    splits = {split for file in files if (split := split_of(file.relative_to(folder)))}
    if len(splits) > 1:
        # read together, the test split would be trained on
        names = ", ".join(str(file.relative_to(folder)) for file in files)
        raise BadInput(f"The folder {folder} holds several splits ({names}); name one of them.")
    return files


def split_of(file: Path) -> str:
    """Of `test.csv`, `test-00000.parquet`, `anatomy_test.csv` and `test/0.json`: test."""
    stem = file.name.lower().removesuffix(".gz").rpartition(".")[0]
    words = re.split(r"[-_.]", stem)
    places = [words[0], words[-1], *(folder.lower() for folder in file.parts[:-1])]
    return next((place for place in places if place in SPLITS), "")


def _listed(file: Path, key: str) -> list[Any]:
    content = read_json(file)
    listed = content.get(key) if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise BadInput(f"{file} must hold a list `{key}`, as `datasets` writes it.")
    return listed


def _on_a_hub(name: str, path: Path) -> bool:
    # a misspelt path of this machine would wait for a network; with a split it is none
    local = suffix_of(path) or (":" not in name and path.parent.is_dir())
    return HUB_NAME.fullmatch(name) is not None and not local


def _only_split(splits: list[str], place: str | Path, separator: str = "/") -> str:
    if len(splits) == 1:
        return splits[0]
    if not splits:
        raise BadInput(f"{place} holds no split.")
    raise BadInput(
        f"{place} holds several splits ({', '.join(splits)}); name one of them, such as "
        f"{place}{separator}{splits[0]}."
    )


def _hub(name: str) -> list[Found]:
    try:
        import datasets  # optional: only the names of a hub need it
    except ImportError as error:
        raise BadInput(
            f"There is no file or folder {name}; to read a hub's data set of that name, install "
            "the package: pip install datasets"
        ) from error
    repository, *chosen = name.split(":")
    split = chosen[-1] if chosen else None
    try:
        rows = datasets.load_dataset(repository, *chosen[:-1], split=split)
    # Over the network it raises of many kinds, those of the libraries below it among them.
    except Exception as error:
        raise BadInput(
            f"There is no file or folder {name}, and as a hub's data set it cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if split is None:
        rows = rows[_only_split(list(rows), name, ":")]
    return [(f"{name}, row {number}", dict(row)) for number, row in enumerate(rows, start=1)]
