"""The think and answer blocks of a completion: what the format earns, and which answer counts.

A completion is read after three rules:

- White space and stop tokens are stripped from its end, in any number and order.
- The prompt may have ended in a prefilled `<think>` (the row's field `prefill`, `<think>` where it
  has none). That tag then opens the completion's think block, unless the completion, stripped on
  its left, opens with a `<think>` of its own; so whole texts and continuations score alike.
- Nothing else of the prompt is seen, so its example earns nothing.
"""

import re
from collections.abc import Mapping

from rlx.rewards.score import RowError

STOP_TOKENS = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>")

# The tail is matched on the reversed text: a pattern anchored at the end is tried from every run of
# white space on the way there, which takes quadratic time. Possessive, so that nothing backtracks.
_REVERSED_TAIL = re.compile(
    r"(?:\s++|" + "|".join(re.escape(token[::-1]) for token in STOP_TOKENS) + r")*+"
)


def completion_text(completion: str, row: Mapping) -> str:
    """The text that is judged: the end stripped, and the prefill's tag put back in front."""
    prefill = row.get("prefill", "<think>")
    if not isinstance(prefill, str):
        raise RowError(f"The row's `prefill` must be text, not {prefill!r}.")
    tail = _REVERSED_TAIL.match(completion[::-1]).end()
    text = completion[: len(completion) - tail].lstrip()
    if prefill.rstrip().endswith("<think>") and not text.startswith("<think>"):
        return "<think>" + text
    return text


def format_score(text: str) -> float:
    """1.0 for one think block, then one answer block, and nothing else but white space.

    Otherwise 0.1 for a think pair plus 0.5 for an answer pair. A pair is an opening tag and, later,
    its closing tag, each exactly once in the text: a duplicate earns nothing. An answer that holds
    only white space is no pair, so `<think>x</think><answer></answer>` earns 0.1.
    """
    think = _inside_single_pair(text, "<think>", "</think>") is not None
    answer = (_inside_single_pair(text, "<answer>", "</answer>") or "").strip() != ""
    if think and answer and text.startswith("<think>") and text.endswith("</answer>"):
        between = text[text.index("</think>") + len("</think>") :].lstrip()
        if between.startswith("<answer>"):
            return 1.0
    return (0.1 if think else 0.0) + (0.5 if answer else 0.0)


def last_answer(text: str) -> str | None:
    """What the last answer block holds; None without one.

    A block is an opening tag and the closing tag after it, with no other answer tag between.
    """
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    return text[start + len("<answer>") : text.index("</answer>", start)]


def _inside_single_pair(text: str, opening: str, closing: str) -> str | None:
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start, end = text.index(opening) + len(opening), text.index(closing)
    return text[start:end] if start <= end else None
