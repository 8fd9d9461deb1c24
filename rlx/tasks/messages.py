"""Chat messages from data rows: both spellings of roles, and which prompts are held out.

Each message is `{"role", "content"}` (OpenAI, TRL) or `{"from", "value"}` (ShareGPT,
LLaMA-Factory). `place`, the row's file and line, begins every error.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from model.errors import BadInput
from rlx.tasks.task import Messages, Prompt

SPELLINGS = (("role", "content"), ("from", "value"))
ROLES = {"system": "system", "user": "user", "assistant": "assistant"} | {
    "human": "user",
    "gpt": "assistant",
}
UNREAD = ("tool_calls", "function_call", "reasoning_content", "weight")
"""Keys of a message that would change its meaning, so that it is refused and not half read."""


def read_messages(value: Any, field: str, place: str) -> Messages:
    """A list of messages, with roles system, user and assistant."""
    if not isinstance(value, list) or not value:
        raise BadInput(
            f"{place}: `{field}` must be a list of at least one message, not {shown(value)}."
        )
    return [
        read_message(message, f"{field}, message {i}", place)
        for i, message in enumerate(value, start=1)
    ]


def read_message(value: Any, field: str, place: str) -> dict[str, str]:
    fields = value if isinstance(value, dict) else {}
    found = [names for names in SPELLINGS if all(isinstance(fields.get(n), str) for n in names)]
    if len(found) != 1:
        raise BadInput(
            f"{place}: {field}: expected the texts `role` and `content`, or `from` and `value`;"
            f" came {shown(value)}."
        )
    if unread := [f"`{key}`" for key in UNREAD if fields.get(key) is not None]:
        raise BadInput(f"{place}: {field}: {', '.join(unread)} of a message cannot be used.")
    role, content = (fields[name] for name in found[0])
    if role not in ROLES:
        raise BadInput(f"{place}: {field}: expected one of the roles {list(ROLES)}; came {role!r}.")
    return {"role": ROLES[role], "content": content}


def read_prompt(value: Any, field: str, place: str) -> Prompt:
    """A prompt to be answered: text, or messages that end with the user's or with a prefill."""
    if isinstance(value, str):
        if not value:
            raise BadInput(f"{place}: `{field}` is empty.")
        return value
    messages = read_messages(value, field, place)
    opened = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    check_users_turn(opened, field, place)
    return messages


def check_users_turn(messages: Messages, field: str, place: str) -> None:
    """Raises BadInput where the messages do not end with a turn of the user's to answer."""
    if not messages or messages[-1]["role"] != "user":
        came = f"the {messages[-1]['role']}'s" if messages else "no message"
        raise BadInput(
            f"{place}: `{field}` must come to a turn of the user's that is to be answered; before"
            f" the answer there is {came}."
        )


def read_history(row: Mapping, place: str) -> tuple[str, Messages] | None:
    """The messages under `conversations` or `messages`, and which of the two; None without."""
    for field in ("conversations", "messages"):
        if row.get(field) is not None:
            return field, read_messages(row[field], field, place)
    return None


def row_system(row: Mapping, system: str, place: str) -> str:
    """The row's own `system`, as ShareGPT files may have it beside the messages, or the setting."""
    if row.get("tools"):
        raise BadInput(f"{place}: `tools` of a row cannot be used.")
    own = row.get("system") or system
    if not isinstance(own, str):
        raise BadInput(f"{place}: `system` must be text, not {shown(own)}.")
    return own


def with_system(prompt: Prompt, system: str, place: str) -> Prompt:
    """Puts `system` first where there is no system message; "" puts nothing."""
    if not system:
        return prompt
    if isinstance(prompt, str):
        raise BadInput(
            f"{place}: the prompt is text, which has no place for `system`; write it as messages."
        )
    if any(message["role"] == "system" for message in prompt):
        return prompt
    return [{"role": "system", "content": system}, *prompt]


def prompt_key(prompt: Prompt) -> str:
    """The same for two prompts that are the same."""
    return json.dumps(prompt, ensure_ascii=False, sort_keys=True)


def distinct(prompts: Iterable[Prompt]) -> dict[str, Prompt]:
    """The prompts by key, each once, in order."""
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        found.setdefault(prompt_key(prompt), prompt)
    return found


def set_apart(prompts: Iterable[Prompt], size: int, file: str) -> dict[str, Prompt]:
    """The last `size` distinct prompts of a file by key; BadInput where that would be all."""
    by_key = distinct(prompts)
    if size >= len(by_key):
        raise BadInput(
            f"{file} holds {len(by_key)} distinct prompts; setting `heldout_size` = {size} of them"
            " apart leaves none to train. Lower `heldout_size`, or name a `heldout_file`."
        )
    return dict(list(by_key.items())[-size:])


def check_sizes(file: str, train_size: int, heldout_size: int) -> None:
    if not file:
        raise BadInput("`file` must name the rows to read; it is empty.")
    if train_size < 0:
        raise BadInput(f"`train_size` must be at least 0 (0: all rows), not {train_size}.")
    if heldout_size < 1:
        raise BadInput(f"`heldout_size` must be at least 1, not {heldout_size}.")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
