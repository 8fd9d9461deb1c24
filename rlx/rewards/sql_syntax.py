"""What sqlglot says about a query: whether it is SQL, how large sqlite would make it, and which of
its double-quoted names may be meant as text.

sqlite takes `"France"` for a name, and where there is no such name for text, silently. Data sets
write their text so. It also makes rows out of a misspelt column, `SELECT "nmae" FROM singer`, which
is no sign of a valid query. So a double-quoted name that no table has may stand only where text
does: compared with something that has a column in it, in a list of values, as a result of CASE, or
as an argument beside a column. No JAX.
"""

import functools
from typing import TYPE_CHECKING

from rlx.rewards.sql_guard import ReadOnly
from rlx.rewards.sql_text import MAX_DEPTH, Statement, Stopped

if TYPE_CHECKING:
    from sqlglot import exp

MAX_EXPANSIONS = 2000
MAX_TEXTS = 32
_NO_COLUMN = "sqlite says: no such column: "


def check_syntax(statement: Statement) -> None:
    """Raise Stopped if the statement is no query in sqlite's dialect, or too large a one."""
    if statement.depth > MAX_DEPTH:
        raise Stopped(f"more than {MAX_DEPTH} parentheses stand within each other")
    if fault := _fault(statement.text):
        raise Stopped(fault)


@functools.lru_cache(maxsize=8192)
def _fault(text: str) -> str:
    try:
        tree = parsed(text)
    except Stopped as stop:
        return str(stop)
    if _expansions(tree) > MAX_EXPANSIONS:
        return f"tables of WITH would be read more than {MAX_EXPANSIONS} times"
    return ""


@functools.lru_cache(maxsize=256)
def parsed(text: str) -> "exp.Expression":
    """The tree of a single query, not to be changed; Stopped where sqlglot finds none."""
    import sqlglot  # slow to import, and only this task needs it
    from sqlglot import exp

    try:
        trees = sqlglot.parse(text, read="sqlite")
    except sqlglot.errors.SqlglotError as error:
        message = str(error).partition("\n")[0]
        raise Stopped(f"it is no SQL: {message[:200]}") from error
    except Exception as error:  # a fault of the parser's, which only an odd text brings about
        raise Stopped(f"it can't be parsed as SQL ({type(error).__name__})") from error
    if len(trees) != 1 or not isinstance(trees[0], exp.Query | exp.Values):
        raise Stopped("it is not one query")
    return trees[0]


def _expansions(tree: "exp.Expression") -> int:
    """How many tables there are once each table of a WITH is put where it is named.

    sqlite does so before it runs anything and before any clock: with each table naming the one
    before it twice, 20 of them take seconds.
    """
    from sqlglot import exp

    if tree.find(exp.CTE) is None:
        return 0
    named: dict[str, list[str]] = {}
    for table in tree.find_all(exp.CTE):
        inside = [t.name.lower() for t in table.this.find_all(exp.Table)]
        named.setdefault(table.alias.lower(), []).extend(inside)
    sizes: dict[str, int] = {}

    def size(name: str) -> int:
        if name not in sizes:
            sizes[name] = 1  # a table that names itself is not put in again
            sizes[name] = 1 + sum(size(inner) for inner in named.get(name, ()))
        return sizes[name]

    return sum(size(t.name.lower()) for t in tree.find_all(exp.Table))


def check_quotations(guard: ReadOnly, statement: Statement) -> None:
    """Raise Stopped if a double-quoted name that no table has stands where no text would."""
    if not statement.quotations:
        return
    quoted = statement.quoted()
    texts: frozenset[str] = frozenset()
    while True:
        try:
            guard.compile(statement.with_quotations(texts))
            break
        except Stopped as stop:
            unknown = str(stop).removeprefix(_NO_COLUMN)
            if unknown == str(stop) or unknown not in quoted - texts or len(texts) == MAX_TEXTS:
                raise
        texts |= {unknown}
    if not texts:
        return
    for column in _lone_names(parsed(statement.text), texts):
        if not _stands_as_text(column, texts):
            raise Stopped(f'"{column.name[:60]}" is no column, and stands where no text would')


def _lone_names(tree: "exp.Expression", names: frozenset[str]) -> list["exp.Expression"]:
    """Where these quoted names stand without a table's name before them."""
    from sqlglot import exp

    return [
        column
        for column in tree.find_all(exp.Column)
        if not column.table and column.this.args.get("quoted") and column.name in names
    ]


def _stands_as_text(column: "exp.Expression", texts: frozenset[str]) -> bool:
    from sqlglot import exp

    node, parent = column, column.parent
    while isinstance(parent, exp.Paren | exp.Collate | exp.Lower | exp.Upper):
        node, parent = parent, parent.parent
    siblings = [
        other
        for value in parent.args.values()
        for other in (value if isinstance(value, list) else [value])
        if isinstance(other, exp.Expression) and other is not node
    ]
    match parent:
        case exp.In() | exp.Between():
            return parent.this is not node
        case exp.Case():
            return parent.args.get("default") is node
        case exp.If():
            compared = isinstance(parent.parent, exp.Case) and parent.parent.this is not None
            return parent.this is not node or compared
        case exp.Escape() | exp.GroupConcat():
            return parent.this is not node
        case exp.Binary() | exp.Func():
            return any(_reads_data(other, texts) for other in siblings)
    return False


def _reads_data(node: "exp.Expression", texts: frozenset[str]) -> bool:
    from sqlglot import exp

    found = list(node.find_all(exp.Column, exp.Query, exp.Star))
    return len(found) > len(_lone_names(node, texts))
