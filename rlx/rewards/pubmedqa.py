"""PubMedQA's verifier: whether a completion answers yes, no or maybe as the abstract does. No JAX.

    reward = format_weight * format + correct

`format` is `blocks.format_score`. `correct` is 1 where the last answer block holds the right one of
the three words, whatever its case and punctuation: by itself, behind `answer:` or `the answer is`,
or at the beginning, closed by a punctuation mark, of a text that has no other of the three in it
(`No. Yes-sayers claim ...`).
Where there is no block, a reply of at most 200 characters behind the last `</think>` is read in the
same way.

Never a verdict: part of a word (`know`, `eyes`, `yes-sayers`), two different ones (`yes and no`,
`Maybe. There is no evidence`), one behind other words (`not yes`).
"""

import re
from collections.abc import Mapping

from rlx.rewards.blocks import completion_text, format_score, last_answer
from rlx.rewards.labels import MAX_CHARACTERS, NoVerdict, one_of, plain
from rlx.rewards.score import RowError, Score, weighed

LABELS = ("yes", "no", "maybe")
MAX_REPLY = 200
"""Characters of an answer without a block; what is longer was meant to be thought."""

_FLAGS = re.IGNORECASE | re.ASCII
# part of a longer word where a letter, a digit, a hyphen or an apostrophe touches it
_LABEL = re.compile(r"(?<![\w'’\-\u00c0-\u052f])(yes|no|maybe)(?![\w'’\-\u00c0-\u052f])", _FLAGS)
_FIRST = re.compile(
    r"(?:(?:the |my |final |correct ){0,3}answer(?: ?:| is:?) )?[\[({\"'“‘]{0,4}"
    r"(?P<label>yes|no|maybe)[\])}\"'”’]{0,4}(?=[.,;:!?—–]| [-–—(]|$)",
    _FLAGS,
)


def score(completion: str, row: Mapping, *, format_weight: float = 0.1) -> Score:
    """Judge a completion (without its prompt) of a row with `answer`: yes, no or maybe.

    Raises RowError, a ValueError, where the row's answer is none of them.
    """
    gold = label(row)
    text = completion_text(completion, row)
    layout = format_score(text)
    try:
        answered = verdict(text)
        correct = answered == gold
        reason = "correct" if correct else f"the answer is {answered}, not {gold}"
    except NoVerdict as none:
        correct, reason = False, str(none)
    components = {"format": layout, "correct": float(correct)}
    weights = {"format": format_weight, "correct": 1.0}
    return weighed(components, weights, correct, reason)


# what is read is short, and in time that its length bounds
score.bounded = True


def label(row: Mapping) -> str:
    """The row's right answer; RowError where it has none."""
    gold = row.get("answer")
    if not isinstance(gold, str) or gold.strip().lower() not in LABELS:
        raise RowError(f"`answer` must be one of {', '.join(LABELS)}, not {gold!r:.200}.")
    return gold.strip().lower()


def answer(completion: str) -> str | None:
    """What a completion votes for."""
    try:
        return verdict(completion)
    except NoVerdict:
        return None


def verdict(text: str) -> str:
    """The one answer that a text gives; NoVerdict with the reason."""
    block = last_answer(text)
    if block is None:
        block = text.rpartition("</think>")[2].strip().removeprefix("<think>").strip()
        if not block or len(block) > MAX_REPLY:
            raise NoVerdict("there is no answer block")
    if len(block) > MAX_CHARACTERS:
        raise NoVerdict(f"the answer is longer than {MAX_CHARACTERS} characters")
    answer = plain(block)
    if not answer:
        raise NoVerdict("the answer is empty")
    first = _FIRST.match(answer)
    if first is None:
        raise NoVerdict(f"the answer does not begin with one of {', '.join(LABELS)}")
    return one_of([found.lower() for found in _LABEL.findall(answer)], LABELS)
