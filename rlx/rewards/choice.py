"""The verifier of multiple choice: which option's letter a completion answers with. No JAX.

    reward = format_weight * format + correct

`format` is `blocks.format_score`. `correct` is 1 where the completion gives exactly one verdict
and that is the right option's letter. Where there is an answer block, the last one alone is read:

- a letter by itself, as in `B`, `b`, `(B)`, `B.`, `**B**`, `\\boxed{B}`, `Option B`;
- the text of one option by itself, whatever its case;
- a letter marked as a label before other words, as in `B. Ureter` or `(b) 4`: the letter counts,
  and the words are compared only where the mark could be that of an abbreviation (`C. difficile`);
- a statement, as in `the answer is B`, `Answer: (B)`, `the answer seems to be b`.

Without a block, what stands after the last `</think>` is read: the same if it is a single line,
else a statement that ends in its last line. A list of options, as the prompt has one, says nothing.

Never a verdict: a letter of a word or a name (`vitamin A`, `A-fib`), the article `a`, a letter of
another script, an option after `not`, a statement that is negated, asked or supposed.
Verdicts that differ are none: `B or C`, `A, B, C, D`, two statements.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from numbers import Integral
from string import ascii_uppercase
from types import NoneType
from typing import Any

from rlx.rewards.blocks import completion_text, format_score, last_answer
from rlx.rewards.labels import NoVerdict, folded, verdict
from rlx.rewards.score import RowError, Score, weighed


def score(completion: str, row: Mapping, *, format_weight: float = 0.1) -> Score:
    """Judge a completion (without its prompt) of a row with `options` and `answer`.

    Raises RowError, a ValueError, where the row's fields are missing or of the wrong kind.
    """
    options, gold = problem(row)
    text = completion_text(completion, row)
    layout = format_score(text)
    try:
        letter = verdict(text, options)
        correct = letter == gold
        reason = "correct" if correct else f"the answer is {letter}, not {gold}"
    except NoVerdict as none:
        correct, reason = False, str(none)
    components = {"format": layout, "correct": float(correct)}
    weights = {"format": format_weight, "correct": 1.0}
    return weighed(components, weights, correct, reason)


# what is read is short, and in time that its length bounds
score.bounded = True


def answer(completion: str) -> str | None:
    """The letter that a completion votes for, or else what its answer block holds."""
    try:
        return verdict(completion, dict.fromkeys(ascii_uppercase, ""))
    except NoVerdict:
        block = last_answer(completion)
        return block and folded(block)


def problem(row: Mapping) -> tuple[dict[str, str], str]:
    """The row's options by letter, and the right one's letter; RowError tells what is wrong."""
    for field in ("options", "answer"):
        if row.get(field) is None:
            raise RowError(
                f"A row of multiple choice needs `options` and `answer`; `{field}` is missing"
                f" (the row has {sorted(map(str, row))})."
            )
    given, answer, index = row["options"], row["answer"], row.get("answer_idx")
    # the common case, where the same row is asked again and again
    if type(given) is dict and type(answer) is str and type(index) in (str, NoneType):
        return _checked(tuple(given.items()), answer, index)
    options = options_of(given)
    return options, right_letter(options, answer, index)


@lru_cache(maxsize=65536)
def _checked(
    items: tuple[tuple[Any, Any], ...], answer: str, index: str | None
) -> tuple[dict[str, str], str]:
    options = options_of(dict(items))
    return options, right_letter(options, answer, index)


def options_of(given: Any) -> dict[str, str]:
    """Options by letter, from texts in a list or by letter; RowError where they are not that."""
    if isinstance(given, Mapping):
        # a Parquet file gives every row the letters of all
        given = {key: text for key, text in given.items() if text is not None}
        letters = [key.strip().upper() if isinstance(key, str) else "" for key in given]
        if not all(letter in ascii_uppercase and len(letter) == 1 for letter in letters):
            raise RowError(
                f"`options` must have single letters for keys, not {list(given)!r:.200}."
            )
        texts = list(given.values())
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        letters, texts = list(ascii_uppercase[: len(given)]), list(given)
    else:
        raise RowError(
            f"`options` must be a list of texts, or texts by letter, not {given!r:.200}."
        )
    if not 2 <= len(texts) <= len(ascii_uppercase):
        raise RowError(f"`options` must be 2 to {len(ascii_uppercase)}, not {len(texts)}.")
    if len(set(letters)) < len(texts):
        raise RowError(f"`options` has a letter twice: {letters}.")
    for letter, text in zip(letters, texts, strict=False):
        if (
            isinstance(text, bool)
            or not isinstance(text, str | int | float)
            or not str(text).strip()
        ):
            raise RowError(f"option {letter} must be a text, not {text!r:.200}.")
    options = {letter: str(text).strip() for letter, text in zip(letters, texts, strict=True)}
    if len(set(options.values())) < len(options):
        raise RowError(f"`options` must differ; {given!r:.200} has a text twice.")
    return options


def right_letter(options: Mapping[str, str], answer: Any, answer_idx: Any = None) -> str:
    """The letter of the right option. `answer` names it by its letter, by its text or by its index
    from 0; `answer_idx`, where it is given, by letter or index. RowError where they name none, or
    might name different ones."""
    readings = _readings(options, answer)
    letters = set(readings.values())
    if not letters:
        raise RowError(
            f"`answer` must be the letter, the text or the index from 0 of one of the options"
            f" {list(options)}, not {answer!r:.200}."
        )
    if answer_idx is not None:
        named = _readings(options, answer_idx)
        named.pop("text", None)
        if not letters & set(named.values()):
            raise RowError(
                f"`answer` and `answer_idx` must name the same option, not {answer!r:.200} and"
                f" {answer_idx!r:.200}."
            )
        letters &= set(named.values())
    if len(letters) > 1:
        told = ", ".join(f"{letter} by {kind}" for kind, letter in readings.items())
        raise RowError(
            f"`answer` is ambiguous: {answer!r:.200} is option {told}. A field `answer_idx` with"
            " the letter would decide."
        )
    return letters.pop()


def _readings(options: Mapping[str, str], answer: Any) -> dict[str, str]:
    """The letter that an answer names as a letter, as an index and as a text, where it does."""
    if isinstance(answer, bool) or not isinstance(answer, str | Integral | float):
        return {}
    letters, text = list(options), str(answer).strip()
    found = {}
    if isinstance(answer, str) and text.upper() in options:
        found["letter"] = text.upper()
    if text.isascii() and text.isdigit() and len(text) < 3 and int(text) < len(letters):
        found["index"] = letters[int(text)]
    for letter, option in options.items():
        if option == text:
            found["text"] = letter
    return found
