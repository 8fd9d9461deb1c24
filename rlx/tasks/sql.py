"""The text-to-SQL task: a question, the schema of a sqlite file, and the gold query.

A row has `question`, `query` and `database`, the name or path of a sqlite file; Spider's `db_id`
serves as `database` too. A name is looked for in the folder `databases` as `NAME/NAME.sqlite`, as
Spider has it, and as `NAME.sqlite`. https://arxiv.org/abs/1809.08887
"""

import math
import os
from functools import partial
from pathlib import Path

from model.errors import BadInput
from rlx.rewards import sql as verifier
from rlx.rewards.blocks import last_answer
from rlx.rewards.sql_gold import gold_of
from rlx.rewards.sql_guard import Limits
from rlx.rewards.sql_text import Stopped, answered_query
from rlx.tasks.rows import BadRows, parsed_rows, set_apart
from rlx.tasks.sql_schema import schema_text
from rlx.tasks.task import Task

SUFFIXES = (".sqlite", ".db", ".sqlite3")
SYSTEM = (
    "You are a helpful assistant who writes SQL. You think the problem through first and then give"
    " the user the query."
)
INSTRUCTION = (
    "A SQLite database has this schema:\n\n{schema}\n\n"
    "Write one SQLite query that answers this question: {question}\n\n"
    "Return exactly the columns that are asked for, in the order in which they are asked for."
    " Write your reasoning in <think> </think> tags, and then only the query in <answer> </answer>"
    " tags."
)
PREFILL = "Let me think about the tables.\n<think>"


def load(
    *,
    seed: int,
    file: str,
    databases: str = "",
    heldout_file: str = "",
    train_size: int = 0,
    heldout_size: int = 64,
    columns: dict[str, str] = {},  # noqa: B006  it is only read, and shows the settings their form
    bad_rows: BadRows = "refuse",
    empty_results: bool = False,
    format_weight: float = 0.1,
    syntax_weight: float = 0.1,
    execution_weight: float = 0.2,
    column_order: bool = True,
    tolerance: float = 1e-6,
    query_seconds: float = 1.0,
    result_rows: int = 10_000,
) -> Task:
    """Questions to train on and held-out ones, each with the schema of its database in the prompt.

    Every gold query is run once; a row whose query does not run is a bad row. `databases` is the
    folder of the sqlite files; empty: the folder `database` beside `file`. Two rows with the same
    query on the same database pose the same problem. Nothing depends on the seed.

    `empty_results`: train also on rows whose gold query gives no rows or nothing but NULL, which
    any query that finds nothing gets right. The held-out rows keep theirs. `column_order`: the
    columns must stand in the gold query's order.

    Raises BadInput for settings or rows that can't be used, with the place.
    """
    weights = (format_weight, syntax_weight, execution_weight)
    _check(heldout_size, train_size, weights, tolerance, query_seconds, result_rows)
    limits = Limits(query_seconds, result_rows)
    source, notes = _read(file, databases, columns, bad_rows, limits)
    heldout, more = None, ()
    if heldout_file:
        heldout, more = _read(heldout_file, databases, columns, bad_rows, limits)
    train, held = set_apart(
        source, heldout, key=_key, train_size=0, heldout_size=heldout_size, file=file
    )
    if not empty_results:
        telling = [row for row in train if not gold_of(row, limits)[1].empty]
        if not telling:
            raise BadInput(
                f"All {len(train)} gold queries of {file} that are not held out give an empty"
                " result, which any query that finds nothing gets right."
            )
        if left := len(train) - len(telling):
            more += (
                f"{left} of {len(train)} rows of {file} are not trained on: their gold queries"
                " give empty results (empty_results = false).",
            )
        train = telling
    return Task(
        name="sql",
        train=train[: train_size or None],
        heldout=held,
        score=partial(
            verifier.score,
            format_weight=format_weight,
            syntax_weight=syntax_weight,
            execution_weight=execution_weight,
            column_order=column_order,
            tolerance=tolerance,
            query_seconds=query_seconds,
            result_rows=result_rows,
        ),
        answer=answer,
        notes=notes + more,
    )


def answer(completion: str) -> str | None:
    """The query of a completion without needless white space, for a majority vote."""
    try:
        return " ".join(answered_query(last_answer(completion)).text.split())
    except Stopped:
        return None


def make_row(question: str, query: str, database: str) -> dict:
    instruction = INSTRUCTION.format(schema=schema_text(database), question=question)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": instruction},
        {"role": "assistant", "content": PREFILL},
    ]
    return {
        "prompt": messages,
        "question": question,
        "query": query,
        "database": database,
        "prefill": PREFILL,
    }


def find_database(name: str, folder: Path) -> str:
    """The absolute path of a sqlite file that is given by its path or, in the folder, by its name.

    Raises BadInput where there is none, with the places that were looked at.
    """
    places = [folder / name]
    for suffix in SUFFIXES:
        places += [folder / name / f"{name}{suffix}", folder / f"{name}{suffix}"]
    for place in places:
        if place.is_file():
            return str(place.absolute())
    raise BadInput(
        f"There is no sqlite file for the database {name!r}; looked for {places[1]}, {places[2]}"
        " and such."
    )


def _read(
    file: str, databases: str, columns: dict[str, str], bad_rows: BadRows, limits: Limits
) -> tuple[list[dict], tuple[str, ...]]:
    folder = Path(databases or Path(file).parent / "database").expanduser()
    if databases and not folder.is_dir():
        raise BadInput(f"There is no folder {databases} (setting `databases`).")
    return parsed_rows(
        file, partial(_parse, folder=folder, limits=limits), columns=columns, bad_rows=bad_rows
    )


def _parse(row: dict, folder: Path, limits: Limits) -> dict:
    fields = {
        "question": row.get("question"),
        "query": row.get("query"),
        "database": row.get("database", row.get("db_id")),
    }
    for field, value in fields.items():
        if not isinstance(value, str) or not value.strip():
            raise BadInput(
                f"expected the texts `question`, `query` and `database` (or `db_id`); `{field}` is"
                f" {value!r}, and the row has {sorted(row)}."
            )
    database = find_database(fields["database"], folder)
    made = make_row(fields["question"].strip(), fields["query"], database)
    gold_of(made, limits)
    return made


def _key(row: dict) -> tuple[str, str]:
    return os.path.realpath(row["database"]), " ".join(row["query"].lower().split())


def _check(
    heldout_size: int,
    train_size: int,
    weights: tuple[float, ...],
    tolerance: float,
    query_seconds: float,
    result_rows: int,
) -> None:
    for name, value, least in (
        ("heldout_size", heldout_size, 1),
        ("train_size", train_size, 0),
        ("result_rows", result_rows, 1),
    ):
        if value < least:
            raise BadInput(f"`{name}` must be at least {least}, not {value}.")
    if any(not 0 <= weight < math.inf for weight in weights):
        raise BadInput(f"The weights of the stages must be numbers of at least 0, not {weights}.")
    if not 0 <= tolerance < 1:
        raise BadInput(f"`tolerance` must be from 0 to 1, not {tolerance}.")
    if not 0 < query_seconds <= 600:
        raise BadInput(f"`query_seconds` must be above 0 and at most 600, not {query_seconds}.")
