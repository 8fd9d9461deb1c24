"""What is known by heart is no answer: the same on both halves of the data."""

import sqlite3
from contextlib import closing

import pytest

from rlx.rewards.sql import score
from rlx.rewards.sql_guard import stamp
from rlx.rewards.sql_neighbours import halved

SCHEMA = """
CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, age INT);
INSERT INTO singer VALUES (1, 'Ann', 30), (2, 'Bob', 30), (3, 'Cyd', 41), (4, 'Dee', 25);
CREATE TABLE code (key TEXT PRIMARY KEY, value INT) WITHOUT ROWID;
INSERT INTO code VALUES ('a', 7), ('b', 8);
CREATE TABLE "odd ""name" (a INT);
INSERT INTO "odd ""name" VALUES (1), (2);
CREATE TRIGGER kept BEFORE DELETE ON singer BEGIN SELECT raise(ABORT, 'no'); END;
CREATE VIEW old AS SELECT * FROM singer WHERE age > 29;
"""


@pytest.fixture(scope="module")
def database(sqlite_file) -> str:
    return sqlite_file(SCHEMA)


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (
            "SELECT count(*) FROM singer",
            ["SELECT count(id) FROM singer", "SELECT sum(1) FROM singer"],
            [
                "SELECT 4 FROM singer LIMIT 1",
                "SELECT 4 + 0 * max(id) FROM singer",
                "SELECT count(DISTINCT 1) + 3 FROM singer",
                "WITH t AS (SELECT 4 AS n) SELECT n FROM t, singer LIMIT 1",
            ],
        ),
        (
            "SELECT name FROM singer ORDER BY age DESC LIMIT 1",
            ["SELECT name FROM singer WHERE age = (SELECT max(age) FROM old)"],
            ["SELECT 'Cyd' FROM singer LIMIT 1", "SELECT 'Cyd' FROM code LIMIT 1"],
        ),
        ("SELECT count(*) FROM old", ["SELECT count(*) FROM singer WHERE age > 29"], []),
        # the gold query itself gives the same whatever the data
        ("SELECT DISTINCT 1 FROM singer", ["SELECT 1 FROM singer LIMIT 1"], []),
        # nothing is halved there
        ("SELECT value FROM code WHERE key = 'a'", ["SELECT 7 FROM code LIMIT 1"], []),
    ],
)
def test_what_gives_its_answer_whatever_the_data_is_wrong(database, gold, right, wrong):
    row = {"query": gold, "database": database}
    for query in (gold, *right):
        assert score(f"x</think><answer>{query}</answer>", row).correct, query
    for query in wrong:
        verdict = score(f"x</think><answer>{query}</answer>", row)
        assert verdict.components["execution"] == 1 and not verdict.correct, query
        assert "the same whatever the tables hold" in verdict.reason


def test_the_halves_are_a_whole_and_the_file_is_left_alone(database):
    before = stamp(database)
    rows: list = []
    for half in (0, 1):
        with closing(sqlite3.connect(":memory:")) as copy:
            copy.deserialize(halved(database, before, half))
            rows += copy.execute("SELECT * FROM singer").fetchall()
            assert copy.execute('SELECT count(*) FROM "odd ""name"').fetchall() == [(1,)]
            assert copy.execute("SELECT count(*) FROM code").fetchall() == [(2,)]
    assert sorted(rows) == [(1, "Ann", 30), (2, "Bob", 30), (3, "Cyd", 41), (4, "Dee", 25)]
    assert stamp(database) == before
