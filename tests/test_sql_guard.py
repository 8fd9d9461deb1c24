"""The guard around a query: nothing is written, nothing but the tables is read, nothing hangs."""

import hashlib
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import fuzz_sql
import pytest

from rlx.rewards import sql_functions
from rlx.rewards.sql import score
from rlx.rewards.sql_guard import Limits, ReadOnly
from rlx.rewards.sql_text import Stopped

SECONDS = 0.3
"""A query may take."""
PATIENT_SECONDS = 2.0
"""Where something else than the clock is to stop it."""
LONGEST_SECONDS = 3.0
"""Until the verdict is there, on a busy machine."""

# 65,536 characters in y, and rows without an end in r
LONG = (
    "WITH RECURSIVE c(x, n) AS (SELECT 'aaaaaaaa', 1 UNION ALL SELECT x || x, n + 1 FROM c WHERE"
    " n < 14), d(y) AS (SELECT max(x) FROM c), r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) "
)


@pytest.fixture
def database(tmp_path, monkeypatch) -> str:
    """In a watched folder, which is also the current one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "music.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT); CREATE VIEW names AS SELECT"
            " upper(name) AS name FROM singer; INSERT INTO singer VALUES (1, 'Ann'), (2, 'Bob');"
        )
    return str(path)


def judged(database: str, query: str, seconds: float = SECONDS):
    row = {"query": "SELECT count(*) FROM singer", "database": database}
    start = time.monotonic()
    verdict = score(f"<answer>{query}</answer>", row, query_seconds=seconds)
    assert time.monotonic() - start < LONGEST_SECONDS, query
    return verdict


def unchanged(database: str) -> tuple:
    return hashlib.sha256(Path(database).read_bytes()).hexdigest(), sorted(os.listdir())  # noqa: PTH208


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM singer",
        "DROP TABLE singer",
        "UPDATE singer SET name = 'x' RETURNING id",
        "INSERT INTO singer VALUES (3, 'x')",
        "REPLACE INTO singer VALUES (1, 'x')",
        "WITH a AS (SELECT 1) DELETE FROM singer",
        "WITH a AS (SELECT 1) INSERT INTO singer SELECT 3, 'x'",
        "WITH a AS (SELECT 1), b AS (SELECT 2) UPDATE singer SET name = 'x'",
        "WITH SELECT DELETE FROM singer",
        "PRAGMA writable_schema = 1",
        "PRAGMA query_only = 0",
        "PRAGMA query_only = 0; DELETE FROM singer",
        "PRAGMA journal_mode = WAL",
        "VACUUM",
        "VACUUM INTO 'copy.sqlite'",
        "CREATE TABLE t (a)",
        "CREATE TEMP TABLE t (a)",
        "CREATE TEMP VIEW v AS SELECT 1",
        "ATTACH 'x.sqlite' AS x",
        "ATTACH 'x.sqlite' AS x; CREATE TABLE x.t AS SELECT 1",
        "SELECT 1; ATTACH 'x.sqlite' AS x",
        "SELECT 1;/**/DELETE FROM singer",
        "DETACH main",
        "REINDEX",
        "ANALYZE",
        "BEGIN",
        "SAVEPOINT s",
        "EXPLAIN DELETE FROM singer",
        "SELECT load_extension('./x')",
        "SELECT readfile('/etc/passwd')",
        "SELECT randomblob(1000000000)",
        "SELECT zeroblob(200000000)",
        "SELECT fts3_tokenizer('x', x'41')",
        "SELECT random()",
        "SELECT changes()",
        "SELECT * FROM sqlite_master",
        "SELECT count(*) FROM sqlite_master",
        "SELECT sql FROM SQLITE_SCHEMA",
        "SELECT count(*) FROM sqlite_temp_master",
        "SELECT name FROM pragma_table_info('singer')",
        "SELECT count(*) FROM pragma_database_list",
        "SELECT file FROM pragma_database_list",
        "SELECT * FROM dbstat",
        "SELECT count(*) FROM sqlite_stmt",
        "SELECT value FROM json_each('[1, 2]')",
    ],
)
def test_whoever_does_more_than_read_the_tables_earns_nothing(database, query):
    before = unchanged(database)
    verdict = judged(database, query)
    # a function that this sqlite lacks can't be denied, and is an error like others
    missing = "no such function" in verdict.reason or "no such table" in verdict.reason
    assert verdict.reward == (pytest.approx(0.2) if missing else 0), verdict.reason
    assert not verdict.correct and unchanged(database) == before


@pytest.mark.parametrize(
    "write", ["DELETE FROM singer", "PRAGMA query_only = 0", "VACUUM INTO 'x'"]
)
def test_the_connection_itself_denies_what_the_text_did_not_show(database, write):
    """query_only alone is undone by a PRAGMA, and a read-only file does not stop VACUUM INTO."""
    before = unchanged(database)
    with ReadOnly(database, Limits(1.0, 10)) as guard:
        with pytest.raises(Stopped, match="not allowed"):
            guard.run(write)
        assert guard.run("SELECT count(*) FROM singer").rows == [(2,)]
    assert unchanged(database) == before


@pytest.mark.parametrize(
    "query",
    [
        "SELECT count(*) FROM main.singer",
        "SELECT count(*) FROM names",
        "SELECT count(name) FROM NAMES WHERE name GLOB '*'",
        "WITH c AS (SELECT 1 FROM singer) SELECT count(*) FROM c",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 2) SELECT max(x)"
        " FROM c, singer",
        "SELECT length(printf('%s%d', 'a', 1)) FROM singer LIMIT 1",
        "SELECT sum(1) OVER () FROM singer LIMIT 1",
        "SELECT json_extract('[2]', '$[0]') FROM singer LIMIT 1",
    ],
)
def test_an_honest_query_is_let_through(database, query):
    with ReadOnly(database, Limits(1.0, 10)) as guard:
        assert guard.run(query).rows == [(2,)]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        # time
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT max(x) FROM c", " s"),
        (
            "SELECT count(*) FROM "
            + ", ".join(f"(SELECT 1 UNION SELECT 2 UNION SELECT 3) t{i}" for i in range(20)),
            " s",
        ),
        # one step each: a clock between the steps alone would come too late
        (LONG + "SELECT count(instr(y, substr(y, 1, 32000) || 'b')) FROM d, r", " s"),
        (LONG + "SELECT count(trim(y, y || 'b')) FROM d, r", " s"),
        (LONG + "SELECT count(replace(y, substr(y, 1, 32000) || 'b', '')) FROM d, r", " s"),
        (LONG + "SELECT count(y LIKE '%a%a%a%a%ab%a') FROM d, r", " s"),
        (LONG + "SELECT count(y GLOB '*a*a*a*[a]b*a') FROM d, r", " s"),
        (LONG + "SELECT count(format('%.999c%.999c', y, y)) FROM d, r", " s"),
        # rows
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT x FROM c", "rows"),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c LIMIT 100000000) SELECT x"
         " FROM c", "rows"),
        # size
        (LONG + "SELECT y FROM r CROSS JOIN d", "bytes"),
        (LONG + "SELECT group_concat(y) FROM r CROSS JOIN d", " s"),
        ("SELECT printf('%.*c', 1000000000, 'x')", "too big"),
        ("SELECT printf('%.1000000000c', 'x')", "too big"),
        ("SELECT hex(hex(hex(hex(hex(hex(hex(hex(printf('%.999c', 'x')))))))))", "too big"),
        ("SELECT replace(printf('%.999c', 'x'), 'x', printf('%.999c', 'y'))", "too big"),
        ("WITH RECURSIVE c(x) AS (SELECT 'ab' UNION ALL SELECT x || x FROM c) SELECT max(x) FROM"
         " c", "too big"),
        # depth and length
        ("SELECT " + "(" * 40 + "1" + ")" * 40, "parentheses"),
        ("SELECT " + "(" * 4000, "parentheses"),
        ("SELECT 1" + " + 1" * 500, "too large"),
        ("SELECT " + "NOT " * 2000 + "1", "parsed"),
        ("SELECT '" + "a" * 1_000_000 + "'", "longer"),
        ("SELECT 1" + " UNION SELECT 1" * 100, "compound"),
        ("SELECT 'a' LIKE '" + "%a" * 200 + "'", "too complex"),
        # each table names the one before it twice: 2 ** 20 of them before any clock runs
        (
            "WITH c0 AS (SELECT 1 a)"
            + "".join(f", c{i + 1} AS (SELECT 1 a FROM c{i} x, c{i} y)" for i in range(20))
            + " SELECT count(*) FROM c20",
            "times",
        ),
        ("SELECT ?", "bindings"),
        ("SELECT :name FROM singer", "bindings"),
    ],
)  # fmt: skip
def test_a_costly_query_is_stopped_in_time_and_keeps_its_stages(database, query, reason):
    verdict = judged(database, query, SECONDS if reason == " s" else PATIENT_SECONDS)
    assert reason in verdict.reason
    assert verdict.components["execution"] == 0
    assert 0 <= verdict.reward <= 0.2 + 1e-9


def test_a_query_that_fills_the_memory_is_stopped(database):
    """Ten seconds would be enough to sort gigabytes; the memory ends first."""
    row = {"query": "SELECT count(*) FROM singer", "database": database}
    query = LONG + "SELECT count(*) FROM (SELECT DISTINCT y || i FROM r CROSS JOIN d)"
    verdict = score(f"<answer>{query}</answer>", row, query_seconds=10.0)
    assert verdict.reason == "it takes too much memory"


VALUES = ["NULL", "''", "'a'", "'xxaxx'", "' a '", "12", "1.5", "1e20", "-0.1", "'é'", "'aaa'"]


@pytest.mark.parametrize("name", ["instr", "replace", "ltrim", "rtrim", "trim"])
def test_the_replaced_functions_give_what_sqlites_give(name):
    arguments = 3 if name == "replace" else 2
    with closing(sqlite3.connect(":memory:")) as own, closing(sqlite3.connect(":memory:")) as ours:
        function = sql_functions.REPLACED[name, arguments]
        ours.create_function(name, arguments, function, deterministic=True)
        for first in VALUES:
            for second in VALUES:
                third = ", 'b'" if name == "replace" else ""
                query = f"SELECT {name}({first}, {second}{third})"
                assert ours.execute(query).fetchall() == own.execute(query).fetchall(), query


def test_printf_within_its_widths_is_sqlites(database):
    with ReadOnly(database, Limits(1.0, 10)) as guard:
        query = "SELECT printf('%.2f|%5d|%-4s|%%|2024', 1.25, 7, 'a'), format('%c', 'x'), printf()"
        assert guard.run(query).rows == [("1.25|    7|a   |%|2024", "x", None)]


def test_a_short_fuzz_finds_nothing():
    counts = fuzz_sql.fuzz(1500, seed=7)
    assert counts["correct"] > 20 and counts["nothing"] > 20
