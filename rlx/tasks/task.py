"""The record of a task: its rows, its verifier, and worked examples where it has them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlx.rewards.blocks import last_answer
from rlx.rewards.score import Score


class Task(NamedTuple):
    """A row is a dict with `prompt` (chat messages, the last an assistant prefill) and what the
    verifier needs. No row of `heldout` poses the same problem as one of `train`."""

    name: str
    train: list[dict]
    heldout: list[dict]
    score: Callable[[str, Mapping], Score]
    demonstrate: Callable | None = None
    """`demonstrate(row, rng) -> str`: a worked completion, after the prefill; None without one."""
    demonstrations: int = 1
    """Worked completions a training row."""
    answer: Callable[[str], str | None] = last_answer
    """The answer that a completion gives, for a majority vote; None where it gives none."""
