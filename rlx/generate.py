"""Sampling any number of prompts with one compiled program; what comes back is on the host."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Key, PyTree

from model.sample import Filters, Samples, sample
from rlx.assemble import Policy


class Draw(NamedTuple):
    """How to sample; temperature 0 is greedy."""

    samples: int
    temperature: float
    filters: Filters | None = None


class Generator:
    """Samples in batches of `rows`. What a prompt gets does not depend on the batch it is in: its
    noise is of (key, place of the prompt, sample)."""

    def __init__(self, policy: Policy, *, max_new_tokens: int, rows: int):
        self.rows = rows
        # The program holds on to these for as long as it lives, and must not to the parameters.
        config, dtype = policy.config, policy.dtype
        stop_ids, pad_id = policy.tokenizer.stop_ids, policy.tokenizer.pad_id

        @functools.partial(jax.jit, static_argnames="group")
        def run(params, tokens, positions, places, first, key, temperature, filters, group):
            def keys_of(place):
                own = jax.random.fold_in(key, place)
                return jax.vmap(lambda g: jax.random.fold_in(own, g))(first + jnp.arange(group))

            return sample(
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
                dtype=dtype,
            )

        self.run = run

    def __call__(
        self,
        params: PyTree,
        tokens: Int[np.ndarray, "M P"],
        positions: Int[np.ndarray, "M P"],
        draw: Draw,
        key: Key[jax.Array, ""],
    ) -> Samples:
        """`draw.samples` of each of the M prompts, in order."""
        group = min(draw.samples, self.rows)
        prompts = max(1, self.rows // group)
        pieces = []
        for start in range(0, len(tokens), prompts):
            # The last batch is filled up with copies, which are dropped: one shape, one program.
            places = np.arange(start, start + prompts) % len(tokens)
            count = min(prompts, len(tokens) - start)
            rounds = [
                self.run(
                    params,
                    tokens[places],
                    positions[places],
                    places,
                    number * group,
                    key,
                    jnp.float32(draw.temperature),
                    draw.filters,
                    group,
                )
                for number in range(math.ceil(draw.samples / group))
            ]

            def join(*leaves, count=count):
                grouped = [leaf.reshape(prompts, group, *leaf.shape[1:]) for leaf in leaves]
                joined = np.concatenate(grouped, axis=1)[:count, : draw.samples]
                return joined.reshape(-1, *leaves[0].shape[1:])

            pieces.append(jax.tree.map(join, *jax.device_get(rounds)))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
