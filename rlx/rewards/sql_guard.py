"""A query run on a sqlite file that it can only read, within limits. No JAX.

What holds a query back, each enough by itself for most attacks:

- The file is opened read-only and as immutable, so that no lock or journal is written; temporary
  tables stay in memory.
- An authorizer lets it read the schema's own tables, recurse, and call the functions of a list.
- Limits of sqlite on the length of values, patterns and programs and on the depth of expressions; a
  progress handler with a clock; limits on the rows and the size of a result; a limit on the memory
  that sqlite may take in this process, which once set holds for every connection of the process.
- One call of a function is one step to the clock, however long it takes. So the few functions that
  could take seconds are replaced.
"""

import functools
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from rlx.rewards.sql_functions import FUNCTIONS, REPLACED
from rlx.rewards.sql_text import Denied, Stopped

MAX_VALUE_BYTES = 100_000
"""A longer text or blob in the data cannot be read either."""
MAX_RESULT_BYTES = 16_000_000
MAX_MEMORY_BYTES = 128_000_000
STEPS_BETWEEN_CHECKS = 50
"""Few, since each may be a call that takes a thousandth of a second."""

_LIMITS = (
    (sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES),
    (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 20_000),
    (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
    (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 50),
    (sqlite3.SQLITE_LIMIT_VDBE_OP, 50_000),
    (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 200),
    (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
    (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
)
# Failures that are not the query's; SQLITE_AUTH is one where the authorizer has not said why.
_FAILURES = frozenset(
    {
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_PROTOCOL,
    }
)
_ACTIONS = {
    value: name.removeprefix("SQLITE_").replace("_", " ")
    for name, value in vars(sqlite3).items()
    if re.match("SQLITE_(ALTER|ANALYZE|ATTACH|CREATE|DETACH|DELETE|DROP|INSERT)", name)
    or re.match("SQLITE_(PRAGMA|REINDEX|SAVEPOINT|TRANSACTION|UPDATE)", name)
}

Row = tuple
"""Of None, int, float, str and bytes."""


class Limits(NamedTuple):
    seconds: float
    rows: int


class Result(NamedTuple):
    columns: int
    rows: list[Row]
    tables: frozenset[str]
    """The tables and views that the query reads."""


class ReadOnly:
    """A connection for one answer, a context; the clock starts with it.

    `reverse` turns round every order that a query leaves open. `content` stands in the place of
    the file's, with the same schema.
    """

    def __init__(
        self,
        database: str,
        limits: Limits,
        *,
        reverse: bool = False,
        content: bytes | None = None,
    ):
        _limit_memory()
        self.limits = limits
        self.tables = tables_of(database, *stamp(database))
        self._read: set[str] = set()
        self._denied = ""
        self._late = False
        self._replaced: set[str] = set()
        self._connection = connect(database, content)
        if reverse:
            self._connection.execute("PRAGMA reverse_unordered_selects = 1")
        for limit, value in _LIMITS:
            self._connection.setlimit(limit, value)
        self._connection.set_authorizer(self._authorize)
        self._end = time.monotonic() + limits.seconds
        self._connection.set_progress_handler(self._is_late, STEPS_BETWEEN_CHECKS)

    def __enter__(self) -> "ReadOnly":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def compile(self, query: str) -> None:
        """Raise as `run` would before it reads a row."""
        self._guarded("EXPLAIN " + query, lambda cursor: None)

    def run(self, query: str) -> Result:
        """Raises Denied, or Stopped for any other fault of the query; sqlite3.Error for a fault
        that is not the query's."""
        columns, rows = self._guarded(query, self._fetch)
        return Result(columns, rows, frozenset(self._read))

    def _guarded(self, query: str, fetch: Callable) -> object:
        self._read, self._denied = set(), ""
        self._replace_functions(query)
        try:
            return fetch(self._connection.execute(query))
        except MemoryError as error:
            raise Stopped("it takes too much memory") from error
        except sqlite3.Error as error:
            if self._denied:
                raise Denied(f"it tries {self._denied}, which is not allowed") from error
            if self._late:
                raise Stopped(f"it takes longer than {self.limits.seconds:g} s") from error
            # an error of Python's module, such as a parameter without its value, has no code
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
            if code & 0xFF in _FAILURES:
                raise
            raise Stopped(f"sqlite says: {str(error)[:200]}") from error

    def _fetch(self, cursor: sqlite3.Cursor) -> tuple[int, list[Row]]:
        rows, size = [], 0
        for row in cursor:
            rows.append(row)
            size += 16 * len(row) + sum(len(v) for v in row if isinstance(v, str | bytes))
            if len(rows) > self.limits.rows:
                raise Stopped(f"its result has more than {self.limits.rows} rows")
            if size > MAX_RESULT_BYTES:
                raise Stopped(f"its result is larger than {MAX_RESULT_BYTES} bytes")
        return len(cursor.description or ()), rows

    def _is_late(self) -> bool:
        self._late = time.monotonic() > self._end
        return self._late

    def _authorize(
        self,
        action: int,
        first: str | None,
        second: str | None,
        database: str | None,
        _: str | None,
    ) -> int:
        if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ:
            name, own = first.lower(), database in (None, "main")
            if own and name in self.tables:
                self._read.add(name)
                return sqlite3.SQLITE_OK
            # a table of the query's own, of which no column is read, is asked about by its name
            hidden = name in modules() or name.startswith(("sqlite_", "pragma_"))
            if own and not second and not hidden:
                return sqlite3.SQLITE_OK
            self._denied = f"to read {first[:60]}"
        elif action == sqlite3.SQLITE_FUNCTION:
            if second.lower() in FUNCTIONS:
                return sqlite3.SQLITE_OK
            self._denied = f"to call {second[:60]}()"
        elif action == sqlite3.SQLITE_UPDATE and first == "sqlite_master":
            self._denied = "to read a virtual table"  # which sqlite makes up at this moment
        else:
            self._denied = _ACTIONS.get(action, f"action {action}")
        return sqlite3.SQLITE_DENY

    def _replace_functions(self, query: str) -> None:
        lowered = query.lower()
        for (name, arguments), function in REPLACED.items():
            if name in lowered and name not in self._replaced:
                self._connection.create_function(name, arguments, function, deterministic=True)


def connect(database: str, content: bytes | None = None) -> sqlite3.Connection:
    """A connection that reads and writes nothing, without the limits of a query: to the file, or to
    `content` in memory."""
    connection = sqlite3.connect(
        _address(database) if content is None else ":memory:",
        uri=content is None,
        isolation_level=None,
        cached_statements=0,
    )
    if content is not None:
        connection.deserialize(content)
    # bytes that are no UTF-8 survive and differ from each other
    connection.text_factory = _text
    connection.execute("PRAGMA query_only = 1")
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


@functools.lru_cache(maxsize=1024)
def _address(database: str) -> str:
    return f"file:{quote(str(Path(database).absolute()))}?mode=ro&immutable=1"


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def stamp(database: str) -> tuple[int, int]:
    """What changes when the file does. OSError where there is none."""
    found = Path(database).stat()
    return found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=1024)
def tables_of(database: str, changed: int, size: int) -> frozenset[str]:
    """The names of the tables and views, in lower case; none of sqlite's own."""
    connection = connect(database)
    try:
        names = connection.execute(
            "SELECT lower(name) FROM sqlite_master WHERE type IN ('table', 'view')"
        ).fetchall()
    finally:
        connection.close()
    return frozenset(name for (name,) in names if not name.startswith("sqlite_"))


@functools.cache
def _limit_memory() -> None:
    """For every connection of this process, once and for all."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute(f"PRAGMA hard_heap_limit = {MAX_MEMORY_BYTES}")
    finally:
        connection.close()


@functools.cache
def modules() -> frozenset[str]:
    """The virtual tables that this sqlite brings along, which any query could read."""
    connection = sqlite3.connect(":memory:")
    try:
        return frozenset(name for (name,) in connection.execute("PRAGMA module_list"))
    finally:
        connection.close()
