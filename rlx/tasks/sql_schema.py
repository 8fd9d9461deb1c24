"""The schema of a sqlite file as text for a prompt: tables with columns, types and keys. No JAX.

It is written anew from what sqlite knows, not copied, so that comments, constraints and odd
spellings of a file cost no tokens and every file reads alike.
"""

import functools
import re
import sqlite3
from contextlib import closing

from model.errors import BadInput
from rlx.rewards.sql_guard import connect, stamp

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def schema_text(database: str) -> str:
    """A CREATE TABLE for each table and view of the file, in the file's order.

    Raises BadInput where the file can't be read as sqlite, or has no tables.
    """
    try:
        return _schema_text(database, stamp(database))
    except (OSError, sqlite3.Error) as error:
        raise BadInput(f"{database} can't be read as a sqlite file: {error}") from error


@functools.lru_cache(maxsize=1024)
def _schema_text(database: str, changed: tuple[int, int]) -> str:
    with closing(connect(database)) as connection:
        names = connection.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
            " AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY rowid"
        ).fetchall()
        if not names:
            raise BadInput(f"{database} has no tables.")
        return "\n".join(_table_text(connection, name) for (name,) in names)


def _table_text(connection: sqlite3.Connection, table: str) -> str:
    columns = connection.execute(
        "SELECT name, type, pk FROM pragma_table_info(?) ORDER BY cid", (table,)
    ).fetchall()
    primary = [name for name, _, place in sorted(columns, key=lambda c: c[2]) if place]
    lines = []
    for name, kind, place in columns:
        key = " PRIMARY KEY" if place and len(primary) == 1 else ""
        lines.append(f"{_name(name)} {kind}".rstrip() + key)
    if len(primary) > 1:
        lines.append(f"PRIMARY KEY ({_names(primary)})")
    keys: dict[int, list[tuple]] = {}
    for number, other, here, there in connection.execute(
        'SELECT id, "table", "from", "to" FROM pragma_foreign_key_list(?) ORDER BY id DESC, seq',
        (table,),
    ):
        keys.setdefault(number, []).append((other, here, there))
    for pairs in keys.values():
        others = [there for _, _, there in pairs]
        # without columns of its own the key refers to the other table's primary key
        target = "" if None in others else f"({_names(others)})"
        mine = _names([here for _, here, _ in pairs])
        lines.append(f"FOREIGN KEY ({mine}) REFERENCES {_name(pairs[0][0])}{target}")
    return f"CREATE TABLE {_name(table)} (\n  " + ",\n  ".join(lines) + "\n);"


def _names(names: list[str]) -> str:
    return ", ".join(map(_name, names))


def _name(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else '"' + name.replace('"', '""') + '"'
