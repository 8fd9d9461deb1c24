"""Scoring: log-probabilities, entropy and values of text that is there, by micro-batches.

By the forward pass of the loss, without a gradient: of the training model, its critic, a reference.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from model.heads import Outputs
from model.sharding import (
    apart,
    batch_shards,
    constrain,
    each_shard,
    in_row_order,
    micro_batches,
    together,
)
from rlx.learner import Learner, forward, forward_stream
from rlx.packing import for_each_stream, pack_text


def score_rows(
    learner: Learner,
    params: PyTree,
    critic: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    width: int,
) -> Outputs:
    """`forward` on any number of rows, by micro-batches. What is not read costs nothing in jit."""
    pieces = jax.tree.map(lambda x: micro_batches(x, learner.micro), (tokens, positions))

    def of_piece(piece):
        return forward(learner, params, critic, *piece, width)._replace(load=None)

    return jax.tree.map(in_row_order, jax.lax.map(of_piece, pieces))


def score_completions(
    learner: Learner,
    params: PyTree,
    critic: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    mask: Bool[Array, "B T"],
) -> Outputs:
    """`forward` on sampled rows, packed where the learner packs. Outside the mask stands garbage;
    the values reach one column further than the row does."""
    rows, width = mask.shape
    if not learner.packing:
        return score_rows(learner, params, critic, tokens, positions, width)
    columns = width + (learner.valued is not None)
    prompts = jnp.arange(rows) // learner.samples
    packed, how = pack_text(learner, tokens, positions, mask, prompts, columns)

    def of_stream(stream, places, piece, inside):
        outputs = forward_stream(learner, params, critic, stream, places, width)
        return outputs._replace(load=None)

    shards = batch_shards()
    each = rows // shards

    def put(total, new, first, inside):
        old = jax.lax.dynamic_slice_in_dim(total, first, how.rows)
        new = jnp.where(inside[:, None], new, old)
        return jax.lax.dynamic_update_slice_in_dim(total, new, first, 0)

    def add(total, outputs, first, inside):
        inside = apart(inside, shards)
        return jax.tree.map(
            lambda x, y: each_shard(put, x, apart(y, shards), first, inside), total, outputs
        )

    def zeros(columns):
        empty = jnp.zeros((shards, each + how.rows, columns), jnp.float32)
        return constrain(empty, "batch")

    start = Outputs(zeros(width), zeros(width), zeros(width + 1))
    outputs = for_each_stream(how, packed, (), of_stream, start, add)
    if how.single:
        return outputs
    return jax.tree.map(lambda x: together(x[:, :each]), outputs)
