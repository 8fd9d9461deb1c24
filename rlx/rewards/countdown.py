"""Countdown's verifier: reach the target with every given number exactly once. No JAX, no `eval`.

    reward = format_weight * format + correct + line_weight * lines

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

`lines` is the share of sound lines among the lines of reasoning that hold an equals sign. It is
there only for a `line_weight` above 0; each sound line then earns its part of the reward at its own
place. The reasoning ends at the first `</think>` or `<answer>`. A line is sound if

- each of its equals signs stands in an equation `a op b = c` of whole numbers that is true and is
  not part of a longer one,
- each equation takes its two numbers from what the line has left: the given numbers, the target and
  the results of earlier sound lines, each once, and the results of the line's own equations,
- one of its equations is said for the first time, `a + b` and `b + a` being the same.

So a repeated line, `1*1=1` with a single 1, `7+7=14` without a 7, and an equation that only looks
like one earn nothing and lower the share. No number of lines earns more than `line_weight`; a
single sound line earns all of it, so the weight should be small beside 1.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from rlx.rewards.blocks import completion_text, format_score, last_answer
from rlx.rewards.score import RowError, Score, Span, weighed

MAX_CHARACTERS = 1000
MAX_DEPTH = 32
MAX_LINES = 200
"""Lines with an equals sign after these earn nothing."""

_ALLOWED = re.compile(r"[0-9+\-*/() ]*")
_TOKEN = re.compile(r"[0-9]+|[+\-*/()]")

_REASONING_ENDS = re.compile(r"</think>|<answer>")
_WORD = re.compile(r"[0-9]+(?:\.[0-9]+)?|\S")
_WHOLE = re.compile(r"0|[1-9][0-9]{0,8}")
# what makes an equation a part of a longer one
_JOINS_BEFORE = frozenset("+-*/=)×÷^")
_JOINS_AFTER = frozenset("+-*/=(×÷^!%")
_HOLDS = {
    "+": lambda a, b, c: a + b == c,
    "-": lambda a, b, c: a - b == c,
    "*": lambda a, b, c: a * b == c,
    "/": lambda a, b, c: b != 0 and a == b * c,
}


class WrongAnswer(Exception):
    """The reason why an answer is wrong; an outcome of scoring, not a failure."""


class Equation(NamedTuple):
    """`a op b = c`, as it is written."""

    a: int
    op: str
    b: int
    c: int

    @property
    def statement(self) -> tuple:
        """The same for `a + b` and `b + a`."""
        operands = (self.a, self.b)
        return self.op, tuple(sorted(operands)) if self.op in "+*" else operands


def score(
    completion: str, row: Mapping, *, format_weight: float = 0.1, line_weight: float = 0.0
) -> Score:
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
    weights = {"format": format_weight, "correct": 1.0}
    if line_weight <= 0:
        return weighed(components, weights, correct, reason)
    sound, counted = sound_lines(completion, nums, target)
    spans = tuple(Span(start, end, line_weight / counted) for start, end in sound)
    components["lines"] = len(sound) / counted if counted else 0.0
    weights["lines"] = line_weight
    return weighed(components, weights, correct, reason, spans)


score.bounded = True  # it ends soon whatever it reads: rlx/rewards/batch.py


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


def sound_lines(completion: str, nums: list[int], target: int) -> tuple[list[tuple[int, int]], int]:
    """Where the sound lines of the reasoning begin and end, and how many lines were counted."""
    end = _REASONING_ENDS.search(completion)
    reasoning = completion[: end.start()] if end else completion
    found: list[tuple[int, int]] = []
    stated: set[tuple] = set()
    results: set[int] = set()
    counted = start = 0
    for line in reasoning.split("\n"):
        if "=" in line:
            counted += 1
            if counted <= MAX_LINES and (
                equations := _sound_equations(line, Counter([*nums, target, *results]), stated)
            ):
                found.append((start, start + len(line.rstrip())))
                stated.update(equation.statement for equation in equations)
                results.update(equation.c for equation in equations)
        start += len(line) + 1
    return found, counted


def _sound_equations(line: str, left: Counter, stated: set[tuple]) -> list[Equation]:
    """The line's equations; none where it is not sound. `left` are the numbers it may use."""
    equations = _equations(line)
    for equation in equations:
        left.subtract((equation.a, equation.b))
        if min(left[equation.a], left[equation.b]) < 0:
            return []
        left[equation.c] += 1
    return equations if any(e.statement not in stated for e in equations) else []


def _equations(line: str) -> list[Equation]:
    """What a line states; none if one of its equals signs stands in no true `a op b = c`."""
    if len(line) > MAX_CHARACTERS:
        return []
    # padded, so that the first and the last equals sign have all their neighbours
    words = ["", "", "", "", *_WORD.findall(line), "", ""]
    equations = []
    for i in (i for i, word in enumerate(words) if word == "="):
        before, a, op, b, _, c, after = words[i - 4 : i + 3]
        whole = all(_WHOLE.fullmatch(number) for number in (a, b, c))
        if not whole or op not in _HOLDS or before in _JOINS_BEFORE or after in _JOINS_AFTER:
            return []
        equation = Equation(int(a), op, int(b), int(c))
        if not _HOLDS[op](equation.a, equation.b, equation.c):
            return []
        equations.append(equation)
    return equations


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
