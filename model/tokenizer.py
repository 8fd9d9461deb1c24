"""Text to token ids and back, as the checkpoint's own tokenizer and chat template do it."""

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from model.config import CheckpointError, ModelConfig, read_json
from model.errors import BadInput
from model.tokenizer_files import read_inner, read_stop_ids

PINNED = {"date_string": "26 Jul 2024"}
"""Arguments of templates that would otherwise read the clock: a prompt must be the same tomorrow.
The date is Llama 3's own where it has no clock."""

OPENED = re.compile(r"(<[^<>|/\s]+>)\s*\Z")
"""The block that a generation prompt opens: R1's and QwQ's end in `<think>`."""


class ChatText(NamedTuple):
    """A rendered conversation, up to the end of its last assistant turn."""

    ids: list[int]
    assistant: list[bool]
    """True on what the model is to write: each answer and the token that ends its turn."""


class Tokenizer:
    """A checkpoint's tokenizer, with the ids that end a text."""

    def __init__(
        self,
        inner: PreTrainedTokenizerBase,
        stop_ids: Sequence[int] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        """`stop_ids` are those beside the tokenizer's own end of text; `chat_template_kwargs` go to
        the chat template, as Qwen3's `enable_thinking`."""
        vocabulary = inner.get_vocab()
        stops = set(stop_ids)
        if inner.eos_token_id is not None:
            stops.add(inner.eos_token_id)
        # A base model's tokenizer may name another end of text than its chat template writes.
        if "<|im_end|>" in vocabulary and "<|im_end|>" in str(inner.chat_template or ""):
            stops.add(vocabulary["<|im_end|>"])
        self.inner = inner
        self.chat_template_kwargs = PINNED | self._checked(chat_template_kwargs or {})
        self.stop_ids: tuple[int, ...] = tuple(sorted(stops))
        self._length = max(vocabulary.values()) + 1
        # Padding is known by position, never by id; any id in range serves.
        self.end_id: int | None = (
            self.stop_ids[-1] if inner.eos_token_id is None and stops else inner.eos_token_id
        )
        """The stop token that ends a text; None where there is none."""
        self.pad_id: int = next(
            id for id in (inner.pad_token_id, inner.eos_token_id, 0) if id is not None
        )
        beyond = [id for id in (*self.stop_ids, self.pad_id) if not 0 <= id < self._length]
        if beyond:
            raise CheckpointError(
                f"The stop or padding ids {beyond} are none of the tokenizer's {self._length} ids."
            )

    def _checked(self, chat_template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Raises BadInput for a name that the template does not read, or that is not for it."""
        own = {"messages", *inspect.signature(self.inner.apply_chat_template).parameters}
        for name in chat_template_kwargs:
            read = re.search(rf"\b{re.escape(name)}\b", str(self.inner.chat_template or ""))
            if name in own or not read:
                raise BadInput(
                    "model.chat_template_kwargs: expected names that the chat template reads; "
                    f"came {name}."
                )
        return dict(chat_template_kwargs)

    def __len__(self) -> int:
        """How many ids there are: one more than the largest, added tokens included."""
        return self._length

    def encode(self, text: str) -> list[int]:
        """The text's ids, and no others: nothing is put before or after it.

        The name of a special token inside the text is that token, as in a rendered template.
        """
        return list(self.inner.encode(text, add_special_tokens=False))

    def encode_prompt(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a prompt: text as it is, chat messages through the chat template.

        Text begins with the token that the tokenizer begins every text with, if there is one
        (Llama's does). Messages that end with the assistant's are continued from where that message
        ends. Raises `BadInput` for a prompt that comes to no ids, and for messages without a
        template.
        """
        if isinstance(prompt, str):
            ids = self.encode(prompt)
            if self._start != ids[:1]:
                ids = [*self._start, *ids]
        else:
            ids = self.encode(self.render(prompt))
        if not ids:
            raise BadInput(f"The prompt {prompt!r} comes to no tokens at all.")
        return ids

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that the chat template makes of the messages, up to where the model goes on."""
        _check_messages(messages)
        chat = [dict(message) for message in messages]
        # A prefill goes behind the generation prompt as it is. Rendered as a finished message it
        # would be rewritten: Qwen3's template puts an empty think block before an open `<think>`.
        prefill = chat.pop()["content"] if chat[-1]["role"] == "assistant" else ""
        if not chat:
            raise BadInput("The chat holds nothing but the start of the assistant's answer.")
        header = self._template(chat, add_generation_prompt=True)
        opened = OPENED.search(header)
        if opened and opened[1] in prefill:
            # Only one of the two may open the block.
            header = header[: opened.start()]
        return header + prefill

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[ChatText]:
        """A finished conversation, to learn its assistant turns from: one text, as a rule.

        Each answer is encoded by itself behind the ids of what came before it, as when it is
        sampled. A template may write an answer in another way once it is history: Qwen3's drops its
        think block. The conversation then comes to several texts, each ended by an answer as the
        template writes it when it is the last, behind the history that a model sees there.

        Raises BadInput where no message is the assistant's, or where one answers nothing.
        """
        _check_messages(messages)
        self._check_seams()
        texts: list[ChatText] = []
        past = ""  # what the ids of the last of `texts` stand for
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if place == 0 or messages[place - 1]["role"] == "assistant":
                raise BadInput(
                    f"Chat message {place}, the assistant's, must follow a message of another role."
                )
            prompt = self.render(messages[:place])
            text, answer = self._answer(prompt, messages[: place + 1])
            if not texts or not prompt.startswith(past):
                texts.append(ChatText([], []))
                past = ""
            context = self.encode(prompt[len(past) :])
            texts[-1].ids.extend([*context, *answer])
            texts[-1].assistant.extend([False] * len(context) + [True] * len(answer))
            past = prompt + text
        if not texts:
            raise BadInput("The conversation holds no message of the assistant's.")
        return texts

    def encode_answer(self, prompt: str | Sequence[Mapping[str, str]], answer: str) -> list[int]:
        """What the model should write after `encode_prompt(prompt)`, up to its one stop token.

        After chat messages, as the template writes it; after text or a prefill, as it stands.
        """
        self._check_seams()
        if isinstance(prompt, str):
            return self._ended(answer, self.end_id)
        if prompt[-1]["role"] == "assistant":
            return self._ended(answer, self._turn_end)
        message = {"role": "assistant", "content": answer}
        return self._answer(self.render(prompt), [*prompt, message])[1]

    def _answer(self, prompt: str, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[int]]:
        """The last message's text and ids behind the rendered prompt, its stop token included.

        As it stands where the template does not write it behind its own generation prompt, or ends
        it with no stop token: R1's opens a think block there that its finished turns do not have.
        """
        finished = self._template(messages, add_generation_prompt=False)
        turn = finished[len(prompt) :] if finished.startswith(prompt) else ""
        stops = [self.decode([id]) for id in self.stop_ids]
        end = min((turn.index(stop) + len(stop) for stop in stops if stop in turn), default=0)
        if end:
            return turn[:end], self.encode(turn[:end])
        content, opened = messages[-1]["content"], OPENED.search(prompt)
        if opened and content.lstrip().startswith(opened[1]):
            content = content.lstrip().removeprefix(opened[1]).lstrip("\n")
        return content + self.decode([self.end_id]), self._ended(content, self.end_id)

    @functools.cached_property
    def _start(self) -> list[int]:
        """What the tokenizer puts before every text: one token, or nothing."""
        first = self.inner.encode("")[:1]
        return first if first == [self.inner.bos_token_id] else []

    @functools.cached_property
    def _spaced(self) -> bool:
        """Whether it puts a space before every text, as SentencePiece's do."""
        pieces = self.inner.convert_ids_to_tokens(self.encode("a"))
        return bool(pieces) and pieces[0].startswith("\u2581")

    @functools.cached_property
    def _turn_end(self) -> int:
        """The stop token with which the template ends an answer. A base model's tokenizer ends a
        text with another."""
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        try:
            return self._answer(self.render(chat[:1]), chat)[1][-1]
        except BadInput:
            return self.end_id

    def _ended(self, text: str, stop: int) -> list[int]:
        ids = self.encode(text)
        end = next((i for i, id in enumerate(ids) if id in self.stop_ids), len(ids))
        return [*ids[:end], stop]

    def _check_seams(self) -> None:
        """Raises BadInput where an answer can't be encoded by itself, as it is sampled."""
        if self._spaced:
            raise BadInput(
                "This tokenizer puts a space before every text (SentencePiece, as Llama 2's), so "
                "that an answer encoded behind its prompt is another than the one that is sampled: "
                "a model with it can be sampled and trained on its samples, not on given text."
            )

    def _template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
    ) -> str:
        if not self.inner.chat_template:
            raise BadInput(
                "The prompt is a list of chat messages, and this tokenizer has no chat template; "
                "give the prompt as text."
            )
        chat = [dict(message) for message in messages]
        try:
            return self.inner.apply_chat_template(
                chat,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.chat_template_kwargs,
            )
        except TemplateError as error:
            raise BadInput(f"The chat template refuses the messages: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens and spaces as they stand."""
        return self.inner.decode(
            [int(id) for id in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def decode_completion(self, ids: Sequence[int]) -> str:
        """The text before the first stop token: what a verifier reads."""
        ends = (i for i, id in enumerate(ids) if id in self.stop_ids)
        return self.decode(ids[: next(ends, len(ids))])


def load_tokenizer(
    folder: str | Path, chat_template_kwargs: Mapping[str, Any] | None = None
) -> Tokenizer:
    """The tokenizer of a checkpoint folder, checked against its `tokenizer.json`.

    Raises `CheckpointError` where files are missing or broken, where the tokenizer does not encode
    as its file says, or where it has more ids than the model beside it has embedding rows.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {folder}.")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise CheckpointError(f"{folder} holds no tokenizer: no tokenizer.json, no vocab.json.")
    tokenizer = Tokenizer(read_inner(folder), read_stop_ids(folder), chat_template_kwargs)
    if (folder / "config.json").is_file():
        rows = read_json(folder / "config.json").get("vocab_size")
        if isinstance(rows, int):
            _check_length(tokenizer, rows)
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raises `CheckpointError` if the tokenizer has an id that the model has no embedding for."""
    _check_length(tokenizer, config.vocab_size)


def check_ids(ids: Sequence[int], config: ModelConfig) -> None:
    """Raises `BadInput` for ids outside the embedding.

    On a device such an id is no error: indexing takes the last row, or wraps, without a word.
    """
    for place, id in enumerate(ids):
        if not 0 <= id < config.vocab_size:
            raise BadInput(
                f"Token id {id} at place {place} is outside the vocabulary of "
                f"{config.vocab_size} (ids 0 to {config.vocab_size - 1})."
            )


def _check_length(tokenizer: Tokenizer, rows: int) -> None:
    if len(tokenizer) > rows:
        raise CheckpointError(
            f"The tokenizer has {len(tokenizer)} ids and the model {rows} embedding rows "
            f"(vocab_size): they are not of one checkpoint."
        )


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise BadInput("The list of chat messages is empty.")
    for place, message in enumerate(messages):
        parts = message if isinstance(message, Mapping) else {}
        if not all(isinstance(parts.get(name), str) for name in ("role", "content")):
            raise BadInput(
                f"Chat message {place}: expected a mapping with the texts role and content; came "
                f"{message!r}."
            )
