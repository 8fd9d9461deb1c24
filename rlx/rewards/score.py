"""What a verifier gives back, and the error it raises for a row it cannot work with. No JAX."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from model.errors import BadInput


class Span(NamedTuple):
    """A place of the completion, from character `start` up to `end`, and what was earned there."""

    start: int
    end: int
    score: float


class Score(NamedTuple):
    """The verdict on one completion."""

    reward: float
    correct: bool | None
    """None where the verifier calls nothing right or wrong."""
    components: dict[str, float]
    """What is told beside the reward, by name; a verifier gives the same names for every
    completion."""
    reason: str
    """For people: why it is right or wrong."""
    spans: tuple[Span, ...] = ()
    """Parts of the reward that belong to single places. `reward` contains their sum: a span says
    where a part was earned and adds nothing to it."""
    weights: Mapping[str, float] = {}
    """Of the components whose sum, so weighted, is the reward: the same for every completion of a
    row. Without any the reward is one thing."""


def weighed(
    components: dict[str, float],
    weights: Mapping[str, float],
    correct: bool | None,
    reason: str,
    spans: tuple[Span, ...] = (),
) -> Score:
    """A score whose reward is the weighted sum of its components."""
    reward = sum(weight * components[name] for name, weight in weights.items())
    return Score(reward, correct, components, reason, spans, weights)


def check_score(score: Score, text: str) -> None:
    """Raises ValueError where the reward or a span is none: not finite, or not within `text`."""
    if not math.isfinite(score.reward):
        raise ValueError(f"the reward is {score.reward}")
    for span in score.spans:
        if not 0 <= span.start < span.end <= len(text):
            raise ValueError(
                f"a span goes from {span.start} to {span.end} in a text of {len(text)} characters"
            )
        if not math.isfinite(span.score):
            raise ValueError(f"the span from {span.start} to {span.end} has score {span.score}")


class RowError(BadInput):
    """The row lacks a field that its verifier needs, or holds the wrong kind of value there.

    Bad input, to be told to the person; any other exception is the verifier's own failure.
    """
