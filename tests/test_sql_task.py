"""The text-to-SQL task: its rows from files, the schema in the prompt, and what is left out."""

import json
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rlx.tasks.sql import answer, find_database, load
from rlx.tasks.sql_schema import schema_text

SPIDER = Path(__file__).parents[2] / "shared/data/sql_spider_en"

SCHEMA = """
CREATE TABLE "the singer" (id INTEGER PRIMARY KEY, "full name" VARCHAR(20) /* a comment */, age);
CREATE TABLE sung (singer INT, concert INT, note TEXT DEFAULT 'x', PRIMARY KEY (singer, concert),
  FOREIGN KEY (singer) REFERENCES "the singer", FOREIGN KEY (concert) REFERENCES concert (id));
CREATE TABLE concert (id INT CHECK (id > 0));
CREATE VIEW old AS SELECT age FROM "the singer" WHERE age > 60;
INSERT INTO "the singer" VALUES (1, 'Ann', 30), (2, 'Bob', 70);
"""
TEXT = """\
CREATE TABLE "the singer" (
  id INTEGER PRIMARY KEY,
  "full name" VARCHAR(20),
  age
);
CREATE TABLE sung (
  singer INT,
  concert INT,
  note TEXT,
  PRIMARY KEY (singer, concert),
  FOREIGN KEY (singer) REFERENCES "the singer",
  FOREIGN KEY (concert) REFERENCES concert(id)
);
CREATE TABLE concert (
  id INT
);
CREATE TABLE old (
  age
);"""


def make_database(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)
    return str(path)


def row(number: int, **fields) -> dict:
    return {
        "question": f"What is {number}?",
        "query": f"SELECT age + {number} FROM [the singer]",
        "database": "music",
    } | fields


@pytest.fixture
def write(tmp_path):
    """`write(name, rows)`: the path of a JSON lines file beside the folder `database`."""
    make_database(tmp_path / "database/music/music.sqlite")

    def write(name: str, rows: list[dict]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_the_schema_is_told_with_its_keys_and_nothing_else(tmp_path):
    database = make_database(tmp_path / "a.sqlite")
    assert schema_text(database) == TEXT


def test_a_file_without_tables_or_of_another_kind_is_refused(tmp_path):
    for name, content, message in (
        ("a.sqlite", b"", "no tables"),
        ("b.sqlite", b"x" * 5000, "can't be read as a sqlite file"),
        ("c.sqlite", None, "can't be read as a sqlite file"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            schema_text(str(tmp_path / name))


def test_a_row_becomes_a_prompt_that_its_gold_query_answers(write):
    task = load(seed=0, file=write("a.jsonl", [row(n) for n in range(5)]), heldout_size=2)
    assert (task.name, len(task.train), len(task.heldout)) == ("sql", 3, 2)
    first = task.train[0]
    system, user, assistant = first["prompt"]
    assert [m["role"] for m in first["prompt"]] == ["system", "user", "assistant"]
    assert TEXT in user["content"] and "What is 0?" in user["content"]
    assert assistant["content"] == first["prefill"] and first["prefill"].endswith("<think>")
    assert system["content"]
    verdict = task.score(f"x</think><answer>{first['query']}</answer>", first)
    assert verdict.correct and verdict.reward == pytest.approx(1.4)
    again = pickle.loads(pickle.dumps(task.score))
    assert again("x</think><answer>SELECT 1</answer>", first).reward == pytest.approx(0.4)


def test_the_settings_reach_the_verifier(write):
    rows = [row(n, query=f"SELECT id, age + {n} FROM [the singer]") for n in range(3)]
    task = load(
        seed=0,
        file=write("a.jsonl", rows),
        heldout_size=1,
        format_weight=0.5,
        syntax_weight=0.0,
        execution_weight=0.25,
        column_order=False,
        tolerance=0.5,
        query_seconds=0.5,
        result_rows=5,
    )
    turned = "<answer>SELECT age + 0.1, id FROM [the singer]</answer>"
    assert task.score(turned, task.train[0]).reward == pytest.approx(1.75)
    many = "<answer>VALUES (1), (2), (3), (4), (5), (6)</answer>"
    assert "more than 5 rows" in task.score(many, task.train[0]).reason


def test_paraphrases_of_a_held_out_query_are_not_trained_on(write):
    """Spider asks for each query in two ways; one of them in training would give the other away."""
    rows = [row(1), row(2), row(3)]
    rows += [row(3, question="And 3?", query="select  age + 3 from [the singer]")]
    task = load(seed=0, file=write("a.jsonl", rows), heldout_size=1)
    assert [r["question"] for r in task.train] == ["What is 1?", "What is 2?"]
    heldout = write("b.jsonl", [row(2, question="Another way to ask?")])
    task = load(seed=0, file=write("a.jsonl", rows), heldout_file=heldout, train_size=2)
    assert [r["question"] for r in task.train] == ["What is 1?", "What is 3?"]
    assert [r["question"] for r in task.heldout] == ["Another way to ask?"]


def test_empty_gold_results_are_not_trained_on_unless_asked_for(write):
    """`SELECT age ... WHERE 0` would be right on each of them."""
    rows = [row(n) for n in range(3)]
    rows += [row(9, query="SELECT id FROM concert"), row(8, query="SELECT max(id) FROM concert")]
    file = write("a.jsonl", [*rows[2:], *rows[:2]])
    task = load(seed=0, file=file, heldout_size=1)
    assert [r["question"] for r in task.train] == ["What is 2?", "What is 0?"]
    assert "2 of 4 rows" in task.notes[0] and "empty" in task.notes[0]
    assert len(load(seed=0, file=file, heldout_size=1, empty_results=True).train) == 4
    with pytest.raises(ValueError, match=r"All 1 gold queries .* empty"):
        load(seed=0, file=write("b.jsonl", rows[3:]), heldout_size=1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"query": None}, "`query` is None"),
        ({"question": ""}, "`question` is ''"),
        ({"database": "none"}, "no sqlite file for the database 'none'"),
        ({"query": "SELECT nope FROM sung"}, "gold query can't be run .*no such column: nope"),
        ({"query": "DROP TABLE sung"}, "no query"),
    ],
)
def test_a_bad_row_is_refused_with_its_place_or_skipped_and_counted(write, bad, message):
    file = write("a.jsonl", [row(1), row(2), row(3, **bad), row(4)])
    with pytest.raises(ValueError, match=rf"a\.jsonl:3: .*{message}"):
        load(seed=0, file=file, heldout_size=1)
    task = load(seed=0, file=file, heldout_size=1, bad_rows="skip")
    assert len(task.train) == 2
    assert len(task.notes) == 1 and "1 of 4 rows" in task.notes[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"databases": "/none/such"}, "no folder /none/such"),
        ({"format_weight": -0.1}, "weights"),
        ({"execution_weight": float("nan")}, "weights"),
        ({"tolerance": 1.0}, "`tolerance`"),
        ({"query_seconds": 0.0}, "`query_seconds`"),
        ({"result_rows": 0}, "`result_rows`"),
        ({"heldout_size": 0}, "`heldout_size`"),
        ({"heldout_size": 9}, "leaves none to train"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(write, settings, message):
    file = write("a.jsonl", [row(n) for n in range(3)])
    with pytest.raises(ValueError, match=message):
        load(seed=0, file=file, **({"heldout_size": 1} | settings))


def test_databases_are_found_by_name_or_path(tmp_path):
    for place in ("a/a.sqlite", "b.db", "c.sqlite", "deep/d.sqlite3"):
        make_database(tmp_path / place)
    for name, place in (
        ("a", "a/a.sqlite"),
        ("b", "b.db"),
        ("c", "c.sqlite"),
        ("deep/d.sqlite3", "deep/d.sqlite3"),
        (str(tmp_path / "b.db"), "b.db"),
    ):
        assert find_database(name, tmp_path) == str(tmp_path / place)


def test_the_answer_for_a_vote_is_the_query_without_its_layout():
    one = answer("x</think><answer>```sql\nSELECT 1\n  FROM a;\n```</answer>")
    assert one == answer("y</think><answer>SELECT 1 FROM a -- this</answer>") == "SELECT 1 FROM a"
    assert answer("no block") is None and answer("<answer>DROP TABLE a</answer>") is None


@pytest.mark.skipif(not SPIDER.exists(), reason="the optional data folder is not there")
def test_spider_is_read_as_it_comes():
    dev = SPIDER / "dev.json.gz"
    settings = {"seed": 0, "databases": str(SPIDER / "database"), "heldout_size": 8}
    task = load(file=str(dev), bad_rows="skip", empty_results=True, **settings)
    assert "989 of 1034 rows" in task.notes[0]  # the databases of 45 are there
    rows = task.train + task.heldout
    assert "CREATE TABLE singer_in_concert" in rows[0]["prompt"][1]["content"]
    assert all(task.score(f"<answer>{r['query']}</answer>", r).correct for r in rows)
    held = {" ".join(r["query"].lower().split()) for r in task.heldout}
    assert not held & {" ".join(r["query"].lower().split()) for r in task.train}

    columns = {"question": "instruction", "query": "output"}
    file = str(SPIDER / "department_store_questions.json")
    store = load(file=file, columns=columns, **settings)
    assert len(store.heldout) == 8 and len(store.train) + 2 * len(store.heldout) >= 48
    assert not store.notes
