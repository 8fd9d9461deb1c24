"""The preference task: pairs of answers of which one is preferred, read from files.

A row has one of three forms, and may have a number `margin`:

- `conversations` or `messages` up to a user's turn, and the messages `chosen` and `rejected`;
- `prompt`, text or messages, and `chosen` and `rejected`, each a text or one assistant message;
- `chosen` and `rejected` as whole lists of messages, whose common beginning is the prompt.

A `prompt` of messages may end with the start of the assistant's answer, which both answers go on
from. A prompt that is text is taken as it stands, without the chat template.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from model.errors import BadInput
from rlx.tasks.files import read_located_rows
from rlx.tasks.messages import (
    check_sizes,
    check_users_turn,
    distinct,
    prompt_key,
    read_history,
    read_message,
    read_messages,
    read_prompt,
    row_system,
    set_apart,
    shown,
    with_system,
)
from rlx.tasks.task import Messages, Pair, Task

LARGEST_MARGIN = 1e30
"""Beyond it, a number may be infinite in float32."""


def load(
    *,
    seed: int,
    file: str,
    heldout_file: str = "",
    train_size: int = 0,
    heldout_size: int = 64,
    system: str = "",
) -> Task:
    """Pairs to train on and held-out ones, and the prompts of both as rows without a verifier.

    `heldout_size` counts prompts: those of `heldout_file`, or the last distinct ones of `file`.
    No pair with a held-out prompt is trained on. `train_size` counts pairs; 0 takes all. `system`
    is put first in a prompt of messages that has no system message. Nothing depends on the seed.

    A pair of two equal answers teaches nothing and is left out, with a note. Raises BadInput for
    any other fault, with file and line.
    """
    check_sizes(file, train_size, heldout_size)
    source = read_pairs(file, system)
    if heldout_file:
        other = read_pairs(heldout_file, system)
        named = distinct(pair.prompt for pair in other)
    else:
        other = source
        named = set_apart((pair.prompt for pair in source), heldout_size, file)
    kept = dict(islice(named.items(), heldout_size))
    free = [pair for pair in source if prompt_key(pair.prompt) not in named]
    held = [pair for pair in other if prompt_key(pair.prompt) in kept]
    pairs, heldout = _unequal(free), _unequal(held)
    for found, what in ((pairs, "to train"), (heldout, "to hold out")):
        if not found:
            raise BadInput(
                f"No pair of {file} is left {what}: {len(free)} of its {len(source)} pairs have"
                " prompts that are not held out, and pairs of two equal answers are left out."
            )
    notes = []
    if heldout_file and len(free) < len(source):
        notes.append(
            f"{len(source) - len(free)} of {len(source)} pairs of {file} were left out: their"
            f" prompts stand in {heldout_file}."
        )
    if equal := len(free) + len(held) - len(pairs) - len(heldout):
        notes.append(
            f"{equal} of {len(free) + len(held)} pairs were left out: chosen and rejected are"
            " equal."
        )
    pairs = pairs[: train_size or None]
    return Task(
        name="preference",
        train=[{"prompt": prompt} for prompt in distinct(pair.prompt for pair in pairs).values()],
        heldout=[{"prompt": prompt} for prompt in kept.values()],
        pairs=pairs,
        heldout_pairs=heldout,
        verdicts=False,
        notes=tuple(notes),
    )


def read_pairs(file: str, system: str) -> list[Pair]:
    return [read_pair(row, place, system) for place, row in read_located_rows(file)]


def read_pair(row: Mapping, place: str, system: str) -> Pair:
    """A row in any of the forms; BadInput begins with `place`."""
    prompt, chosen, rejected = _parts(row, place)
    for field, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise BadInput(f"{place}: the answer `{field}` is empty.")
    margin = 0.0 if row.get("margin") is None else row["margin"]
    number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not number or not abs(margin) <= LARGEST_MARGIN:
        raise BadInput(f"{place}: `margin` must be a finite number, not {shown(margin)}.")
    return Pair(
        with_system(prompt, row_system(row, system, place), place), chosen, rejected, float(margin)
    )


def _parts(row: Mapping, place: str) -> tuple[str | Messages, str, str]:
    if row.get("chosen") is None or row.get("rejected") is None:
        raise BadInput(
            f"{place}: expected `chosen` and `rejected`, with `conversations`, `messages` or"
            f" `prompt` before them or as whole lists of messages; the row has {sorted(row)}."
        )
    if any(isinstance(row[f], list) and len(row[f]) != 1 for f in ("chosen", "rejected")):
        return _split_common(row, place)
    if row.get("prompt") is not None:
        prompt = read_prompt(row["prompt"], "prompt", place)
    elif history := read_history(row, place):
        field, prompt = history
        check_users_turn(prompt, field, place)
    else:
        raise BadInput(
            f"{place}: expected the prompt in `prompt`, `conversations` or `messages`; the row has"
            f" {sorted(row)}."
        )
    return prompt, read_answer(row, "chosen", place), read_answer(row, "rejected", place)


def read_answer(row: Mapping, field: str, place: str) -> str:
    """The text of an answer: a text, one assistant message, or a list of that one message."""
    value: Any = row[field]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    message = read_message(value, field, place)
    if message["role"] != "assistant":
        raise BadInput(
            f"{place}: `{field}` must be the assistant's message, and is the {message['role']}'s."
        )
    return message["content"]


def _split_common(row: Mapping, place: str) -> tuple[Messages, str, str]:
    chosen, rejected = (read_messages(row[f], f, place) for f in ("chosen", "rejected"))
    same = 0
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        same += 1
    endings = (chosen[same:], rejected[same:])
    if any(len(e) != 1 or e[0]["role"] != "assistant" for e in endings):
        came = " and ".join(str([message["role"] for message in ending]) for ending in endings)
        raise BadInput(
            f"{place}: `chosen` and `rejected` must have the same messages but for one last message"
            f" of the assistant's; after {same} they have in common come {came}."
        )
    check_users_turn(chosen[:same], "chosen", place)
    return chosen[:same], endings[0][0]["content"], endings[1][0]["content"]


def _unequal(pairs: list[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair.chosen != pair.rejected]
