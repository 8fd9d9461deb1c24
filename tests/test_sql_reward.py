"""Text-to-SQL's verifier: its stages, what is the same result, and Spider's gold queries."""

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.rewards.score import RowError
from rlx.rewards.sql import score
from rlx.rewards.sql_results import Answer, contained, equal

SPIDER = Path(__file__).parents[2] / "shared/data/sql_spider_en"

SCHEMA = """
CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, country TEXT, age INT, fee REAL);
INSERT INTO singer VALUES (1, 'Ann', 'France', 30, 0.3), (2, 'Bob', 'Cuba', 30, 1.5),
  (3, 'Cyd', 'France', 41, NULL), (4, 'Dee', NULL, 25, 2.0), (5, 'Ann', 'Peru', 52, 7.25);
CREATE TABLE stadium (id INTEGER PRIMARY KEY, name TEXT);
INSERT INTO stadium VALUES (1, 'North'), (2, 'South');
CREATE TABLE raw (line TEXT, data BLOB);
INSERT INTO raw VALUES (CAST(x'41FF42' AS TEXT), x'41'), (CAST(x'41FE42' AS TEXT), x'42');
CREATE TABLE blank (a INT);
"""


@pytest.fixture(scope="module")
def database(sqlite_file) -> str:
    return sqlite_file(SCHEMA)


@pytest.fixture(scope="module")
def judge(database):
    """`judge(query, gold)`: the score of a query in a well-formed answer."""

    def judge(query: str, gold: str, **options):
        row = {"query": gold, "database": database}
        return score(f"x</think><answer>{query}</answer>", row, **options)

    return judge


def test_the_stages_add_up_and_each_needs_the_one_before(judge):
    gold = "SELECT count(*) FROM singer"
    for answer, reward, reason in (
        ("", 0.0, "no statement"),
        ("the answer is 5", 0.0, "begins with THE"),
        ("SELECT FROM WHERE", 0.1, "no SQL"),
        ("SELECT nope FROM singer", 0.2, "no such column: nope"),
        ("SELECT count(*) FROM stadium", 0.4, "not those"),
        (gold, 1.4, "correct"),
    ):
        verdict = judge(answer, gold)
        assert verdict.reward == pytest.approx(reward), answer
        assert reason in verdict.reason
        assert list(verdict.components) == ["format", "syntax", "execution", "correct"]
        assert verdict.correct is (reward > 1)
    weighted = judge("SELECT 1 FROM singer", gold, format_weight=1.0, syntax_weight=2.0)
    assert weighted.reward == pytest.approx(3.2)


@pytest.mark.parametrize(
    "answer",
    [
        "SELECT 1;",
        "SELECT 1; -- c",
        "```sql\nSELECT 1\n```",
        "```SQLITE\nSELECT 1;\n```",
        "```sqlite3\nSELECT 1;\n```",
        "```\nSELECT 1```",
        "/* a; b */ SELECT 1 -- ; SELECT 2",
        "-- the query\nSELECT 1;;",
        "; SELECT 1",
        "SELECT 1 /* SELECT 2; */",
        "VALUES (1)",
        "WITH a(x) AS (SELECT 1) SELECT x FROM a",
    ],
)
def test_one_statement_is_one_whatever_surrounds_it(judge, answer):
    assert judge(answer, "SELECT 1").reward == pytest.approx(1.4)


@pytest.mark.parametrize(
    "answer",
    [
        "SELECT 1; SELECT 2",
        "SELECT 1; -- c\nSELECT 1",
        "SELECT 1;\0",
        "",
        "   ",
        "-- only",
        "/* SELECT 1 */",
        ";",
        "SELECT 'a",
        'SELECT "a',
        "Here it is: SELECT 1",
        "```sql\nSELECT 1\n``` as you see",
        "```sql\nSELECT 1\n```\n```sql\nSELECT 1\n```",
        "ＳＥＬＥＣＴ 1",
        "\u200bSELECT 1",
        "SELECT 1 \ud800",
        "EXPLAIN SELECT 1",
        "SELECT 1" + " " * 10_000 + "+ 0",
        "SELECT 1 " + "-- long" * 150_000,
    ],
)
def test_anything_else_earns_nothing_even_if_the_gold_result_is_empty(judge, answer):
    for gold in ("SELECT 1", "SELECT a FROM blank"):
        verdict = judge(answer, gold)
        assert (verdict.reward, verdict.correct) == (0, False), verdict.reason


def test_the_last_answer_block_is_the_one_that_counts(database):
    row = {"query": "SELECT 7", "database": database}
    two = "x</think><answer>SELECT 7</answer><answer>SELECT 8</answer>"
    assert not score(two, row).correct
    assert score(two.replace("8", "7"), row).correct
    assert score("SELECT 7", row).reason == "there is no answer block"
    assert score("<answer><answer>SELECT 7</answer> SELECT 8</answer>", row).correct is not None
    nested = "<answer>SELECT 8<answer>SELECT 7</answer></answer>"
    assert score(nested, row).correct


def test_an_error_is_no_empty_result(judge):
    """Counted as an empty result, a failing query would equal the gold's."""
    verdict = judge("SELECT nope FROM blank", "SELECT a FROM blank")
    assert verdict.reward == pytest.approx(0.2)
    assert judge("SELECT a FROM blank", "SELECT a FROM blank").correct
    assert not judge("SELECT count(*) FROM blank", "SELECT a FROM blank").correct
    assert not judge("SELECT a, a FROM blank", "SELECT a FROM blank").correct


@pytest.mark.parametrize(
    ("gold", "query", "same"),
    [
        # the same row twice is two rows, which sets forget
        ("VALUES ('a'), ('b')", "VALUES ('a'), ('a'), ('b')", False),
        ("VALUES ('a'), ('b')", "VALUES ('b'), ('a')", True),
        ("SELECT name FROM singer", "SELECT DISTINCT name FROM singer", False),
        # order counts where the gold query orders, and only there
        ("SELECT id FROM singer ORDER BY id", "SELECT id FROM singer ORDER BY id DESC", False),
        ("SELECT id FROM singer", "SELECT id FROM singer ORDER BY id DESC", True),
        ("SELECT id FROM (SELECT id FROM singer ORDER BY id)", "VALUES (5),(4),(3),(2),(1)", None),
        # sorted column by column these are equal
        ("VALUES ('alice', 100), ('bob', 250)", "VALUES ('alice', 250), ('bob', 100)", False),
        # execution decides, not the likeness of the text
        ("SELECT count(*) FROM stadium", "SELECT count(*) FROM singer", False),
        ("SELECT count(*) FROM singer", "SELECT count(id) FROM singer WHERE 1", True),
        # values
        ("SELECT 1", "SELECT 1.0", True),
        ("SELECT 1", "SELECT '1'", False),
        ("SELECT 'a'", "SELECT x'61'", False),
        ("SELECT 0.3", "SELECT 0.1 + 0.2", True),
        ("SELECT 0.3", "SELECT 0.30001", False),
        ("SELECT 1000001", "SELECT 1000000", False),
        ("SELECT 1000001", "SELECT 1000000.999999", True),
        ("SELECT 9007199254740993", "SELECT 9007199254740992", False),
        ("VALUES (1), (NULL)", "VALUES (NULL), (1.0)", True),
        ("VALUES (1), (NULL)", "VALUES (1), (0)", False),
        ("SELECT NULL", "SELECT ''", False),
        ("VALUES (1, 'a'), (1.0000001, 'b')", "VALUES (1.0000001, 'a'), (1, 'b')", True),
        ("VALUES (9e999), (-9e999)", "VALUES (-9e999), (9e999)", True),
        ("SELECT 9e999", "SELECT 1e308", False),
        # NULL comes first
        ("SELECT country FROM singer ORDER BY country", "VALUES (NULL),('Cuba'),('France'),"
         "('France'),('Peru')", None),
    ],
)  # fmt: skip
def test_results_are_compared_as_sqlite_has_them(judge, gold, query, same):
    verdict = judge(query, gold)
    assert verdict.components["execution"] == 1
    if same is None:  # the rows are right, and come from no table
        assert verdict.reason == "the result is right, and no table was read for it"
    else:
        assert verdict.correct is same, verdict.reason


def test_text_that_is_no_utf8_is_read_and_told_apart(judge):
    """By default sqlite3 raises on it, for the gold query too."""
    gold = "SELECT line FROM raw"
    assert judge(gold, gold).correct
    assert not judge("SELECT max(line) FROM raw UNION ALL SELECT max(line) FROM raw", gold).correct
    assert judge("SELECT data FROM raw", "SELECT data FROM raw ORDER BY data").correct


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        # a tie at the LIMIT: sqlite's own choice is not the only answer
        (
            "SELECT name FROM singer GROUP BY country ORDER BY count(*) DESC, min(age) LIMIT 1",
            ["SELECT name FROM singer WHERE id = 1"],
            ["SELECT 'Bob' FROM singer LIMIT 1"],
        ),
        (
            "SELECT id FROM singer ORDER BY age LIMIT 2",
            ["SELECT id FROM singer WHERE id IN (4, 1) ORDER BY age",
             "SELECT id FROM singer WHERE id IN (4, 2) ORDER BY age"],
            ["SELECT id FROM singer WHERE id IN (4, 1) ORDER BY age DESC",
             "SELECT id FROM singer WHERE id IN (1, 2)",
             "SELECT id FROM singer WHERE id IN (4, 3) ORDER BY age"],
        ),
        (
            "SELECT id FROM singer ORDER BY age LIMIT 1 OFFSET 2",
            ["SELECT id FROM singer WHERE id = 1", "SELECT id FROM singer WHERE id = 2"],
            ["SELECT id FROM singer WHERE id = 4", "SELECT id FROM singer WHERE id = 3"],
        ),
        # ties without a LIMIT: any order within the tie
        (
            "SELECT name, age FROM singer ORDER BY 2",
            ["SELECT name, age FROM singer ORDER BY age, id DESC",
             "SELECT name, age FROM singer ORDER BY age, id"],
            ["SELECT name, age FROM singer ORDER BY name"],
        ),
        (
            "SELECT count(*) AS n, country FROM singer GROUP BY country ORDER BY n DESC",
            ["SELECT count(*), country FROM singer GROUP BY country ORDER BY 1 DESC, 2 DESC"],
            ["SELECT count(*), country FROM singer GROUP BY country ORDER BY 1"],
        ),
        (
            "SELECT name FROM singer UNION SELECT name FROM stadium ORDER BY name COLLATE NOCASE",
            ["SELECT DISTINCT name FROM (SELECT name FROM singer UNION SELECT name FROM stadium)"
             " ORDER BY 1"],
            ["SELECT DISTINCT name FROM (SELECT name FROM singer UNION SELECT name FROM stadium)"
             " ORDER BY 1 DESC"],
        ),
        # a LIMIT without an order
        (
            "SELECT id FROM singer LIMIT 2",
            ["SELECT id FROM singer WHERE id > 3"],
            ["SELECT 1 FROM singer LIMIT 2"],
        ),
        # a tie within the query
        (
            "SELECT name FROM singer WHERE age = 30 AND id = (SELECT id FROM singer WHERE age = 30"
            " ORDER BY age LIMIT 1)",
            ["SELECT name FROM singer WHERE id = 1", "SELECT name FROM singer WHERE id = 2"],
            ["SELECT name FROM singer WHERE id = 4"],
        ),
        # sqlite's order of equal keys is nobody's to know, the order of others is
        (
            "SELECT DISTINCT country FROM singer ORDER BY country DESC",
            ["SELECT country FROM singer GROUP BY 1 ORDER BY 1 DESC"],
            ["SELECT country FROM singer GROUP BY 1 ORDER BY 1"],
        ),
        (
            "SELECT id FROM singer ORDER BY fee NULLS LAST LIMIT 4",
            ["SELECT id FROM singer WHERE fee > 0 ORDER BY fee"],
            ["SELECT id FROM singer ORDER BY fee LIMIT 4"],
        ),
    ],
)  # fmt: skip
def test_what_the_gold_query_leaves_open_is_open(judge, gold, right, wrong):
    for query in (gold, *right):
        assert judge(query, gold).correct, (query, judge(query, gold).reason)
    for query in wrong:
        verdict = judge(query, gold)
        assert verdict.components["execution"] == 1 and not verdict.correct, query


def test_the_order_of_columns_is_an_option(judge):
    gold = "SELECT name, age, id FROM singer ORDER BY id"
    turned = "SELECT id, name, age FROM singer ORDER BY id"
    assert not judge(turned, gold).correct
    assert judge(turned, gold, column_order=False).correct
    # the columns are the same, the rows are not
    mixed = "SELECT 6 - id, name, age FROM singer ORDER BY id"
    assert not judge(mixed, gold, column_order=False).correct
    many = "SELECT " + ", ".join(["id % 2"] * 30) + " FROM singer"
    assert judge(many, many, column_order=False).correct
    assert not judge(many.replace("% 2 FROM", "> 1 FROM"), many, column_order=False).correct


def test_the_tolerance_is_an_option(judge):
    assert judge("SELECT 1.01", "SELECT 1.0", tolerance=0.1).correct
    assert not judge("SELECT 1.0 + 1e-9", "SELECT 1.0", tolerance=0.0).correct


def test_a_misspelt_double_quoted_column_is_no_execution(judge):
    """sqlite reads it as text and gives rows: credit for them would reward a wrong schema."""
    gold = "SELECT name FROM singer"
    for query in (
        'SELECT "nmae" FROM singer',
        'SELECT name, "nmae" FROM singer',
        'SELECT count("nmae") FROM singer',
        'SELECT name FROM singer ORDER BY "aeg"',
        'SELECT name FROM singer GROUP BY "nmae"',
        "SELECT name FROM singer WHERE \"cuontry\" = 'Cuba'",
        'SELECT name FROM singer WHERE "cuontry" = "Cuba"',
        'SELECT name FROM singer WHERE "aeg" > 3',
        'SELECT name FROM singer WHERE "aeg" BETWEEN 3 AND 9',
    ):
        verdict = judge(query, gold)
        assert verdict.reward == pytest.approx(0.2), query
        assert "is no column" in verdict.reason


@pytest.mark.parametrize(
    "query",
    [
        'SELECT "name" FROM "singer" WHERE country = "France"',
        'SELECT name FROM singer WHERE "France" = "country"',
        'SELECT name FROM singer WHERE country LIKE "Fr%"',
        'SELECT T1."name" FROM singer AS T1 WHERE T1.country IN ("France", "Fra""nce")',
        'SELECT name FROM singer WHERE country BETWEEN "France" AND "France"',
        'SELECT name FROM singer WHERE lower(country) = lower("France")',
        'SELECT name AS "the name" FROM singer WHERE country = "France" ORDER BY "the name"',
        'SELECT name FROM singer WHERE CASE country WHEN "France" THEN 1 END',
        'SELECT name FROM singer WHERE replace(country, "Fr", "") = "ance"',
    ],
)
def test_text_in_double_quotes_is_text_where_text_stands(judge, query):
    gold = "SELECT name FROM singer WHERE country = 'France'"
    assert judge(query, gold).correct, judge(query, gold).reason


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "`query` is None"),
        ({"query": "SELECT 1"}, "`database` is None"),
        ({"query": 1, "database": "x"}, "`query` is 1"),
        ({"query": "SELECT 1", "database": "/none/such.sqlite"}, "no sqlite file /none/such"),
    ],
)
def test_a_row_that_is_itself_bad_is_told(row, message):
    with pytest.raises(RowError, match=message):
        score("<answer>SELECT 1</answer>", row)


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("SELECT nope FROM singer", "no such column: nope"),
        ("SELECT 1; SELECT 2", "more than one statement"),
        ("DELETE FROM singer", "no query"),
        ("SELECT load_extension('x')", "not allowed"),
        ("SELECT (", "no SQL"),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT x FROM c", "rows"),
    ],
)
def test_a_failing_gold_query_is_never_the_models_zero(judge, gold, message):
    for answer in ("", "SELECT 1", gold):
        with pytest.raises(RowError, match=f"gold query can't be run .*{message}"):
            judge(answer, gold)


def test_a_file_that_is_no_database_is_a_failure_of_its_own(tmp_path):
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises((sqlite3.DatabaseError, RowError)):
        score("<answer>SELECT 1</answer>", {"query": "SELECT 1", "database": str(path)})


def test_a_database_with_an_unfinished_log_is_refused(tmp_path):
    """Opened as immutable the log is not read, and old rows would be taken for the gold's."""
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript("CREATE TABLE t(a); INSERT INTO t VALUES (1);")
        with pytest.raises(RowError, match=r"unfinished changes in a\.sqlite-wal"):
            score("", {"query": "SELECT a FROM t", "database": str(path)})
    assert score("", {"query": "SELECT a FROM t", "database": str(path)}).reward == 0


def test_a_changed_file_is_read_anew(tmp_path):
    path = tmp_path / "a.sqlite"
    row = {"query": "SELECT a FROM t", "database": str(path)}
    for value, text in ((1, "x"), (2, "longer" * 1000)):
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(
                f"DROP TABLE IF EXISTS t; CREATE TABLE t(a, b); INSERT INTO t VALUES ({value},"
                f" '{text}');"
            )
        assert score(f"<answer>SELECT {value} FROM t</answer>", row).correct


values = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.floats(-2, 2).map(lambda x: round(x, 1)),
    st.sampled_from(["a", "b", "1"]),
    st.sampled_from([b"a", b"1"]),
)
tables = st.integers(1, 3).flatmap(
    lambda n: st.lists(st.tuples(*[values] * n), min_size=1, max_size=6)
)


@given(tables, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_multiset_is_itself_in_any_order_and_nothing_smaller(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    answer = Answer(len(rows[0]), (tuple(rows),), 0, len(rows))
    assert answer.mismatch(shuffled, len(rows[0]), tolerance=1e-6, order=True) == ""
    assert answer.mismatch(shuffled[1:], len(rows[0]), tolerance=1e-6, order=True)
    # another value at one place is another table
    place = random.randrange(len(rows[0]))
    other = (*shuffled[0][:place], "other", *shuffled[0][place + 1 :])
    assert answer.mismatch([other, *shuffled[1:]], len(rows[0]), tolerance=1e-6, order=True)


@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_floats_that_moved_a_little_find_their_partners(numbers, random):
    moved = [(x * (1 + random.uniform(-4e-7, 4e-7)), "a") for x in numbers]
    random.shuffle(moved)
    assert contained(moved, [(x, "a") for x in numbers], 1e-6)


def test_pairs_are_found_where_sorting_does_not_find_them():
    """In the order of their first numbers these rows pair up wrongly."""
    one = [(1.0, 5.0), (1.0000001, 9.0)]
    other = [(1.0, 9.0), (1.0000001, 5.0)]
    assert contained(one, other, 1e-6)
    assert not contained(one, [(1.0, 9.0), (1.0000001, 6.0)], 1e-6)
    assert equal(1, 1.0000001, 1e-6) and not equal(1, 2, 1e-6) and not equal("1", 1.0, 1e-6)
    assert not equal(True, "1", 1e-6) and not equal(float("inf"), 1e308, 1e-6)


def spider_rows() -> list[dict]:
    folder = SPIDER / "database"
    rows = [
        {"query": row["query"], "database": str(folder / "concert_singer/concert_singer.sqlite")}
        for row in json.loads(gzip.decompress((SPIDER / "dev.json.gz").read_bytes()))
        if row["db_id"] == "concert_singer"
    ]
    store = json.loads((SPIDER / "department_store_questions.json").read_text())
    path = str(folder / "department_store/department_store.sqlite")
    return rows + [{"query": row["output"], "database": path} for row in store]


def perturbed(query: str, row: dict) -> list[str]:
    """Queries that give another result than the gold query, whatever the data."""
    with closing(sqlite3.connect(row["database"])) as connection:
        size = len(connection.execute(query).fetchall())
    found = [f"SELECT *, 1 FROM ({query})", f"SELECT count(*) + 1000000 FROM ({query})"]
    if size:
        found += [
            f"SELECT * FROM ({query}) UNION ALL SELECT * FROM ({query})",
            f"SELECT * FROM ({query}) LIMIT {size - 1}",
            f"SELECT * FROM ({query}) WHERE 0",
        ]
    return found


@pytest.mark.skipif(not SPIDER.exists(), reason="the optional data folder is not there")
def test_spiders_gold_queries_are_right_and_perturbed_ones_wrong():
    rows = spider_rows()
    assert len(rows) == 45 + 56
    for row in rows:
        for text in (row["query"], f"\n```sql\n{row['query']};\n```\n"):
            verdict = score(f"x</think><answer>{text}</answer>", row)
            assert verdict.reward == pytest.approx(1.4), (row, verdict.reason)
        for query in perturbed(row["query"].rstrip("; "), row):
            verdict = score(f"x</think><answer>{query}</answer>", row)
            assert verdict.components["execution"] == 1 and not verdict.correct, query


@pytest.mark.skipif(not SPIDER.exists(), reason="the optional data folder is not there")
def test_a_spider_query_is_right_for_another_row_only_with_its_rows():
    """Against a plain comparison of the rows, for every pair of queries on the same database."""
    by_database: dict[str, dict[str, list]] = {}
    for row in spider_rows():
        with closing(sqlite3.connect(row["database"])) as connection:
            result = connection.execute(row["query"]).fetchall()
        by_database.setdefault(row["database"], {})[row["query"]] = result
    for database, results in by_database.items():
        for gold, wanted in results.items():
            for query, rows in results.items():
                verdict = score(f"<answer>{query}</answer>", {"query": gold, "database": database})
                if verdict.correct and sorted(map(repr, rows)) != sorted(map(repr, wanted)):
                    # only where the gold query cuts a tie
                    assert "LIMIT" in gold.upper()
                if rows == wanted:
                    assert verdict.correct or not rows, (query, gold, verdict.reason)
