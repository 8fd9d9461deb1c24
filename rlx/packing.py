"""Which rows of an update pass through the model together: streams without padding.

Rows keep their order. A stream takes rows as long as their tokens, and their prompts' once, fit
in. A row without a token takes no place.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from model.sharding import (
    apart,
    batch_shards,
    constrain,
    each_shard,
    round_up,
    split_rows,
    together,
)
from model.stream import Places, Shape, lay_out, side_by_side
from rlx.learner import Learner
from rlx.types import Batch

FULLER = 8
"""A stream holds at most so many times the rows that fill it at full length."""
WIDEST_BLOCK = 64
"""Columns. Wider ones leave more of the stream empty, narrower ones make small matrix products."""


class Packed(NamedTuple):
    """The rows of an update, and where each of them lies."""

    tokens: Int[Array, "B S"]
    streams: Int[Array, " B"]
    """The number of each row's stream, rising."""
    places: Places
    count: Int[Array, ""]
    """Streams."""


class Layout(NamedTuple):
    """What is static of packing."""

    shape: Shape
    rows: int
    """A stream has at most so many."""
    unit: int
    """Rows that share a prompt and stay in one stream."""
    single: bool
    """One stream holds all rows, however long they are."""


def layout(batch_rows: int, micro: int, prompts: int, unit: int, prompt: int, row: int) -> Layout:
    """Of streams that hold `micro` of the batch's rows at full length, and `prompts` prompts."""
    block = WIDEST_BLOCK
    while block > 8 and block > row // 2:
        block //= 2
    rows, single = min(batch_rows, FULLER * micro), batch_rows <= micro
    # In a single stream there is room for each row to begin with a block: so all fit in. The rows
    # of a larger unit do so in any stream, and a stream may be of one unit.
    by_block = single or unit > 1
    tokens = micro * round_up(row, block) if by_block else round_up(micro * row, block)
    tokens += prompts * round_up(max(prompt - 1, 1), block)
    return Layout(Shape(tokens, block, prompt, row), rows, unit, single)


def pack(
    layout: Layout,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    prompt_lengths: Int[Array, " B"],
    prompts: Int[Array, " B"],
) -> Packed:
    """`prompts` says which rows share theirs: rows that do are best neighbours."""
    (size, block, *_), unit = layout.shape, layout.unit
    widest = (layout.shape.reach + 1) * block
    by_unit = lengths.reshape(-1, unit)
    # The rows of a larger unit all begin with a block, so that they fit in like one.
    inside = by_unit if unit == 1 else round_up(by_unit, block)

    def place(carry, of_unit):
        stream, left, right, held, before = carry
        length, prompt_length, prompt = of_unit
        slot = round_up(prompt_length - 1, block)
        other = (prompt != before) & (length > 0)
        # A row that would lie in more blocks than the longest has to begins with a block, too.
        beyond = left % block + length > widest
        start = jnp.where(other | beyond | (unit > 1), round_up(left, block), left)
        taken = jnp.where(other, right + slot, right)
        full = (start + length + taken > size) | (held + unit > layout.rows)
        start = jnp.where(full, 0, start)
        taken = jnp.where(full, jnp.where(length > 0, slot, 0), taken)
        held = jnp.where(full, 0, held) + unit
        before = jnp.where(length > 0, prompt, jnp.where(full, -1, before))
        stream = stream + full
        return (stream, start + length, taken, held, before), (stream, start, size - taken)

    zero = jnp.int32(0)
    units = (jnp.sum(inside, axis=1), prompt_lengths[::unit], prompts[::unit])
    (last, *_), (streams, starts, prompt_starts) = jax.lax.scan(
        place, (zero, zero, zero, zero, jnp.int32(-1)), units
    )
    starts = (starts[:, None] + jnp.cumsum(inside, axis=1) - inside).reshape(-1)
    places = Places(starts, lengths, jnp.repeat(prompt_starts, unit), prompt_lengths)
    return Packed(tokens, jnp.repeat(streams, unit), places, last + 1)


def for_each_stream(
    layout: Layout,
    packed: Packed,
    rows: PyTree,
    of_stream: Callable,
    start: PyTree,
    add: Callable,
) -> PyTree:
    """`add(total, of_stream(stream, places, rows, inside), first, inside)` from `start` on, over
    the streams that hold a token; a single stream's result as it is.

    `packed` has the parts of the batch as its first axis, each of which lies in streams of its own.
    One stream of each part goes through the model at a time, side by side. `rows` are those that
    belong to the streams, cut along: of each part `layout.rows` of them from its row `first`, of
    which `inside` is false on those of other streams.
    """
    cap = layout.rows
    shards = packed.count.shape[0]

    def lay_out_all(places, tokens):
        stream = each_shard(functools.partial(lay_out, layout.shape), places, tokens)
        return side_by_side(stream), split_rows(jax.tree.map(together, places))

    if layout.single:
        inside = jnp.ones(shards * cap, bool)
        return of_stream(*lay_out_all(packed.places, packed.tokens), rows, inside)

    def padded(x):
        return jnp.pad(x, ((0, 0), (0, cap), *[(0, 0)] * (x.ndim - 2)))

    by_part = jax.tree.map(lambda x: apart(x, shards), rows)
    everything = jax.tree.map(padded, (packed.tokens, packed.places, by_part))
    numbers = jnp.pad(packed.streams, ((0, 0), (0, cap)), constant_values=-1)

    def one(number, total):
        first = each_shard(lambda streams: jnp.searchsorted(streams, number), packed.streams)

        def cut(x):
            piece = each_shard(lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, cap), x, first)
            return constrain(piece, "batch")

        tokens, places, piece = jax.tree.map(cut, everything)
        inside = cut(numbers) == number
        places = places._replace(lengths=jnp.where(inside, places.lengths, 0))

        def use():
            flat = split_rows(jax.tree.map(together, (piece, inside)))
            result = of_stream(*lay_out_all(places, tokens), *flat)
            return add(total, result, first, flat[1])

        return jax.lax.cond(jnp.any(places.lengths > 0), use, lambda: total)

    return jax.lax.fori_loop(0, jnp.max(packed.count), one, start)


def pack_rows(
    learner: Learner, batch: Batch, weights: PyTree, prompts: Int[Array, " B"] | None
) -> tuple[Batch, PyTree, Packed, Layout]:
    """The rows of an update, those of a prompt side by side, and where each lies."""
    rows, width = batch.mask.shape
    if prompts is None:
        prompts = jnp.arange(rows) // learner.samples
    unit = learner.unit
    order = jnp.argsort(prompts[::unit], stable=True)
    order = (order[:, None] * unit + jnp.arange(unit)).reshape(-1)
    ordered = jax.tree.map(lambda x: x[order], (batch, weights, prompts))
    batch, weights, prompts = split_rows(ordered)
    packed, how = pack_text(learner, batch.tokens, batch.positions, batch.mask, prompts, width)
    return batch, weights, packed, how


def pack_text(
    learner: Learner,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    mask: Bool[Array, "B T"],
    prompts: Int[Array, " B"],
    columns: int,
) -> tuple[Packed, Layout]:
    """Each part of the batch in streams of its own. `columns`: T, or T + 1 where the state after
    the last token is asked for too."""
    shards = batch_shards()
    rows, micro, width = mask.shape[0] // shards, learner.micro // shards, mask.shape[1]
    prompt = tokens.shape[1] - width
    # Rows of one prompt are one group, or, after a shuffle, as many as came into this mini-batch.
    groups = min(rows, -(-learner.minibatches * mask.shape[0] // learner.samples))
    if learner.minibatches == 1:
        groups = min(rows, -(-rows // learner.samples) + (rows % learner.samples > 0))
    if micro < rows:
        groups = -(-micro // learner.samples)
    how = layout(rows, micro, groups, learner.unit, prompt, columns)
    lengths = jnp.max(jnp.where(mask, jnp.arange(1, width + 1), 0), axis=1)
    lengths = jnp.where(lengths > 0, lengths + columns - width, 0)
    prompt_lengths = jnp.sum(positions[:, :prompt] >= 0, axis=1)
    parts = (apart(x, shards) for x in (tokens, lengths, prompt_lengths, prompts))
    return each_shard(functools.partial(pack, how), *parts), how
