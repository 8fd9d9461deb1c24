"""The record of a task: its rows and verifier, worked examples, preference pairs, conversations."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from rlx.rewards.blocks import last_answer
from rlx.rewards.score import Score

Messages = list[dict[str, str]]
"""Chat messages with `role` and `content`. As a prompt, the last may be an assistant prefill."""
Prompt = str | Messages
"""Text is a prompt as it stands, without the chat template."""


class Pair(NamedTuple):
    """Two answers to a prompt, each behind its prefill if it has one, and which is preferred."""

    prompt: Prompt
    chosen: str
    rejected: str
    margin: float = 0.0
    """By how much the chosen one is better, where the data say so."""


class Answered(NamedTuple):
    """A prompt and the answer to imitate, behind its prefill if it has one."""

    prompt: Messages
    answer: str


class Mixing(NamedTuple):
    """How the prompts of several tasks are drawn. Their rows have a field `task`."""

    tasks: dict[str, "Task"]
    """By the name that their rows and metrics have, in the order of the training rows."""
    weights: tuple[float, ...]
    final_weights: tuple[float, ...]
    follow: Literal["weights", "schedule", "solve_rates"]
    floor: float


class Task(NamedTuple):
    """What there is to learn from; a task has one or more of the kinds.

    A row is a dict with `prompt` and what the verifier needs. Nothing held out poses the same
    problem, or has the same prompt, as something that is trained on.
    """

    name: str
    train: list[dict]
    heldout: list[dict]
    score: Callable[[str, Mapping], Score] | None = None
    """The verifier; None where only a reward model can score the rows."""
    demonstrate: Callable | None = None
    """`demonstrate(row, rng) -> str`: a worked completion, after the prefill; None without one."""
    demonstrations: int = 1
    """Worked completions a training row."""
    answer: Callable[[str], str | None] = last_answer
    """The answer that a completion gives, for a majority vote; None where it gives none."""
    pairs: list[Pair] | None = None
    heldout_pairs: list[Pair] | None = None
    conversations: list[Messages | Answered] | None = None
    """Finished chats, to be imitated in their assistant turns, or in an answer that is given apart
    from its prompt."""
    heldout_conversations: list[Messages | Answered] | None = None
    verdicts: bool = True
    """Whether there are right and wrong answers: whether a score's `correct` means anything."""
    notes: tuple[str, ...] = ()
    """What was left out of the data, a sentence each."""
    label: Callable[[Mapping], str] | None = None
    """A row's class, where the classes are to be told apart in evaluation."""
    mixture: Mixing | None = None
    """Where the rows are several tasks'."""
