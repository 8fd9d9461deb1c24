"""The text of a query: taken from an answer, cut into sqlite's tokens, seen to be one statement.

The tokens decide what is one statement and where its parentheses and quotations are; whether it is
SQL is for sqlglot and sqlite to say. No JAX.
"""

import re
from typing import NamedTuple

MAX_CHARACTERS = 10_000
MAX_DEPTH = 32
"""Parentheses within each other."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t\n\f\r]++|--[^\n]*+|/\*(?!\Z)(?:[^*]|\*(?!/))*+(?:\*/|\Z))
    |(?P<string>'[^']*+(?:''[^']*+)*+')
    |(?P<double>"[^"]*+(?:""[^"]*+)*+")
    |(?P<name>`[^`]*+(?:``[^`]*+)*+`|\[[^]]*+\])
    |(?P<word>[A-Za-z0-9_$\x80-\U0010ffff]++)
    |(?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)
_FENCE = re.compile(r"```(?:sqlite3?|sql)?[ \t]*\n?((?:(?!```).)*+)```", re.DOTALL | re.IGNORECASE)
_QUERIES = frozenset({"SELECT", "VALUES"})
# what may follow the tables of a WITH
_VERBS = _QUERIES | {"INSERT", "UPDATE", "DELETE", "REPLACE"}
_BEFORE_VERB = frozenset({"AS", "MATERIALIZED"})


class Stopped(Exception):
    """Why a query gets no further; an outcome of scoring, not a failure."""


class Denied(Stopped):
    """The query reaches for something other than reading the schema's tables."""


class Statement(NamedTuple):
    """One statement that begins as a query does."""

    text: str
    """Without the comments and semicolons around it."""
    ordered: bool
    """It has an ORDER BY outside of all parentheses."""
    limited: bool
    """It has a LIMIT outside of all parentheses."""
    depth: int
    """How deep parentheses stand within each other."""
    quotations: tuple[tuple[int, int], ...]
    """Where the text in double quotes stands, which sqlite takes for names or for text."""

    def quoted(self) -> frozenset[str]:
        """What stands in double quotes."""
        return frozenset(_unquoted(self.text[start:end]) for start, end in self.quotations)

    def with_quotations(self, texts: frozenset[str]) -> str:
        """The statement with `texts` in single quotes and other double-quoted names in backticks.

        In backticks a name is never taken for text.
        """
        pieces, last = [], 0
        for start, end in self.quotations:
            inner = _unquoted(self.text[start:end])
            mark = "'" if inner in texts else "`"
            pieces += [self.text[last:start], mark, inner.replace(mark, mark * 2), mark]
            last = end
        return "".join([*pieces, self.text[last:]])


def answered_query(answer: str | None) -> Statement:
    """The one query that an answer block holds, in a ```sql fence or without; Stopped if not so."""
    if answer is None:
        raise Stopped("there is no answer block")
    answer = answer.strip()
    if len(answer) > MAX_CHARACTERS:
        raise Stopped(f"the answer is longer than {MAX_CHARACTERS} characters")
    if fence := _FENCE.fullmatch(answer):
        answer = fence[1]
    elif answer.startswith("```"):
        raise Stopped("the fence does not enclose the whole answer")
    return single_query(answer)


def single_query(text: str) -> Statement:
    """The one query that the text holds; Stopped where it holds none, several or something else."""
    if "\0" in text or not _is_unicode(text):
        raise Stopped("the statement holds a character that is none")
    start = end = -1
    depth = deepest = 0
    closed = False
    words, quotations = [], []
    for token in _TOKEN.finditer(text):
        kind, piece = token.lastgroup, token[0]
        if kind == "space":
            continue
        if piece == ";":
            closed = start >= 0
            continue
        if closed:
            raise Stopped("there is more than one statement")
        if kind == "mark":
            if piece in "'\"`[":
                raise Stopped("a quotation is not closed")
            depth += (piece == "(") - (piece == ")")
            deepest = max(deepest, depth)
        elif kind == "word" and depth == 0:
            words.append(piece.upper())
        elif kind == "double":
            quotations.append((token.start(), token.end()))
        if start < 0:
            if kind != "word":
                raise Stopped(f"the statement begins with {piece[:20]} and is no query")
            start = token.start()
        end = token.end()
    if start < 0:
        raise Stopped("there is no statement")
    _check_verb(words)
    return Statement(
        text=text[start:end],
        ordered="ORDER" in words,
        limited="LIMIT" in words,
        depth=deepest,
        quotations=tuple((first - start, last - start) for first, last in quotations),
    )


def _check_verb(words: list[str]) -> None:
    verb = words[0]
    if verb == "WITH":
        # it comes right after the last table's parentheses, which hide what is in them
        after = zip(words[1:], words, strict=False)
        verb = next(
            (word for word, before in after if word in _VERBS and before in _BEFORE_VERB),
            "WITH without a query",
        )
    if verb not in _QUERIES:
        raise Stopped(f"the statement begins with {verb[:20]} and is no query")


def _unquoted(quotation: str) -> str:
    return quotation[1:-1].replace('""', '"')


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which sqlite cannot be given
        return False
    return True
