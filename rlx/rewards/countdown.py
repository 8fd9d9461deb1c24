"""Countdown's verifier: reach the target with every given number exactly once. No JAX, no `eval`.

    reward = format_weight * format + correct

`format` is `blocks.format_score`. `correct` is 1 where the last answer block holds an expression of
this grammar, uses each given number exactly once and has the target as its exact rational value:

    expression = term {("+" | "-") term}
    term       = factor {("*" | "/") factor}
    factor     = ["-"] (number | "(" expression ")")
    number     = "0" | ASCII digit 1-9 {ASCII digit}

with spaces between tokens, and any white space around the whole. So `3--2` is 5; and `3---2`, `+3`,
`2**3`, `5//2`, `1.5`, `07`, `1_0`, `1e3`, `(3)(4)`, `1 2`, `1+2=3` and digits of other scripts are
wrong, as are an empty answer, a division by zero, more than 1,000 characters and more than 32
parentheses within each other. Wherever the last answer block stands, also inside the think block,
it is the one that counts.
"""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from numbers import Integral
from typing import Any

import numpy as np

from rlx.rewards.blocks import completion_text, format_score, last_answer
from rlx.rewards.score import RowError, Score

MAX_CHARACTERS = 1000
MAX_DEPTH = 32

_ALLOWED = re.compile(r"[0-9+\-*/() ]*")
_TOKEN = re.compile(r"[0-9]+|[+\-*/()]")


class WrongAnswer(Exception):
    """The reason why an answer is wrong; an outcome of scoring, not a failure."""


def score(completion: str, row: Mapping, *, format_weight: float = 0.1) -> Score:
    """Judge a completion (without its prompt) of a row with `nums` and `target`.

    Raises RowError, a ValueError, where the row's fields are missing or of the wrong kind.
    """
    nums, target = problem(row)
    text = completion_text(completion, row)
    layout = format_score(text)
    try:
        check(last_answer(text), nums, target)
        correct, reason = True, "correct"
    except WrongAnswer as wrong:
        correct, reason = False, str(wrong)
    components = {"format": layout, "correct": float(correct)}
    return Score(format_weight * layout + components["correct"], correct, components, reason)


def problem(row: Mapping) -> tuple[list[int], int]:
    """The row's numbers and target as plain integers; RowError names the field that is not so."""
    for field in ("nums", "target"):
        if field not in row:
            raise RowError(
                f"A countdown row needs `nums` and `target`; `{field}` is missing"
                f" (the row has {sorted(map(str, row))})."
            )
    nums, target = row["nums"], row["target"]
    if not isinstance(nums, list | tuple | np.ndarray) or len(nums) == 0:
        raise RowError(f"`nums` must be a list of whole numbers, not {nums!r}.")
    if not all(_is_whole(number) and number >= 0 for number in nums):
        raise RowError(f"`nums` must hold whole numbers that are not negative, not {nums!r}.")
    if not _is_whole(target):
        raise RowError(f"`target` must be a whole number, not {target!r}.")
    return [int(number) for number in nums], int(target)


def check(answer: str | None, nums: list[int], target: int) -> None:
    """Return if the answer solves the problem; raise WrongAnswer with the reason if not."""
    if answer is None:
        raise WrongAnswer("there is no answer block")
    answer = answer.strip()
    if not answer:
        raise WrongAnswer("the answer is empty")
    tokens = tokenize(answer)
    used = sorted(int(token) for token in tokens if token.isdigit())
    if used != sorted(nums):
        raise WrongAnswer(f"the answer does not use each of {nums} exactly once")
    value = evaluate(tokens)
    if value != target:
        raise WrongAnswer(f"the answer's value is {value}, not {target}")


def tokenize(answer: str) -> list[str]:
    """Cut an expression into numbers, operators and parentheses."""
    if len(answer) > MAX_CHARACTERS:
        raise WrongAnswer(f"the answer is longer than {MAX_CHARACTERS} characters")
    allowed = _ALLOWED.match(answer).end()
    if allowed < len(answer):
        raise WrongAnswer(f"the answer holds {answer[allowed]!r}")
    tokens = _TOKEN.findall(answer)
    for token in tokens:
        if len(token) > 1 and token[0] == "0":
            raise WrongAnswer(f"the number {token[:20]} begins with a zero")
    return tokens


def evaluate(tokens: list[str]) -> Fraction:
    """The exact value of an expression in tokens, by recursive descent."""
    depth = deepest = 0
    for token in tokens:
        depth += (token == "(") - (token == ")")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise WrongAnswer(f"more than {MAX_DEPTH} parentheses within each other")
    ahead = _Lookahead(iter(tokens))
    value = _expression(ahead)
    if ahead.token:
        raise WrongAnswer(f"{ahead.token[:20]!r} stands where an operator or the end should")
    return value


class _Lookahead:
    """The token that comes next; "" at the end."""

    def __init__(self, tokens: Iterator[str]):
        self.tokens = tokens
        self.token = next(tokens, "")

    def take(self, *wanted: str) -> str:
        """Take the next token if it is one of these; "" if not."""
        token = self.token
        if token not in wanted:
            return ""
        self.token = next(self.tokens, "")
        return token


def _expression(ahead: _Lookahead) -> Fraction:
    value = _term(ahead)
    while operator := ahead.take("+", "-"):
        other = _term(ahead)
        value = value + other if operator == "+" else value - other
    return value


def _term(ahead: _Lookahead) -> Fraction:
    value = _factor(ahead)
    while operator := ahead.take("*", "/"):
        other = _factor(ahead)
        if operator == "/" and other == 0:
            raise WrongAnswer("the answer divides by zero")
        value = value * other if operator == "*" else value / other
    return value


def _factor(ahead: _Lookahead) -> Fraction:
    sign = -1 if ahead.take("-") else 1
    if ahead.take("("):
        value = _expression(ahead)
        if not ahead.take(")"):
            raise WrongAnswer("a parenthesis is not closed")
        return sign * value
    number = ahead.token
    if not number.isdigit():
        raise WrongAnswer(f"{number!r} stands where a number should" if number else "it breaks off")
    ahead.take(number)
    return sign * Fraction(int(number))


def _is_whole(value: Any) -> bool:
    # bool is an Integral, and `true` in a file is no number
    return isinstance(value, Integral) and not isinstance(value, bool)
