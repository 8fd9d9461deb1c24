"""Attention over whole rows, rotary phases, and what every kind of attention is.

Letters: B rows, S columns, H query heads, K key-value heads, d width of a head, R = H / K.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from model.product import product, written_out
from model.rope import Scaling, frequencies

MASKED = -1e30
"""Finite, so that a padding query, which sees no key, gives garbage and not NaN."""


@runtime_checkable
class Context(Protocol):
    """What the tokens of one forward pass may see, in one layer."""

    def attend(
        self,
        query: Float[Array, "B S H d"],
        key: Float[Array, "B S K d"],
        value: Float[Array, "B S K d"],
    ) -> tuple[Float[Array, "B S H d"], PyTree]:
        """What each token takes from the tokens that it sees, and what the layer leaves behind."""
        ...


class Phases(NamedTuple):
    """Of rotary embedding, in float32 whatever the model computes in: bf16 rounds position 257."""

    cosine: Float[Array, "B S 1 d"]
    sine: Float[Array, "B S 1 d"]
    """With the sign of what it multiplies: -sin in the first half, sin in the second."""


def rotary_phases(
    positions: Int[Array, "B S"], head_dim: int, theta: float, scaling: Scaling | None = None
) -> Phases:
    """The same in all layers, so that they are computed once a forward pass."""
    turned, scale = frequencies(head_dim, theta, scaling)
    angles = jnp.maximum(positions, 0)[..., None, None].astype(jnp.float32) * turned
    cosine, sine = jnp.cos(angles) * scale, jnp.sin(angles) * scale
    return Phases(jnp.concatenate([cosine, cosine], -1), jnp.concatenate([-sine, sine], -1))


def rotate(x: Float[Array, "B S heads d"], phases: Phases) -> Float[Array, "B S heads d"]:
    """Rotary embedding with the halves paired (i, i + d/2), as Hugging Face stores them.

    The halves change places before any arithmetic: XLA computes inside a concatenation one number
    at a time, which made a decode step a tenth longer on CPU.
    """
    wide = x.astype(jnp.float32)
    low, high = jnp.split(wide, 2, axis=-1)
    swapped = jnp.concatenate([high, low], axis=-1)
    return (wide * phases.cosine + swapped * phases.sine).astype(x.dtype)


def causal_mask(positions: Int[Array, "B S"]) -> Bool[Array, "B S S"]:
    """True where a query (second axis) may see a key (third).

    A new segment begins at every position 0, so packed texts do not see each other; padding,
    at position -1, is seen by nobody.
    """
    columns = jnp.arange(positions.shape[1])
    segments = jnp.cumsum(positions == 0, axis=1)
    same = segments[:, :, None] == segments[:, None, :]
    return same & (columns[:, None] >= columns[None, :]) & (positions >= 0)[:, None, :]


def attend(
    query: Float[Array, "B S H d"],
    key: Float[Array, "B s K d"],
    value: Float[Array, "B s K d"],
    mask: Bool[Array, "B S s"],
) -> Float[Array, "B S H d"]:
    """Softmax attention of S columns to s columns; scores and softmax in float32."""
    rows, columns, heads, width = query.shape
    seen, kv_heads = key.shape[1:3]
    repeats = heads // kv_heads
    # The queries that share a key head become rows of one matrix.
    query = query.reshape(rows, columns, kv_heads, repeats, width).transpose(0, 2, 3, 1, 4)
    query = query.reshape(rows, kv_heads, repeats * columns, width)
    scores = product(query, written_out(key.transpose(0, 2, 3, 1)), key.dtype)
    scores = scores.reshape(rows, kv_heads, repeats, columns, seen) * width**-0.5
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    # A softmax whose division comes after the product with the values: one pass less over S x s.
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    weights = weights.reshape(rows, kv_heads, repeats * columns, seen)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = product(weights, written_out(value.transpose(0, 2, 1, 3)), value.dtype)
    mixed = (mixed / total).astype(value.dtype)
    mixed = mixed.reshape(rows, kv_heads, repeats, columns, width).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(rows, columns, heads, width)


class WholeRows(NamedTuple):
    """Whole rows, which see nothing but themselves; a layer leaves its keys and values."""

    mask: Bool[Array, "B S S"]

    def attend(self, query, key, value):
        return attend(query, key, value, self.mask), (key, value)
