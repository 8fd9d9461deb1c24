"""From a file's rows to a task's: columns renamed, each row read and checked, some held apart.

A row that cannot be read is refused with its place and the reason, or left out and counted.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Literal, TypeVar

from model.errors import BadInput
from rlx.tasks.files import find_rows
from rlx.tasks.formats import Found

Row = TypeVar("Row")
BadRows = Literal["refuse", "skip"]

TOLD = 5
"""So many of the rows that were left out are named."""


def parsed_rows(
    path: str,
    parse: Callable[[dict], Row],
    *,
    columns: Mapping[str, str] | None = None,
    bad_rows: BadRows = "refuse",
    fields: Collection[str] = (),
) -> tuple[list[Row], tuple[str, ...]]:
    """`parse` of each row of a file or folder, and what was left out, a sentence.

    `columns` names the file's column of each field that has another name there; `fields` are those
    that there are, where a misspelt one is to be refused. `parse` raises BadInput for a row that it
    cannot use. Raises BadInput with the row's place, or where none is left.
    """
    found, columns = find_rows(path), columns or {}
    _check_columns(path, [row for _, row in found if isinstance(row, dict)], columns, fields)
    return used(found, path, lambda row: parse(renamed(row, columns)), bad_rows)


def used(
    found: Sequence[Found], path: str, parse: Callable[[dict], Row], bad_rows: BadRows
) -> tuple[list[Row], tuple[str, ...]]:
    """`parsed_rows` of rows that have been read from `path` already."""
    rows, refused = [], []
    for place, row in found:
        try:
            if isinstance(row, BadInput):
                raise row
            rows.append(parse(row))
        except BadInput as error:
            refused.append(f"{place}: {error}")
    if not refused:
        return rows, ()
    count = f"{len(refused)} of {len(found)} rows of {path}"
    if bad_rows == "refuse":
        also = f" {count} cannot be used." if len(refused) > 1 else ""
        raise BadInput(f"{refused[0]}{also} bad_rows=skip leaves such rows out.")
    if not rows:
        raise BadInput(f"None of the {len(found)} rows of {path} can be used; {refused[0]}")
    more = ["..."] if len(refused) > TOLD else []
    return rows, (f"{count} left out: " + " | ".join([*refused[:TOLD], *more]),)


def renamed(row: dict, columns: Mapping[str, str]) -> dict:
    """The row with the fields' names.

    A field that `columns` names is read from that column alone: where a row lacks it, the field is
    missing, even if a column bears the field's own name. A column that gave its name away keeps
    its own too, unless a field is called so.
    """
    rest = {name: value for name, value in row.items() if name not in columns}
    return rest | {field: row[column] for field, column in columns.items() if column in row}


def set_apart(
    rows: Sequence[Row],
    heldout: Sequence[Row] | None,
    *,
    key: Callable[[Row], Hashable],
    train_size: int,
    heldout_size: int,
    file: str,
) -> tuple[list[Row], list[Row]]:
    """Training rows (0: all that there are) and held-out ones, which share no problem.

    Held out are the first of `heldout`, or where there is none the last distinct ones of `rows`.
    None of `heldout` is trained on, beyond its first too. Raises BadInput where none is left to
    train.
    """
    if train_size < 0:
        raise BadInput(f"`train_size` must be at least 0 (0: all rows), not {train_size}.")
    if heldout_size < 1:
        # a slice [-0:] would hold out every row
        raise BadInput(f"`heldout_size` must be at least 1, not {heldout_size}.")
    if heldout is None:
        distinct: dict[Hashable, Row] = {}
        for row in rows:
            distinct.setdefault(key(row), row)
        if heldout_size >= len(distinct):
            raise BadInput(
                f"{file} holds {len(distinct)} distinct problems; heldout_size = {heldout_size} of "
                "them apart leaves none to train. Lower heldout_size, or name a heldout_file."
            )
        heldout = list(distinct.values())[-heldout_size:]
    taken = {key(row) for row in heldout}
    train = [row for row in rows if key(row) not in taken]
    if not train:
        raise BadInput(f"All problems of {file} are held-out ones; none is left to train.")
    return train[: train_size or None], list(heldout[:heldout_size])


def _check_columns(
    path: str, rows: Sequence[dict], columns: Mapping[str, str], fields: Collection[str]
) -> None:
    for field, column in columns.items():
        if fields and field not in fields:
            raise BadInput(
                f"columns: expected fields of the task, which are {', '.join(fields)}; came "
                f"{field}."
            )
        if rows and not any(column in row for row in rows):
            names = sorted({name for row in rows for name in row})
            raise BadInput(
                f"columns.{field}: expected a column of {path}, which has {', '.join(names)}; "
                f"came {column}."
            )
