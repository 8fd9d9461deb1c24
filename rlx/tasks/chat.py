"""The chat task: finished conversations, whose assistant turns are to be imitated.

A row has one of these forms:

- `messages` or `conversations`: a whole conversation, all of whose assistant turns are imitated;
- `prompt` and `completion`, each a text or messages: a text `prompt` is the user's turn, and one of
  messages may end with the start of the assistant's answer. The completion alone is imitated;
- a row of the preference task, whose chosen answer is imitated. So one file serves fine-tuning, a
  reward model and a policy trained on it, with the same prompts held out in each, and the same
  tokens.
"""

from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from model.errors import BadInput
from rlx.tasks.files import read_located_rows
from rlx.tasks.messages import (
    check_sizes,
    distinct,
    prompt_key,
    read_history,
    read_prompt,
    row_system,
    set_apart,
    with_system,
)
from rlx.tasks.preference import read_answer, read_pair
from rlx.tasks.task import Answered, Messages, Task


class Chat(NamedTuple):
    """A conversation, and what stands before its last answer."""

    prompt: Messages
    messages: Messages
    answer: str | None = None
    """Where it is given apart, it alone is imitated."""

    @property
    def imitated(self) -> Messages | Answered:
        return self.messages if self.answer is None else Answered(self.prompt, self.answer)


def load(
    *,
    seed: int,
    file: str,
    heldout_file: str = "",
    train_size: int = 0,
    heldout_size: int = 64,
    system: str = "",
) -> Task:
    """Conversations to train on and held-out ones, and the prompts of their last answers as rows.

    `heldout_size` counts prompts: those of `heldout_file`, or the last distinct ones of `file`.
    No conversation is trained on that has, before any of its answers, a prompt that a held-out one
    has before any of its own.
    `train_size` counts conversations; 0 takes all. `system` is put first where there is no system
    message. Nothing depends on the seed.

    Raises BadInput for a row of no known form, with file and line.
    """
    check_sizes(file, train_size, heldout_size)
    source = read_chats(file, system)
    if heldout_file:
        other = read_chats(heldout_file, system)
        named = distinct(chat.prompt for chat in other)
    else:
        other = source
        named = set_apart((chat.prompt for chat in source), heldout_size, file)
    kept = dict(islice(named.items(), heldout_size))
    heldout = [chat for chat in other if prompt_key(chat.prompt) in kept]
    # All turns of a held-out conversation are measured, not its last alone.
    apart = {*named, *(prompt_key(p) for chat in heldout for p in prompts_of(chat))}
    free = [chat for chat in source if not any(prompt_key(p) in apart for p in prompts_of(chat))]
    if not free:
        raise BadInput(f"All conversations of {file} have held-out prompts; none is left to train.")
    notes = []
    if left := len(source) - len(free) - (0 if heldout_file else len(heldout)):
        notes.append(
            f"{left} of {len(source)} conversations of {file} were left out: they hold a prompt"
            " that is held out."
        )
    train = free[: train_size or None]
    return Task(
        name="chat",
        train=[{"prompt": prompt} for prompt in distinct(chat.prompt for chat in train).values()],
        heldout=[{"prompt": prompt} for prompt in kept.values()],
        conversations=[chat.imitated for chat in train],
        heldout_conversations=[chat.imitated for chat in heldout],
        verdicts=False,
        notes=tuple(notes),
    )


def read_chats(file: str, system: str) -> list[Chat]:
    return [read_chat(row, place, system) for place, row in read_located_rows(file)]


def read_chat(row: Mapping, place: str, system: str) -> Chat:
    """A row in any of the forms; BadInput begins with `place`."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        pair = read_pair(row, place, system)
        if isinstance(pair.prompt, str):
            raise BadInput(
                f"{place}: the prompt is text, which the preference task takes as it stands and not"
                " as a turn of a chat; write it as messages."
            )
        return Chat(pair.prompt, finished(pair.prompt, pair.chosen), pair.chosen)
    system = row_system(row, system, place)
    if row.get("prompt") is not None and row.get("completion") is not None:
        prompt = read_prompt(row["prompt"], "prompt", place)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        answer = read_answer(row, "completion", place)
        if not answer.strip():
            raise BadInput(f"{place}: the answer `completion` is empty.")
        prompt = with_system(prompt, system, place)
        return Chat(prompt, finished(prompt, answer), answer)
    if history := read_history(row, place):
        field, messages = history
        return _whole(with_system(messages, system, place), field, place)
    raise BadInput(
        f"{place}: expected `messages` or `conversations`, `prompt` and `completion`, or a prompt"
        f" with `chosen` and `rejected`; the row has {sorted(row)}."
    )


def finished(prompt: Messages, answer: str) -> Messages:
    """The prompt with its answer, which goes on from a prefill."""
    *before, last = prompt
    if last["role"] == "assistant":
        return [*before, last | {"content": last["content"] + answer}]
    return [*prompt, {"role": "assistant", "content": answer}]


def prompts_of(chat: Chat) -> list[Messages]:
    """What stands before each of a conversation's answers."""
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    return [*(chat.messages[:i] for i in turns), chat.prompt]


def _whole(messages: Messages, field: str, place: str) -> Chat:
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise BadInput(f"{place}: `{field}` holds no message of the assistant's to learn from.")
    for i in turns:
        if i == 0 or messages[i - 1]["role"] == "assistant":
            raise BadInput(
                f"{place}: in `{field}`, each message of the assistant's must answer another;"
                f" message {i + 1} does not."
            )
        if not messages[i]["content"].strip():
            raise BadInput(f"{place}: in `{field}`, message {i + 1}, the assistant's, is empty.")
    return Chat(messages[: turns[-1]], messages)
