"""The answer that a gold query gives, as far as its data determine it. No JAX.

A gold query may leave its result open, and then nobody can be asked to hit what sqlite happens to
give: two rows tie in the ORDER BY, a LIMIT cuts a tie, or a LIMIT within the query does. So

- the rows before the LIMIT are numbered by sqlite itself, equal keys alike, and rows that tie may
  stand for each other;
- the query is run again with every order that it leaves open turned round, and with ties in the
  LIMITs within it broken by the least and by the largest value; each result is an answer.
"""

import functools
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlx.rewards.score import RowError
from rlx.rewards.sql_guard import Limits, ReadOnly, Result, stamp
from rlx.rewards.sql_results import Answer
from rlx.rewards.sql_syntax import check_syntax, parsed
from rlx.rewards.sql_text import Statement, Stopped, single_query

if TYPE_CHECKING:
    from sqlglot import exp

TOLERANCE = 1e-6


class Gold(NamedTuple):
    answers: tuple[Answer, ...]
    """More than one where the query leaves its result open beyond ties of whole rows."""
    reads: bool
    """Whether it reads a table."""
    empty: bool
    """Whether its result has no rows, or nothing but NULL in them."""


def gold_of(row: Mapping, limits: Limits) -> tuple[str, Gold]:
    """The database's path and the gold query's answer of a row with `query` and `database`.

    Raises RowError, which tells the person, where the row has no such query or database, or the
    query does not run within the limits; sqlite3.Error where the file can't be read as sqlite.
    """
    for field in ("query", "database"):
        if not isinstance(row.get(field), str):
            raise RowError(
                "A row of SQL needs the texts `query`, the gold query, and `database`, the path of"
                f" a sqlite file; `{field}` is {row.get(field)!r}."
            )
    database = str(Path(row["database"]).expanduser())
    try:
        changed = stamp(database)
    except OSError as error:
        raise RowError(f"There is no sqlite file {row['database']}.") from error
    found = _gold(database, changed, row["query"], limits)
    if isinstance(found, str):
        raise RowError(
            f"The gold query can't be run on {row['database']}: {found}. It is"
            f" {row['query'][:300]!r}."
        )
    return database, found


# A fault is kept as its text: an exception would be met again for every sample of the row.
@functools.lru_cache(maxsize=2**14)
def _gold(database: str, changed: tuple[int, int], query: str, limits: Limits) -> Gold | str:
    for suffix in ("-wal", "-journal"):
        log = Path(database + suffix)
        if log.is_file() and log.stat().st_size:
            return f"the file has unfinished changes in {log.name}, and sqlite is to finish them"
    try:
        statement = single_query(query)
        check_syntax(statement)
        answer, result = _answer(database, statement, limits)
    except Stopped as stop:
        return str(stop)
    answers = [answer]
    others = [statement._replace(text=text) for text in tie_breaks(statement.text)]
    for other, reverse in [(statement, True), *((other, False) for other in others)]:
        try:
            answer, found = _answer(database, other, limits, reverse=reverse)
        except Stopped:
            continue
        if all(_mismatch(known, found) for known in answers):
            answers.append(answer)
    return Gold(
        answers=tuple(answers),
        reads=bool(result.tables),
        empty=all(value is None for row in result.rows for value in row),
    )


def _mismatch(answer: Answer, result: Result) -> str:
    return answer.mismatch(result.rows, result.columns, tolerance=TOLERANCE, order=True)


def _answer(
    database: str, statement: Statement, limits: Limits, *, reverse: bool = False
) -> tuple[Answer, Result]:
    with ReadOnly(database, limits, reverse=reverse) as guard:
        result = guard.run(statement.text)
    rows = tuple(result.rows)
    if statement.ordered or statement.limited:
        try:
            ranked, start = ranked_query(statement.text, result.columns)
            with ReadOnly(database, limits, reverse=reverse) as guard:
                found = guard.run(ranked).rows
        except Stopped:
            pass
        else:
            groups = tuple(
                tuple(row[:-1] for row in group) for _, group in groupby(found, key=itemgetter(-1))
            )
            answer = Answer(result.columns, groups, start, len(rows))
            # a check on the numbering: it must allow what the query itself gives
            if not _mismatch(answer, result):
                return answer, result
    groups = tuple((row,) for row in rows) if statement.ordered else (rows,)
    return Answer(result.columns, groups, 0, len(rows)), result


def tie_breaks(query: str) -> list[str]:
    """The query with ties in the ORDER BY of each LIMIT within it broken by what is selected there,
    upwards and downwards; none where it has no such LIMIT."""
    from sqlglot import exp

    found = []
    for descending in (False, True):
        tree = parsed(query).copy()
        inner = [
            part
            for part in tree.find_all(exp.Query)
            if part is not tree and part.args.get("limit") and part.args.get("order")
        ]
        for part in inner:
            for place in range(1, len(part.selects) + 1):
                term = exp.Ordered(this=exp.Literal.number(place), desc=descending)
                part.args["order"].append("expressions", term)
        if inner:
            found.append(tree.sql(dialect="sqlite"))
    return found


def ranked_query(query: str, columns: int) -> tuple[str, int]:
    """The query without its LIMIT and with one more column, equal for rows that tie, in order; and
    its OFFSET. Raises Stopped where that can't be written down."""
    from sqlglot import exp

    tree = parsed(query).copy()
    order, offset = tree.args.get("order"), tree.args.get("offset")
    start = 0
    if offset is not None:
        if not isinstance(offset.expression, exp.Literal) or not offset.expression.is_int:
            raise Stopped("its OFFSET is no number")
        start = int(offset.expression.name)
    for part in ("order", "limit", "offset"):
        tree.set(part, None)
    names = [f"c{i}" for i in range(1, columns + 1)]
    keys: list[exp.Expression] = []
    terms = [_term(ordered, tree, names, keys) for ordered in (order.expressions if order else ())]
    for key in keys:
        tree.select(key, append=True, copy=False)
    inner = ", ".join([*names, *(f"k{i}" for i in range(1, len(keys) + 1))])
    rank = f"dense_rank() OVER (ORDER BY {', '.join(terms)})" if terms else "1"
    return (
        f"WITH rlx_gold({inner}) AS ({tree.sql(dialect='sqlite')})"
        f" SELECT {', '.join(names)}, {rank} FROM rlx_gold ORDER BY {columns + 1}"
    ), start


def _term(
    ordered: "exp.Ordered",
    tree: "exp.Expression",
    names: list[str],
    keys: list["exp.Expression"],
) -> str:
    """A term of the ORDER BY, of a column of the result or of a key that is added to it."""
    from sqlglot import exp

    value, collation = ordered.this, ""
    if isinstance(value, exp.Collate):
        value, collation = value.this, f" COLLATE {value.expression.sql(dialect='sqlite')}"
    shown = list(tree.selects)
    starred = any(item.is_star for item in shown)
    place = None
    if isinstance(value, exp.Literal) and value.is_int:
        place = int(value.name) - 1
    elif not starred:
        place = next((i for i, item in enumerate(shown) if _is_shown(value, item)), None)
    if place is not None:
        if not 0 <= place < len(names):
            raise Stopped("its ORDER BY names no column")
        name = names[place]
    else:
        if not isinstance(tree, exp.Select) or tree.args.get("distinct"):
            raise Stopped("its order is by what it does not show")
        aliases = {item.alias.lower(): item.this for item in shown if isinstance(item, exp.Alias)}
        keys.append(value.copy().transform(_without_alias, aliases))
        name = f"k{len(keys)}"
    direction = "DESC" if ordered.args.get("desc") else "ASC"
    nulls = "FIRST" if ordered.args.get("nulls_first") else "LAST"
    return f"{name}{collation} {direction} NULLS {nulls}"


def _is_shown(value: "exp.Expression", item: "exp.Expression") -> bool:
    from sqlglot import exp

    if isinstance(value, exp.Column) and not value.table and isinstance(item, exp.Alias):
        return item.alias.lower() == value.name.lower()
    return value == item.unalias()


def _without_alias(node: "exp.Expression", aliases: dict) -> "exp.Expression":
    from sqlglot import exp

    if isinstance(node, exp.Column) and not node.table and node.name.lower() in aliases:
        return exp.Paren(this=aliases[node.name.lower()].copy())
    return node
