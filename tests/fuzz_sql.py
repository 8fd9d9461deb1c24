"""A program that throws hostile and odd SQL at the verifier: `python tests/fuzz_sql.py --count N`.

It makes a database in a folder of its own and scores answers that are grammar-made, cut from
attacks or changed from right ones. It stops with an error at the first exception, answer over the
time limit, changed file, new file, or acceptance that a slow and plain check refuses.
"""

import argparse
import hashlib
import json
import math
import os
import random
import re
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlx.rewards.sql import score

SECONDS = 0.05
SLACK_SECONDS = 2.0
"""A busy machine, and the rows that are still to be compared."""

SCHEMA = """
CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, country TEXT, age INT, fee REAL);
CREATE TABLE concert (id INTEGER PRIMARY KEY, place TEXT, year INT);
CREATE TABLE sung (singer INT REFERENCES singer(id), concert INT REFERENCES concert(id));
CREATE VIEW young AS SELECT name, age FROM singer WHERE age < 30;
CREATE TABLE blank (a INT, b TEXT);
CREATE TABLE odd (line TEXT, data BLOB);
INSERT INTO odd VALUES (CAST(x'41FF42' AS TEXT), x'41'), ('it''s', NULL), ('é', x'');
"""


BLOCK = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)

END = re.compile(r"(?:;|\s|--[^\n]*|/\*.*?(?:\*/|\Z))+\Z", re.DOTALL)


class Gold(NamedTuple):
    query: str
    full: str
    """Written by hand: all rows before a LIMIT, in order, the keys of the order last."""
    keys: int = 0
    limit: int | None = None
    offset: int = 0


GOLDS = [
    Gold("SELECT count(*) FROM singer", "SELECT count(*) FROM singer"),
    Gold("SELECT name, age FROM singer", "SELECT name, age FROM singer"),
    Gold("SELECT DISTINCT country FROM singer", "SELECT country FROM singer GROUP BY country"),
    Gold("SELECT a, b FROM blank", "SELECT a, b FROM blank"),
    Gold("SELECT line, data FROM odd", "SELECT line, data FROM odd"),
    Gold(
        "SELECT name FROM singer ORDER BY age DESC",
        "SELECT name, age FROM singer ORDER BY age DESC",
        1,
    ),
    Gold(
        "SELECT name, country FROM singer ORDER BY country, age LIMIT 4 OFFSET 1",
        "SELECT name, country, country, age FROM singer ORDER BY country, age",
        2,
        4,
        1,
    ),
    Gold(
        "SELECT country, count(*) AS n FROM singer GROUP BY country ORDER BY n DESC LIMIT 1",
        "SELECT country, count(*), count(*) FROM singer GROUP BY country ORDER BY 2 DESC",
        1,
        1,
    ),
    Gold("SELECT id FROM concert LIMIT 3", "SELECT id FROM concert", 0, 3),
    Gold(
        "SELECT T1.name, avg(T2.year) FROM singer AS T1 JOIN sung ON T1.id = sung.singer JOIN"
        " concert AS T2 ON T2.id = sung.concert GROUP BY T1.id",
        "SELECT (SELECT name FROM singer WHERE id = singer), avg(year) FROM sung, concert WHERE"
        " concert = concert.id AND singer IN (SELECT id FROM singer) GROUP BY singer",
    ),
    Gold(
        'SELECT avg(fee), max(age) FROM singer WHERE country = "France"',
        "SELECT avg(fee), max(age) FROM singer WHERE country = 'France'",
    ),
]

EQUALS = {
    GOLDS[0].query: ["SELECT sum(1) FROM singer", "SELECT max(id) FROM singer"],
    GOLDS[1].query: ["SELECT name, age + 0.0 FROM singer ORDER BY 2"],
    GOLDS[5].query: ["SELECT name FROM singer ORDER BY -age, id", "SELECT name FROM singer"],
    GOLDS[8].query: ["SELECT id FROM concert ORDER BY id DESC LIMIT 3"],
}

ATTACKS = """
DROP TABLE singer|DELETE FROM singer|UPDATE singer SET age = 1 RETURNING 1|VACUUM INTO 'x.db'
ATTACH 'x.db' AS x|CREATE TABLE x.t AS SELECT 1|CREATE TEMP TABLE t(a)|PRAGMA query_only = 0
PRAGMA writable_schema = 1|PRAGMA journal_mode = WAL|load_extension('./x')|readfile('/etc/passwd')
writefile('x', 'y')|randomblob(1000000)|zeroblob(1000000000)|sqlite_master
pragma_table_info('singer')
json_each('[1,2]')|dbstat|sqlite_stmt|fts3_tokenizer('x')|edit('x')|random()
printf('%.*c', 999999999, 'x')|printf('%999999999d', 1)|hex(hex(hex(hex(name))))
replace(name, '', 'x')|replace(hex(name), 'A', hex(name))
group_concat(name)|instr(name, name)|trim(name, name)
'%a%a%a%a%a' LIKE '%a%a%a%b'|REINDEX|ANALYZE
WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c
WITH RECURSIVE c(x) AS (SELECT 'ab' UNION ALL SELECT x || x FROM c) SELECT max(x) FROM c
SELECT * FROM singer a, singer b, singer c, singer d, singer e, singer f|BEGIN|COMMIT|SAVEPOINT s
EXPLAIN SELECT 1|EXPLAIN QUERY PLAN SELECT 1|; SELECT 2|;|--|/*|*/|'|"|`|[|]|(|)|\0|?|:a|@a|$a
</answer>|<answer>|```|```sql|\u200b|ＳＥＬＥＣＴ|٣|’|é|\ud800|x'41'|x'4'|1e999|0x1F|9223372036854775808
INSERT INTO singer VALUES (9, 'x', 'y', 1, 1)|REPLACE INTO singer VALUES (1, 2, 3, 4, 5)|DETACH main
main.singer|temp.singer|sqlite_temp_master|rowid|"nosuch"|singer.nope|CAST(name AS INT)|IS NOT NULL
""".replace("\n", "|").strip("|").split("|")  # fmt: skip

_WORDS = """
SELECT FROM WHERE GROUP BY ORDER HAVING LIMIT OFFSET JOIN LEFT NATURAL ON AS DISTINCT UNION ALL
EXCEPT INTERSECT WITH RECURSIVE VALUES CASE WHEN THEN ELSE END AND OR NOT IN LIKE GLOB BETWEEN IS
NULL EXISTS CAST COLLATE NOCASE DESC ASC NULLS LAST OVER PARTITION ROWS singer concert sung young
blank odd id name country age fee place year line data a b count( max( avg( sum( abs( lower(
length( 1 0 2.5 'France' "France" * , ( ) = < > + - / % || . ; !=
"""
WORDS = _WORDS.split()

_FORMS = """
({a} + {b})|({a} || {b})|({a} = {b})|abs({a})|count({a})|max({a}, {b})|CASE WHEN {a} THEN {b} END
({a} IN ({b}, 1))|CAST({a} AS TEXT)|-{a}|coalesce({a}, {b})|(SELECT {a} FROM singer)|{attack}
({a} BETWEEN {b} AND 9)|round({a}, 2)|substr({a}, {b})|sum({a}) OVER (ORDER BY {b})
printf('%s', {a})
"""
FORMS = _FORMS.strip().replace("\n", "|").replace("||", "\0").split("|")


def expression(rng: random.Random, depth: int) -> str:
    if depth <= 0 or rng.random() < 0.3:
        return rng.choice(
            ["id", "name", "age", "fee", "country", "1", "NULL", "'a'", "2.5", "x'41'", '"name"']
        )
    one, other = expression(rng, depth - 1), expression(rng, depth - 1)
    form = rng.choice(FORMS).replace("\0", "||")
    return form.format(a=one, b=other, attack=rng.choice(ATTACKS))


def query(rng: random.Random, depth: int = 2) -> str:
    source = rng.choice(["singer", "young", "concert", "singer s JOIN sung ON s.id = sung.singer"])
    if depth and rng.random() < 0.2:
        source = f"({query(rng, depth - 1)})"
    parts = [f"SELECT {rng.choice(['', 'DISTINCT '])}"]
    parts.append(", ".join(expression(rng, depth) for _ in range(rng.randint(1, 3))))
    parts.append(f" FROM {source}")
    if rng.random() < 0.4:
        parts.append(f" WHERE {expression(rng, depth)}")
    if rng.random() < 0.2:
        parts.append(f" GROUP BY {expression(rng, 1)}")
    if rng.random() < 0.3:
        parts.append(f" ORDER BY {expression(rng, 1)}{rng.choice(['', ' DESC'])}")
    if rng.random() < 0.2:
        parts.append(f" LIMIT {rng.randint(0, 9)}")
    if depth and rng.random() < 0.1:
        parts.append(f" {rng.choice(['UNION', 'UNION ALL', 'EXCEPT'])} {query(rng, depth - 1)}")
    return "".join(parts)


def changed(rng: random.Random, text: str) -> str:
    pieces = text.split(" ")
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(pieces))
        match rng.randrange(6):
            case 0:
                pieces[place] = rng.choice(WORDS)
            case 1:
                pieces.insert(place, rng.choice(WORDS))
            case 2:
                pieces.insert(place, rng.choice(ATTACKS))
            case 3 if len(pieces) > 1:
                del pieces[place]
            case 4:
                pieces[place] = pieces[place].swapcase()
            case _:
                pieces.append(rng.choice(["-- x", "/* x */", ";", "LIMIT 1", "ORDER BY 1", "DESC"]))
    return " ".join(pieces)


def answer(rng: random.Random, gold: Gold) -> str:
    match rng.randrange(10):
        case 0:
            return query(rng)
        case 1:
            return rng.choice(ATTACKS)
        case 2:
            return f"SELECT {rng.choice(ATTACKS)} FROM {rng.choice([*ATTACKS, 'singer'])}"
        case 3:
            return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 30)))
        case 4:
            return f"WITH t AS ({query(rng)}) {rng.choice([query(rng), *ATTACKS])}"
        case 5:
            piece = rng.choice(["(", "NOT ", "-", "(SELECT ", "CASE WHEN ", "1 +", "'", "[", "f("])
            return "SELECT " + piece * rng.choice([3, 30, 300, 3000]) + "1"
        case 6:
            return changed(rng, rng.choice([*EQUALS.get(gold.query, ()), gold.query]))
        case 7:
            return rng.choice([*EQUALS.get(gold.query, ()), gold.query, rng.choice(GOLDS).query])
        case 8:
            return changed(rng, rng.choice(GOLDS).query)
        case _:
            return f"SELECT * FROM ({changed(rng, gold.query)}) {rng.choice(ATTACKS)}"


def completion(rng: random.Random, text: str) -> str:
    around = rng.choice(["{}"] * 6 + ["```sql\n{}\n```", "```\n{}```", "{};", "/* ; */ {} -- ;"])
    text = around.format(text) if "{}" in around else text
    block = rng.choice(
        ["<answer>{}</answer>"] * 8
        + ["{}", "<answer>{}", "<answer>SELECT 1</answer><answer>{}</answer>"]
    )
    return rng.choice(["", "x</think>", "<think></think>\n"]) + block.replace("{}", text)


def make_database(folder: Path) -> Path:
    rng = random.Random(1)
    path = folder / "music.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)
        countries = ["France", "Peru", "Cuba", None]
        connection.executemany(
            "INSERT INTO singer VALUES (?, ?, ?, ?, ?)",
            [
                (i, rng.choice("ABCDE"), rng.choice(countries), rng.randint(20, 40), i * 0.1)
                for i in range(1, 31)
            ],
        )
        connection.executemany(
            "INSERT INTO concert VALUES (?, ?, ?)",
            [(i, rng.choice("XY"), rng.randint(2010, 2015)) for i in range(1, 9)],
        )
        connection.executemany(
            "INSERT INTO sung VALUES (?, ?)",
            [(rng.randint(1, 30), rng.randint(1, 8)) for _ in range(40)],
        )
        connection.commit()
    return path


def plainly_right(database: Path, gold: Gold, text: str) -> bool:
    """Whether the answer's rows may be the gold query's, found slowly and in another way."""
    rows, full = (plain_rows(database, sql) for sql in (text, gold.full))
    width = len(full[0]) - gold.keys if full else None
    places = full[gold.offset :][: gold.limit]
    if len(rows) != len(places) or any(len(row) != width for row in rows):
        return False
    free = list(full)
    for row, place in zip(rows, places, strict=True):
        keys = place[width:] if gold.keys else ()
        partner = next(
            (
                other
                for other in free
                if (not gold.keys or other[width:] == keys) and same(row, other[:width])
            ),
            None,
        )
        if partner is None:
            return False
        free.remove(partner)
    return True


def plain_rows(database: Path, text: str) -> list[tuple]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.text_factory = lambda value: value.decode("utf-8", "surrogateescape")
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as source:
            source.backup(connection)
        try:
            return connection.execute(text).fetchall()
        except sqlite3.ProgrammingError:  # what stands after the statement is no second one
            return connection.execute(END.sub("", text)).fetchall()


def same(one: tuple, other: tuple) -> bool:
    def numbers(*values: object) -> bool:
        return all(isinstance(value, int | float) for value in values)

    return all(
        math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12)
        if numbers(a, b)
        else type(a) is type(b) and a == b
        for a, b in zip(one, other, strict=True)
    )


def state(*folders: Path) -> dict[str, str]:
    """The files of the folders with their hashes."""
    return {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest()
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def fuzz(count: int, seed: int) -> dict:
    """Counts of what came out; AssertionError with the input at the first fault."""
    rng = random.Random(seed)
    reached = dict.fromkeys(("nothing", "format", "syntax", "execution", "correct"), 0)
    longest = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = make_database(folder)
        before, here = state(folder), sorted(os.listdir())  # noqa: PTH208  (names alone)
        for number in range(count):
            gold = rng.choice(GOLDS)
            text = answer(rng, gold)
            whole = completion(rng, text)
            row = {"query": gold.query, "database": str(database)}
            start = time.monotonic()
            try:
                verdict = score(whole, row, query_seconds=SECONDS)
            except Exception as error:
                raise AssertionError(f"an exception on {whole!r}") from error
            seconds = time.monotonic() - start
            longest = max(longest, seconds)
            assert seconds < SECONDS + SLACK_SECONDS, f"{seconds} s on {whole!r}"
            passed = [stage for stage, value in verdict.components.items() if value]
            reached[passed[-1] if passed else "nothing"] += 1
            if verdict.correct:
                inner = BLOCK.findall(whole)[-1].strip()
                inner = inner.removeprefix("```sql").removeprefix("```").removesuffix("```")
                refused = f"accepted {inner!r} for {gold.query}"
                try:
                    assert plainly_right(database, gold, inner), refused
                except sqlite3.Error as error:
                    raise AssertionError(refused) from error
            if number % 1000 == 999 or number == count - 1:
                assert state(folder) == before, f"a file has changed before input {number}"
                assert sorted(os.listdir()) == here, "a file was written"  # noqa: PTH208
    return {"count": count, "seed": seed, "longest_seconds": round(longest, 3), **reached}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(fuzz(arguments.count, arguments.seed)))
