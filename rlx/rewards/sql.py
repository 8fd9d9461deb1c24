"""Text-to-SQL's verifier: the query in the answer gives what the gold query gives, on sqlite.

    reward = format_weight * format + syntax_weight * syntax
           + execution_weight * execution + correct

Each is 1 or 0, and a stage is reached only if the one before it was passed:

- format: the last answer block holds exactly one statement, a SELECT, VALUES or WITH of one of
  these, in a ```sql fence or without;
- syntax: sqlglot parses it in sqlite's dialect;
- execution: it runs within the limits, and no double-quoted name in it is a misspelt column;
- correct: its result is the gold query's (`sql_results`, `sql_gold`), and it reads the data if the
  gold query does, so that a number that is known by heart is no answer (`sql_neighbours`).

A query that reaches for anything but reading the schema's tables earns nothing at all, not even
what it had: no attempt to write pays. Whatever goes wrong with the gold query is an error of the
row, never the model's zero. No JAX.
"""

from collections.abc import Mapping

from rlx.rewards.blocks import completion_text, last_answer
from rlx.rewards.score import Score, weighed
from rlx.rewards.sql_gold import TOLERANCE, Gold, gold_of
from rlx.rewards.sql_guard import Limits, ReadOnly, Result
from rlx.rewards.sql_neighbours import by_heart
from rlx.rewards.sql_syntax import check_quotations, check_syntax
from rlx.rewards.sql_text import Denied, Stopped, answered_query

STAGES = ("format", "syntax", "execution", "correct")


def score(
    completion: str,
    row: Mapping,
    *,
    format_weight: float = 0.1,
    syntax_weight: float = 0.1,
    execution_weight: float = 0.2,
    column_order: bool = True,
    tolerance: float = TOLERANCE,
    query_seconds: float = 1.0,
    result_rows: int = 10_000,
) -> Score:
    """Judge a completion (without its prompt) of a row with `query`, the gold query, and
    `database`, the path of a sqlite file.

    `column_order`: the columns must stand in the gold query's order. `tolerance` is the relative
    error that a float may have. A query may take `query_seconds` and give `result_rows` rows.

    Raises RowError, a ValueError, where the row's fields are missing or of the wrong kind, or the
    gold query can't be run; sqlite3.Error where the database can't be read.
    """
    limits = Limits(query_seconds, result_rows)
    database, gold = gold_of(row, limits)
    answer = last_answer(completion_text(completion, row))
    passed: list[str] = []
    try:
        statement = answered_query(answer)
        passed.append("format")
        check_syntax(statement)
        passed.append("syntax")
        with ReadOnly(database, limits) as guard:
            check_quotations(guard, statement)
            result = guard.run(statement.text)
        passed.append("execution")
        reason = _mismatch(gold, result, column_order, tolerance)
        asked = not reason and gold.reads
        if asked and by_heart(database, statement.text, row["query"], limits):
            reason = "the result is right, and is the same whatever the tables hold"
    except Denied as denied:
        passed, reason = [], str(denied)
    except Stopped as stop:
        reason = str(stop)
    if not reason:
        passed.append("correct")
        reason = "correct"
    components = {stage: float(stage in passed) for stage in STAGES}
    each = (format_weight, syntax_weight, execution_weight, 1.0)
    weights = dict(zip(STAGES, each, strict=True))
    return weighed(components, weights, "correct" in passed, reason)


score.imports = ("sqlglot",)  # before the first row: rlx/rewards/batch.py


def _mismatch(gold: Gold, result: Result, column_order: bool, tolerance: float) -> str:
    reasons = [
        answer.mismatch(result.rows, result.columns, tolerance=tolerance, order=column_order)
        for answer in gold.answers
    ]
    if "" not in reasons:
        return reasons[0]
    if gold.reads and not result.tables:
        return "the result is right, and no table was read for it"
    return ""
