"""From a task's rows to arrays: the pool of prompts, and given text as one batch of all data.

Given text is worked examples, preference pairs or whole conversations. Widths are multiples of 8,
so that a run on slightly other data compiles the same programs.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model.errors import BadInput
from model.sharding import round_up
from model.tokenizer import ChatText, Tokenizer
from rlx.prompts import Prompts
from rlx.tasks import Pair, Task
from rlx.tasks.task import Answered, Messages
from rlx.types import Batch, Signal


def pad_left(
    texts: Sequence[Sequence[int]], width: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and positions `[len(texts), width]`; -1 marks padding."""
    tokens = np.full((len(texts), width), pad_id, np.int32)
    positions = np.full((len(texts), width), -1, np.int32)
    for row, ids in enumerate(texts):
        tokens[row, width - len(ids) :] = ids
        positions[row, width - len(ids) :] = np.arange(len(ids))
    return tokens, positions


class Encoded(NamedTuple):
    """Rows, and in the same order their prompts as ids; and what was left out, a sentence."""

    rows: list[Mapping]
    ids: list[list[int]]
    notes: tuple[str, ...] = ()


def encode_prompts(
    rows: Sequence[Mapping],
    tokenizer: Tokenizer,
    limit: int,
    what: str,
    *,
    long_prompts: Literal["refuse", "skip"] = "refuse",
    count: int = 0,
) -> Encoded:
    """The first `count` rows (0: all) with their prompts as ids; `what` names a row in an error.

    A prompt of more than `limit` tokens raises BadInput, or its row is left out and another one
    takes its place. Raises BadInput where no row is left.
    """
    kept, encoded, long = [], [], 0
    for i, row in enumerate(rows):
        if count and len(kept) == count:
            break
        with _naming(f"{what} {i}"):
            ids = tokenizer.encode_prompt(row["prompt"])
        if len(ids) <= limit:
            kept.append(row)
            encoded.append(ids)
        elif long_prompts == "skip":
            long += 1
        else:
            raise BadInput(
                f"sampling.max_prompt_tokens: {what} {i} has a prompt of {len(ids)} tokens, more "
                f"than {limit}. Raise the setting, or leave such rows out: "
                "sampling.long_prompts=skip."
            )
    seen = len(kept) + long
    notes = _told((long, f"of {seen} {what}s left out: prompts of more than {limit} tokens"))
    if rows and not kept:
        raise BadInput(f"sampling.max_prompt_tokens: no {what} is left; {notes[0]}")
    return Encoded(kept, encoded, notes)


def prompt_width(encoded: Sequence[Sequence[int]]) -> int:
    """Columns that hold every prompt: the longest, rounded up to a multiple of 8."""
    return padded_width(max(map(len, encoded)))


def padded_width(length: int) -> int:
    return round_up(length, 8)


def prompt_pool(
    encoded: Sequence[Sequence[int]], pad_id: int, key: jax.Array, width: int | None = None
) -> Prompts:
    tokens, positions = pad_left(encoded, width or prompt_width(encoded), pad_id)
    return Prompts(jnp.asarray(tokens), jnp.asarray(positions), key)


def worked_examples(
    task: Task,
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    seed: int,
    max_new_tokens: int,
) -> Batch:
    """The task's worked completions, each ended by the stop token, as one batch of all data.

    `prompts` are the training rows' ids. Completions longer than `max_new_tokens` are left out;
    BadInput if none is left.
    """
    rng = random.Random(seed)
    kept, completions = [], []
    for prompt, row in zip(prompts, task.train, strict=True):
        for _ in range(task.demonstrations):
            completion = tokenizer.encode_answer(row["prompt"], task.demonstrate(row, rng))
            if len(completion) <= max_new_tokens:
                kept.append(prompt)
                completions.append(completion)
    if not kept:
        raise BadInput(
            f"sampling.max_new_tokens: none of the worked completions fits into {max_new_tokens} "
            "tokens."
        )
    return _behind_prompts(kept, completions, tokenizer.pad_id)


def preference_pairs(
    pairs: Sequence[Pair], tokenizer: Tokenizer, *, max_prompt_tokens: int, max_new_tokens: int
) -> tuple[Batch, tuple[str, ...]]:
    """Rows 2i (chosen) and 2i + 1 (rejected), and what was left out or cut, a sentence each.

    A completion is ended by the stop token, or cut after `max_new_tokens` tokens. A pair whose
    prompt is too long is left out, and so is one whose completions are equal when cut: its loss is
    log 2 whatever the policy, with no gradient. BadInput if none is left.
    """
    prompts, completions, margins = [], [], []
    long = equal = cut = 0
    for i, pair in enumerate(pairs):
        with _naming(f"preference pair {i}"):
            prompt = tokenizer.encode_prompt(pair.prompt)
            whole = [tokenizer.encode_answer(pair.prompt, a) for a in (pair.chosen, pair.rejected)]
        if len(prompt) > max_prompt_tokens:
            long += 1
            continue
        chosen, rejected = (ids[:max_new_tokens] for ids in whole)
        if chosen == rejected:
            equal += 1
            continue
        cut += sum(len(ids) > max_new_tokens for ids in whole)
        prompts += [prompt, prompt]
        completions += [chosen, rejected]
        margins += [pair.margin, pair.margin]
    notes = _told(
        (long, f"of {len(pairs)} pairs left out: prompts of more than {max_prompt_tokens} tokens"),
        (equal, f"of {len(pairs)} pairs left out: equal in their first {max_new_tokens} tokens"),
        (cut, f"of {len(completions)} completions cut after {max_new_tokens} tokens"),
    )
    if not prompts:
        raise BadInput(
            "sampling.max_prompt_tokens, sampling.max_new_tokens: no preference pair is left; "
            + "; ".join(notes)
        )
    batch = _behind_prompts(prompts, completions, tokenizer.pad_id)
    sides = jnp.asarray(np.resize([1.0, -1.0], (len(prompts), 1)), jnp.float32)
    (signal,) = batch.signals
    return batch._replace(
        margins=jnp.asarray(margins, jnp.float32)[:, None],
        signals=(signal._replace(advantages=sides),),
    ), notes


def encode_conversation(chat: Messages | Answered, tokenizer: Tokenizer) -> list[ChatText]:
    """A conversation to learn its assistant turns from, or an answer alone: then the prompt's ids
    and the answer's are those that a pair's, and a sampled text's, have."""
    if not isinstance(chat, Answered):
        return tokenizer.encode_chat(chat)
    prompt = tokenizer.encode_prompt(chat.prompt)
    answer = tokenizer.encode_answer(chat.prompt, chat.answer)
    learnt = [False] * len(prompt) + [True] * len(answer)
    return [ChatText([*prompt, *answer], learnt)]


def chat_rows(
    conversations: Sequence[Messages | Answered], tokenizer: Tokenizer, *, width: int, packing: bool
) -> tuple[Batch, tuple[str, ...]]:
    """Whole conversations, T = S - 1, the mask true on the assistant's tokens alone.

    A conversation comes to one text, or to several where the chat template rewrites its earlier
    turns (`Tokenizer.encode_chat`). Those of more than `width` tokens are left out. With `packing`
    a row holds as many as fit, in which positions begin again at 0, so that they do not see each
    other; without, a row holds one. Returns what was left out too; BadInput if nothing remains.
    """
    encoded = []
    for i, messages in enumerate(conversations):
        with _naming(f"conversation {i}"):
            encoded.append(encode_conversation(messages, tokenizer))
    texts = [text for several in encoded for text in several]
    fitting = [text for text in texts if len(text.ids) <= width]
    notes = _told(
        (
            sum(len(several) > 1 for several in encoded),
            f"of {len(encoded)} conversations come to several texts: the template rewrites history",
        ),
        (len(texts) - len(fitting), f"of {len(texts)} texts left out: more than {width} tokens"),
    )
    if not fitting:
        raise BadInput(f"None of the {len(texts)} conversations fits into {width} tokens.")
    rows = first_fit([len(text.ids) for text in fitting], width) if packing else None
    rows = rows or [[i] for i in range(len(fitting))]
    columns = padded_width(max(sum(len(fitting[i].ids) for i in row) for row in rows))
    tokens = np.full((len(rows), columns), tokenizer.pad_id, np.int32)
    positions = np.full((len(rows), columns), -1, np.int32)
    mask = np.zeros((len(rows), columns), bool)
    for row, members in enumerate(rows):
        start = 0
        for text in (fitting[i] for i in members):
            end = start + len(text.ids)
            tokens[row, start:end] = text.ids
            positions[row, start:end] = np.arange(len(text.ids))
            mask[row, start:end] = text.assistant
            # nothing of its own stands before it: the column before belongs to another text
            mask[row, start] = False
            start = end
    return _batch(tokens, positions, mask[:, 1:]), notes


def first_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Members of each row: the longest text first, each into the first row with room for it."""
    rows: list[list[int]] = []
    room = np.full(len(lengths), width)
    for i in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        row = int(np.argmax(room[: len(rows) + 1] >= lengths[i]))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Puts what was being read in front of an error."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{what}: {error}") from error


def _told(*counts: tuple[int, str]) -> tuple[str, ...]:
    return tuple(f"{count} {what}." for count, what in counts if count)


def _behind_prompts(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad_id: int
) -> Batch:
    """Each prompt padded on its left, its completion on its right."""
    tokens, positions = pad_left(prompts, prompt_width(prompts), pad_id)
    shape = (len(prompts), padded_width(max(map(len, completions))))
    answers = np.full(shape, pad_id, np.int32)
    places = np.full(shape, -1, np.int32)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        answers[i, : len(completion)] = completion
        places[i, : len(completion)] = len(prompt) + np.arange(len(completion))
    return _batch(
        np.concatenate([tokens, answers], axis=1),
        np.concatenate([positions, places], axis=1),
        places >= 0,
    )


def _batch(tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> Batch:
    """One signal: imitate all that is under the mask."""
    zeros = jnp.zeros(mask.shape, jnp.float32)
    mask = jnp.asarray(mask)
    return Batch(
        tokens=jnp.asarray(tokens),
        positions=jnp.asarray(positions),
        mask=mask,
        sampler_logprobs=zeros,
        old_logprobs=zeros,
        ref_logprobs=zeros,
        values=zeros,
        margins=zeros[:, :1],
        signals=(Signal(jnp.ones_like(zeros[:, :1]), zeros[:, :1], mask),),
    )
