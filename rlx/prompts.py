"""The pool of prompts, and which of them come next: epoch after epoch, the retired passed over.

Of a mixture of tasks: mixture.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from rlx.types import Cursor


class Prompts(NamedTuple):
    """The task's tokenised pool, on device."""

    tokens: Int[Array, "M P"]
    """Padded on the left."""
    positions: Int[Array, "M P"]
    """-1 marks padding."""
    key: Key[Array, ""]
    """From it comes the order of every epoch."""


class Draw(NamedTuple):
    """Which prompts come next."""

    rows: Int[Array, " N"]
    epochs: Int[Array, " N"]
    """The epoch that each is drawn in."""
    cursor: Cursor
    """Behind the last of them."""


def next_rows(
    pool: Prompts,
    cursor: Int[Array, ""],
    count: int,
    retired: Bool[Array, " M"] | None = None,
) -> Draw:
    """The next prompts: every epoch is a new order of the whole pool, `cursor` counts on through
    all of them. `count` is at most the pool's size.

    Retired prompts are passed over, unless fewer than `count` are left: then they fill up.
    """
    size = pool.tokens.shape[0]
    first, place = cursor // size, cursor % size

    def order(e):
        return jax.random.permutation(jax.random.fold_in(pool.key, e), size)

    order_now = order(first)
    ahead = jnp.arange(size) >= place
    if retired is None:
        beyond = place + count > size
    else:
        beyond = jnp.sum(ahead & ~retired[order_now]) < count
    # Sorting a large pool takes a share of a step; the second order is seldom needed.
    order_next = jax.lax.cond(beyond, lambda: order(first + 1), lambda: order_now)
    rows = jnp.concatenate([order_now, order_next])
    if retired is None:
        places = place + jnp.arange(count)
    else:
        # What this epoch still holds is not taken from the next one too: a draw then has no prompt
        # twice, and a visit counts once.
        waiting = jnp.zeros(size, bool).at[order_now].set(ahead)
        free = jnp.concatenate([ahead, ~waiting[order_next]])
        rank = jnp.where(free, retired[rows].astype(jnp.int32), 2)
        places = jnp.argsort(rank, stable=True)[:count]
    return Draw(rows[places], first + places // size, first * size + jnp.max(places) + 1)


def count_solved(
    solved: Int[Array, " M"] | None, rows: Int[Array, " N"], correct: Float[Array, "N G"]
) -> Int[Array, " M"] | None:
    """One more visit to each of these prompts: another all right, or the end of a series."""
    if solved is None:
        return None
    return solved.at[rows].set(jnp.where(jnp.all(correct == 1, axis=1), solved[rows] + 1, 0))
