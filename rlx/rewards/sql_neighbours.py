"""Databases like a given one, with half of each table's rows: they tell a query that reads its
answer from one that knows it by heart. No JAX.

    SELECT 4 FROM singer LIMIT 1

gives what `SELECT count(*) FROM singer` gives, and gives it whatever the table holds. So a right
result does not count where the query gives the same on both halves of the data and the gold query
does not. A query whose result moves at all is taken to read it.
"""

import functools
import sqlite3
from collections import Counter
from contextlib import closing

from rlx.rewards.sql_guard import Limits, ReadOnly, connect, stamp
from rlx.rewards.sql_text import Stopped

HALVES = (0, 1)
MOST_BYTES = 4_000_000
"""Of a file that is copied for this; of a larger one nothing is found out."""


def by_heart(database: str, query: str, gold: str, limits: Limits) -> bool:
    """Whether the query gives its result whatever the data, and the gold query does not."""
    changed = stamp(database)
    if changed[1] > MOST_BYTES or not _moves(database, changed, gold, limits):
        return False
    return not _moves(database, changed, query, limits)


# The samples of a prompt often are the same query.
@functools.lru_cache(maxsize=8192)
def _moves(database: str, changed: tuple[int, int], query: str, limits: Limits) -> bool:
    """Whether half of the rows give another result, or none."""
    results = []
    for content in (None, *(halved(database, changed, half) for half in HALVES)):
        try:
            with ReadOnly(database, limits, content=content) as guard:
                results.append(Counter(guard.run(query).rows))
        except Stopped:
            return True
    return any(found != results[0] for found in results[1:])


@functools.lru_cache(maxsize=32)
def halved(database: str, changed: tuple[int, int], half: int) -> bytes:
    """The file's content with every other row of each table that has row numbers."""
    memory = sqlite3.connect(":memory:", isolation_level=None)
    with closing(connect(database)) as source, closing(memory) as copy:
        source.backup(copy)
        named = "SELECT name FROM sqlite_master WHERE type = ? AND name NOT LIKE 'sqlite_%'"
        for kind, change in (
            ("trigger", "DROP TRIGGER {}"),
            ("table", f"DELETE FROM {{}} WHERE rowid % 2 = {half}"),
        ):
            for (name,) in copy.execute(named, (kind,)).fetchall():
                quoted = '"' + name.replace('"', '""') + '"'
                try:
                    copy.execute(change.format(quoted))
                except sqlite3.Error:
                    continue  # without row numbers, or made up by a module: it stays whole
        return copy.serialize()
