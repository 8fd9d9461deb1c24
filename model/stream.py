"""Completions of many rows, and each of their prompts once, in one stream without padding.

    | row 0 | row 1 | row 2 |  | row 3 | row 4 |      ...      | prompt B | prompt A |

A row is the prompt's last token and all sampled tokens but the last: the hidden state at its column
t predicts its token t. Rows fill the stream from the left, one behind the other; the rows of
another prompt begin a new block of `block` columns, so that all tokens of a block see the same
prompt. Prompts, without their last token, fill whole blocks from the right.

A token sees its prompt, and its own row up to itself: in its own block and in the blocks to the
left over which the longest row can reach. So the cost of attention follows the tokens that are
there, and whatever is computed token by token is computed for real tokens alone.

Letters: M blocks, c columns of a block, P a prompt's tokens, B rows, T a row's columns.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from model.attention import attend
from model.sharding import apart, constrain, each_shard, split_rows, together


class Shape(NamedTuple):
    """What is static of a stream."""

    tokens: int
    """Its length; a multiple of `block`."""
    block: int
    prompt: int
    """Tokens of the longest prompt."""
    row: int
    """Columns of the longest row."""

    @property
    def blocks(self) -> int:
        return self.tokens // self.block

    @property
    def prompt_blocks(self) -> int:
        return -(-(self.prompt - 1) // self.block)

    @property
    def reach(self) -> int:
        """Blocks to the left of its own that a row's token may need: no row lies in more blocks
        than the longest does that begins with one."""
        return -(-self.row // self.block) - 1


class Places(NamedTuple):
    """Where rows and their prompts lie: later rows further right, later prompts further left."""

    starts: Int[Array, " B"]
    lengths: Int[Array, " B"]
    """0 for a row that is not in the stream."""
    prompt_starts: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]
    """With the last token, which is not among those at `prompt_starts`."""


class Stream(NamedTuple):
    tokens: Int[Array, "M c"]
    targets: Int[Array, "M c"]
    """The token that each column predicts."""
    positions: Int[Array, "M c"]
    """-1 marks padding."""
    predicts: Bool[Array, "M c"]
    """True on the columns of rows, false on prompts and padding."""
    context: "StreamContext"


class StreamContext(NamedTuple):
    """Of one stream, or of several side by side, none of which sees another. Letter s: streams."""

    prompt_blocks: Int[Array, "s M n"]
    """The blocks of each block's prompt, in its own stream."""
    mask: Bool[Array, "s*M c p"]
    """Which of the prompt's columns, then of the columns within reach, a token sees."""

    def attend(self, query, key, value):
        streams, _, prompts = self.prompt_blocks.shape
        reach = self.mask.shape[2] // key.shape[1] - prompts - 1

        def of_stream(x, prompt_blocks):
            padded = jnp.pad(x, ((reach, 0), (0, 0), (0, 0), (0, 0)))
            near = [padded[i : i + x.shape[0]] for i in range(reach + 1)]
            far = [x[blocks] for blocks in prompt_blocks.T]
            return jnp.concatenate(far + near, axis=1)

        def visible(x):
            seen = together(each_shard(of_stream, apart(x, streams), self.prompt_blocks))
            return constrain(seen, "batch", None, "kv_heads")

        return attend(query, visible(key), visible(value), self.mask), None


def side_by_side(stream: Stream) -> Stream:
    """Streams whose arrays have an axis of their own in front, as one: that of a part of the batch
    after the other."""
    blocks = stream.context.prompt_blocks.squeeze(1)
    merged = split_rows(jax.tree.map(together, stream))
    return merged._replace(context=merged.context._replace(prompt_blocks=blocks))


def lay_out(
    shape: Shape,
    places: Places,
    tokens: Int[Array, "B S"],
) -> Stream:
    """The stream of rows whose prompts end before column `shape.prompt`, padded on their left."""
    count, block = shape.tokens, shape.block
    index = jnp.arange(count)
    starts = jnp.where(places.lengths > 0, places.starts, count)

    # ---- rows: each column's is the last one that starts at or before it ----------------------
    order = jnp.where(places.lengths > 0, jnp.arange(starts.shape[0]), -1)
    row = jnp.max(jnp.where(starts[None] <= index[:, None], order[None], -1), axis=1)
    column = index - starts[row]
    in_row = (row >= 0) & (column < places.lengths[row])

    # ---- prompts: the first row's whose prompt starts at or before the column -----------------
    prompt_starts = jnp.where(places.lengths > 0, places.prompt_starts, count)
    owner = jnp.argmax(prompt_starts[None] <= index[:, None], axis=1)
    prompt_column = index - prompt_starts[owner]
    in_prompt = (prompt_column >= 0) & (prompt_column < places.prompt_lengths[owner] - 1)

    source = jnp.where(in_row, row, owner)
    first = places.prompt_lengths[source] - 1
    position = jnp.where(in_row, first + column, prompt_column)
    place = shape.prompt - places.prompt_lengths[source] + position
    used = in_row | in_prompt
    flat = source * tokens.shape[1] + place
    inputs = jnp.where(used, tokens.reshape(-1)[flat], 0)
    targets = jnp.where(in_row, tokens.reshape(-1)[flat + 1], 0)

    # ---- what each token sees -------------------------------------------------------------------
    def by_block(x):
        return x.reshape(-1, block)

    heads = by_block(source)[:, 0]
    first_block = prompt_starts[heads] // block
    prompt_blocks = jnp.minimum(
        first_block[:, None] + jnp.arange(shape.prompt_blocks), shape.blocks - 1
    )
    far = jnp.arange(shape.prompt_blocks * block)
    limit = jnp.where(in_row, first, prompt_column + 1)
    sees_far = (far < by_block(limit)[:, :, None]) & by_block(used)[:, :, None]
    near = jnp.arange(-shape.reach * block, block)
    left = near - jnp.arange(block)[:, None]  # [c, near]: 0 is the token itself
    sees_near = (left <= 0) & (-left <= by_block(column)[:, :, None]) & by_block(in_row)[:, :, None]
    return Stream(
        by_block(inputs),
        by_block(targets),
        by_block(jnp.where(used, position, -1)),
        by_block(in_row),
        StreamContext(prompt_blocks[None], jnp.concatenate([sees_far, sees_near], axis=2)),
    )
