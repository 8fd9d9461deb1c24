"""Sampling any number of prompts with a few compiled programs; what comes back is on the host."""

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Key, PyTree

from model.draw import Filters
from model.product import activations
from model.sample import Samples, sample
from model.sharding import batch_shards, round_up, whole
from rlx.data import pad_left
from rlx.policy import Policy

NARROWEST = 32
"""Columns of the narrowest batch of prompts. The others are its doubles, so that prompts of any
lengths make few programs."""

AHEAD = 4
"""Rows that a program takes for each that it decodes at a time: how many there are to follow when
one has finished."""


class Draw(NamedTuple):
    """How to sample; temperature 0 is greedy."""

    samples: int
    temperature: float
    filters: Filters | None = None


class Batch(NamedTuple):
    """Prompts that are sampled together."""

    width: int
    """To which they are padded."""
    places: list[int]


def batches(lengths: Sequence[int], size: int) -> Iterator[Batch]:
    """All prompts, those of like length together; `size` of them but in the last batch.

    What is left of a length goes with longer ones: as few batches as without regard to length.
    """
    alike: dict[int, list[int]] = defaultdict(list)
    for place, length in enumerate(lengths):
        # Doubled until it holds the prompt.
        alike[NARROWEST << max(0, (length - 1) // NARROWEST).bit_length()].append(place)
    waiting: list[int] = []
    for width in sorted(alike):
        waiting += alike[width]
        while len(waiting) >= size:
            yield Batch(width, waiting[:size])
            waiting = waiting[size:]
    if waiting:
        yield Batch(max(alike), waiting)


class Generator:
    """Samples with `rows` decoded at a time. What a prompt gets does not depend on the others: its
    noise is of (key, place of the prompt, sample).

    `prompts` is how many a call will bring, or the least of several such numbers.
    """

    def __init__(self, policy: Policy, *, max_new_tokens: int, rows: int, prompts: int):
        self.rows, self.prompts = rows, prompts
        self.limit, self.pad_id = max_new_tokens, policy.tokenizer.pad_id
        # The program holds on to these for as long as it lives, and must not to the parameters.
        config, dtype = policy.config, policy.dtype
        stop_ids, pad_id = policy.tokenizer.stop_ids, policy.tokenizer.pad_id

        @functools.partial(jax.jit, static_argnames="group")
        def generate(params, tokens, positions, places, limits, key, temperature, filters, group):
            def keys_of(place):
                own = jax.random.fold_in(key, place)
                return jax.vmap(lambda g: jax.random.fold_in(own, g))(jnp.arange(group))

            samples = sample(
                config,
                params,
                tokens,
                positions,
                jax.vmap(keys_of)(places),
                max_new_tokens=max_new_tokens,
                stop_ids=jnp.asarray(stop_ids, jnp.int32),
                pad_id=pad_id,
                temperature=temperature,
                filters=filters,
                slots=rows,
                limits=jnp.broadcast_to(limits[:, None], (len(limits), group)),
                dtype=dtype,
                activations=activations(dtype),
            )
            return whole(samples)

        self.run = generate

    def __call__(
        self,
        params: PyTree,
        prompts: Sequence[Sequence[int]],
        draw: Draw,
        key: Key[jax.Array, ""],
        limits: Sequence[int] | None = None,
    ) -> Samples:
        """`draw.samples` of each prompt, in order. A prompt may have a limit of its own, of new
        tokens, at most `max_new_tokens`."""
        size = max(1, min(AHEAD * self.rows // draw.samples, self.prompts))
        # Of which every part of a mesh takes as many.
        size = round_up(size, batch_shards())
        limits = np.full(len(prompts), self.limit) if limits is None else np.asarray(limits)
        taken, pieces = [], []
        for width, places in batches(list(map(len, prompts)), size):
            # The last batch is filled up with copies of no token, which are dropped: one
            # shape, one program.
            copies = size - len(places)
            every = np.array(places + places[:1] * copies, np.int32)
            tokens, positions = pad_left([prompts[i] for i in every], width, self.pad_id)
            samples = self.run(
                params,
                tokens,
                positions,
                every,
                np.append(limits[places], np.zeros(copies)).astype(np.int32),
                key,
                jnp.float32(draw.temperature),
                draw.filters,
                draw.samples,
            )
            taken += places
            pieces.append(jax.device_get(samples))
        order = np.argsort(taken)

        def join(*leaves):
            if not leaves[0].ndim:
                return sum(leaves)
            # Only copies stand after the prompts.
            every = np.concatenate(leaves)[: len(taken) * draw.samples]
            grouped = every.reshape(len(taken), draw.samples, *every.shape[1:])
            return grouped[order].reshape(every.shape)

        return jax.tree.map(join, *pieces)
