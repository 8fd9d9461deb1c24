r"""The verifier of mathematics: one answer, read by a stated rule, against the gold one. No JAX.

    reward = format_weight * format + correct

`extraction` says which part of the completion is the answer, and no other part is tried:

- `hashes`: what follows the last `####` on its line;
- `boxed`: what the last `\boxed{}` with balanced braces holds, of nested ones the outermost;
- `block`: what the last answer block holds;
- `last_number`: the last number of the text, a fraction or a percentage included;
- `any`, for texts of unknown origin: of the first three what ends last; where there is none of
  them, the last number, or the formula between dollar signs that ends with it or after it.

`correct` is 1 where `maths_equal.equal` finds the answer to be the row's `answer`: one number,
expression, list, interval, matrix or word. A text that lists more than it is asked for, is longer
than 400 characters, nests deeper than 24 brackets, holds invisible characters or digits of other
scripts, divides by zero or towers up powers is wrong.

`format` is `blocks.format_score` under `block`. Under the other rules it is 1 where the answer
stands there in its form, not empty and once, else 0; under `any`, in one of the first three forms.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Literal, NamedTuple

from rlx.rewards import maths_answer, maths_equal
from rlx.rewards.blocks import completion_text, format_score, last_answer
from rlx.rewards.maths_text import Unreadable
from rlx.rewards.score import RowError, Score, weighed

Extraction = Literal["hashes", "boxed", "block", "last_number", "any"]

_HASHES = re.compile(r"(?<!#)####(?!#)")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*+\{|\\.|[{}]", re.S)
_FORMULA = re.compile(r"(?<!\\)\${1,2}([^$\n]{1,400})\${1,2}")
# Digits of every script, so that one which is none of ours is refused and not passed over.
_LAST_NUMBER = re.compile(
    r"(?:(?<![\w)\]}\-−])[-−])?"
    r"(?:(?:\d++\s?)?\\[dtc]?frac\s?(?:\{-?\d++\}\{-?\d++\}|\d\s?\d)"
    r"|(?:\d++(?:[,.\u200b-\u200f\u2060\ufeff]\d++)*+|\.\d++)(?:\s?/\s?\d++)?)"
    r"(?:\s?\\?%)?"
)


class Found(NamedTuple):
    """The answer that a rule finds."""

    text: str | None
    """None where the rule finds none."""
    formed: bool
    """Whether it stands there in its form, once."""
    end: int = -1
    """Where it ends in the text."""


def score(
    completion: str, row: Mapping, *, extraction: Extraction = "any", format_weight: float = 0.1
) -> Score:
    """Judge a completion (without its prompt) of a row with `answer`.

    The gold answer may be a number, a text, or a worked solution, of which `final_answer` counts.
    Raises RowError, a ValueError, where it is missing or cannot be read.
    """
    gold = gold_answer(row)
    text = completion_text(completion, row)
    found = extract(text, extraction)
    layout = format_score(text) if extraction == "block" else float(found.formed)
    correct, reason = verdict(gold, found.text, extraction)
    components = {"format": layout, "correct": float(correct)}
    weights = {"format": format_weight, "correct": 1.0}
    return weighed(components, weights, correct, reason)


score.imports = ("math_verify", "mpmath")  # before the first row: rlx/rewards/batch.py


def gold_answer(row: Mapping) -> maths_answer.Answer:
    """The row's answer, read; RowError where it is missing, of the wrong kind or unreadable."""
    if "answer" not in row:
        raise RowError(
            f"A row of maths needs `answer`, which is missing (the row has"
            f" {sorted(map(str, row))})."
        )
    answer = row["answer"]
    # bool is an int, and an integer of a million digits would take long to write out
    if isinstance(answer, int) and not isinstance(answer, bool) and abs(answer) < 10**300:
        answer = str(answer)
    elif isinstance(answer, float) and abs(answer) < 1e300:
        answer = f"{Decimal(repr(answer)):f}"  # 1e-05 is no way to write an answer
    if not isinstance(answer, str):
        came = "an integer of more than 300 digits" if type(answer) is int else repr(answer)
        raise RowError(f"`answer` must be a text or a finite number, not {came}.")
    try:
        return _gold(answer)
    except Unreadable as error:
        shown = answer if len(answer) <= 80 else answer[:77] + "..."
        raise RowError(
            f"`answer` must be a mathematical answer, not {shown!r}: {error}."
        ) from error


@lru_cache(maxsize=8192)
def _gold(answer: str) -> maths_answer.Answer:
    return maths_answer.read(final_answer(answer))


def final_answer(solution: str) -> str:
    r"""What follows the last `####` of a worked solution, or its last `\boxed{}` holds; a text
    that has neither is the answer itself."""
    for found in (last_hashes(solution), last_box(solution)):
        if found.text is not None:
            return found.text
    return solution


def verdict(gold: maths_answer.Answer, answer: str | None, extraction: str) -> tuple[bool, str]:
    """Whether the answer is right, and why."""
    if answer is None:
        return False, f"there is no answer by the rule `{extraction}`"
    try:
        if maths_equal.equal(gold, maths_answer.read(answer)):
            return True, "correct"
    except Unreadable as unreadable:
        return False, str(unreadable)
    except (ArithmeticError, IndexError, ValueError) as error:
        maths_equal.equal(gold, maths_answer.read("0"))  # else it is the gold one's fault
        return False, f"the answer cannot be read: {type(error).__name__}: {error!s:.200}"
    return False, f"the answer {_shown(answer.strip())!r} is not {gold.text!r}"


def given_answer(completion: str, *, extraction: Extraction) -> str | None:
    """The completion's answer, the same text for answers that are plainly the same."""
    answer = extract(completion_text(completion, {"prefill": ""}), extraction).text
    if answer is None:
        return None
    try:
        return maths_answer.canonical(maths_answer.read(answer))
    except Unreadable:
        return None


def extract(text: str, extraction: Extraction) -> Found:
    """What the rule finds in a text."""
    if extraction not in _RULES:
        raise ValueError(f"`extraction` must be one of {', '.join(_RULES)}; came {extraction!r}.")
    return _RULES[extraction](text)


def last_hashes(text: str) -> Found:
    marks = list(_HASHES.finditer(text))
    if not marks:
        return Found(None, False)
    start = marks[-1].end()
    end = text.find("\n", start)
    line = text[start : len(text) if end < 0 else end].strip()
    if line.endswith("**") and line.count("**") == 1:  # **#### 18**
        line = line[:-2].rstrip()
    return Found(line, bool(line) and len(marks) == 1, start + len(line))


def last_box(text: str) -> Found:
    """In one pass: a box that is never closed may stand a hundred thousand times."""
    if "boxed" not in text and "fbox" not in text:
        return Found(None, False)
    opened: list[tuple[int, bool]] = []
    last, outer = None, 0
    for match in _BRACE.finditer(text):
        token = match[0]
        if token == "{" or (len(token) > 2 and token.endswith("{")):
            opened.append((match.end(), token != "{"))
        elif token == "}" and opened:
            start, is_box = opened.pop()
            if is_box:
                if last is None or start > last[0]:
                    outer += 1
                last = (start, match.start())
    if last is None:
        return Found(None, False)
    content = text[last[0] : last[1]]
    return Found(content, bool(content.strip()) and outer == 1, last[1])


def last_block(text: str) -> Found:
    answer = last_answer(text)
    if answer is None:
        return Found(None, False)
    return Found(
        answer, text.count("<answer>") == 1 and bool(answer.strip()), text.rfind("</answer>")
    )


def last_number(text: str) -> Found:
    last = None
    for match in _LAST_NUMBER.finditer(text):
        last = match
    return Found(None, False) if last is None else Found(last[0], True, last.end())


def last_formula(text: str) -> Found:
    last = None
    for match in _FORMULA.finditer(text):
        last = match
    return Found(None, False) if last is None else Found(last[1], True, last.end())


def last_of_any(text: str) -> Found:
    found = max((rule(text) for rule in (last_hashes, last_box, last_block)), key=lambda f: f.end)
    if found.text is None:
        found = max((last_formula(text), last_number(text)), key=lambda f: f.end)
        return found._replace(formed=False)
    return found._replace(formed=bool(found.text.strip()))


_RULES: dict[str, Callable[[str], Found]] = {
    "hashes": last_hashes,
    "boxed": last_box,
    "block": last_block,
    "last_number": last_number,
    "any": last_of_any,
}


def _shown(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
