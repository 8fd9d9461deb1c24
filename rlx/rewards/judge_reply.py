"""What a judge said: one JSON object, read strictly. No JAX.

A reply is `{"reason", "score", "confidence"}` and nothing else but a think block before it and a
code fence around it. `score` is a number, or as text a number or `number/highest`. All else is
malformed: words, two objects, a key twice, a score beside the scale (it is never clipped), NaN, a
confidence beside 0 to 1.
"""

import json
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rlx.rewards.judge_client import JudgeFailure

LONGEST_REPLY = 100_000
"""Characters; a longer one is malformed."""

_FENCED = re.compile(r"```(?:json)?\s*(\{.*\})\s*```", re.DOTALL)
_DIGITS = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"
_NUMBER = re.compile(rf"{_DIGITS}(?:/{_DIGITS})?")


class Malformed(JudgeFailure):
    """The reply says nothing that can be read; it is not kept, and may be another next time."""


class Reply(BaseModel):
    """What a judge's JSON must be."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    reason: str = ""
    score: float | str
    confidence: float


def read_reply(reply: str) -> Reply:
    """Raises Malformed for all that is not one JSON object of the form that was asked for."""
    text = reply.strip()
    if len(text) > LONGEST_REPLY:
        raise Malformed(f"malformed: the reply has more than {LONGEST_REPLY} characters")
    if text.startswith("<think>"):
        text = text.rpartition("</think>")[2].strip()
    fenced = _FENCED.fullmatch(text)
    try:
        said = Reply.model_validate(
            json.loads(
                fenced[1] if fenced else text,
                object_pairs_hook=_each_once,
                parse_constant=_refuse,
            )
        )
    except (ValidationError, ValueError, RecursionError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise Malformed(f"malformed: {reply[:200]!r} ({why})") from error
    if not 0 <= said.confidence <= 1:
        raise Malformed(f"malformed: the confidence is {said.confidence:g}, not within 0 and 1")
    return said


def scaled(said: float | str, lowest: float, highest: float) -> float:
    """The score as a share of the scale. Raises Malformed where it does not stand on the scale."""
    if isinstance(said, str):
        number = _NUMBER.fullmatch(said.strip())
        if number is None or (number[2] and float(number[2]) != highest):
            raise Malformed(f"malformed: the score {said[:80]!r} is no number on the scale")
        said = float(number[1])
    if not lowest <= said <= highest:
        raise Malformed(f"malformed: the score is {said:g}, not within {lowest:g} and {highest:g}")
    return (said - lowest) / (highest - lowest)


def _each_once(items: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in items}) < len(items):
        raise ValueError("a key stands there twice")
    return dict(items)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
