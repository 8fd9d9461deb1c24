"""From a task's rows to arrays: the pool of prompts, and worked examples as batches."""

import random
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from model.errors import BadInput
from model.tokenizer import Tokenizer
from rlx.rollout import Prompts
from rlx.tasks import Task
from rlx.types import Batch


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


def encode_prompts(
    rows: Sequence[Mapping], tokenizer: Tokenizer, limit: int, what: str
) -> list[list[int]]:
    """Each row's prompt as ids; `what` names the rows in an error. Raises BadInput for a prompt of
    more than `limit` tokens."""
    encoded = [tokenizer.encode_prompt(row["prompt"]) for row in rows]
    for i, ids in enumerate(encoded):
        if len(ids) > limit:
            raise BadInput(
                f"sampling.max_prompt_tokens: {what} {i} has a prompt of {len(ids)} tokens, more "
                f"than {limit}. Raise the setting, or leave such rows out of the data."
            )
    return encoded


def prompt_width(encoded: Sequence[Sequence[int]]) -> int:
    """Columns that hold every prompt: the longest, rounded up to a multiple of 8, so that a run
    on slightly other data compiles the same programs."""
    return -(-max(2, *map(len, encoded)) // 8) * 8


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
    stop = tokenizer.stop_ids[-1] if tokenizer.end_id is None else tokenizer.end_id
    pairs = []
    for prompt, row in zip(prompts, task.train, strict=True):
        for _ in range(task.demonstrations):
            completion = [*tokenizer.encode(task.demonstrate(row, rng)), stop]
            if len(completion) <= max_new_tokens:
                pairs.append((prompt, completion))
    if not pairs:
        raise BadInput(
            f"sampling.max_new_tokens: none of the worked completions fits into {max_new_tokens} "
            "tokens."
        )
    width = prompt_width([prompt for prompt, _ in pairs])
    tokens, positions = pad_left([prompt for prompt, _ in pairs], width, tokenizer.pad_id)
    rest = max(len(completion) for _, completion in pairs)
    rest = -(-rest // 8) * 8
    answers = np.full((len(pairs), rest), tokenizer.pad_id, np.int32)
    places = np.full((len(pairs), rest), -1, np.int32)
    for i, (prompt, completion) in enumerate(pairs):
        answers[i, : len(completion)] = completion
        places[i, : len(completion)] = len(prompt) + np.arange(len(completion))
    zeros = jnp.zeros((len(pairs), rest), jnp.float32)
    return Batch(
        tokens=jnp.asarray(np.concatenate([tokens, answers], axis=1)),
        positions=jnp.asarray(np.concatenate([positions, places], axis=1)),
        mask=jnp.asarray(places >= 0),
        sampler_logprobs=zeros,
        old_logprobs=zeros,
        ref_logprobs=zeros,
        advantages=zeros[:, :1],
    )
