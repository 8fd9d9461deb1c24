"""Drawing a token from logits: by temperature, filters and one random number a row.

The filters act in this order, each on what the former left: temperature, top-k, top-p, min-p.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK = 128
"""Tokens that a draw takes together at first."""

CANDIDATES = 128
"""The likeliest tokens, among which filters are decided where they can be: sorting them all takes
27 times as long for 32,000 tokens on CPU."""

PART = 16
"""Tokens of which the largest is looked at first, to find the candidates."""


class Filters(NamedTuple):
    """Which tokens may be drawn. They serve evaluation and generation, never training."""

    top_k: Int[Array, ""] | int = 0
    """Keep the k likeliest; 0 keeps all."""
    top_p: Float[Array, ""] | float = 1.0
    """Keep a token where the mass of the likelier ones is below p; the likeliest always."""
    min_p: Float[Array, ""] | float = 0.0
    """Keep a token whose probability is at least this share of the likeliest's."""


class Drawn(NamedTuple):
    token: Int[Array, " B"]
    logprob: Float[Array, " B"]
    """Of the full softmax at the temperature, whatever the filters forbade."""
    finite: Bool[Array, " B"]
    """False where the logits held a NaN or an infinity."""


def draw_token(
    logits: Float[Array, "B V"],
    uniform: Float[Array, " B"],
    temperature: float | Float[Array, ""],
    filters: Filters | None,
    axis: str | None = None,
) -> Drawn:
    """One token a row. Temperature 0 is greedy, with log-probabilities at temperature 1.

    `axis` is that of the mesh over which the vocabulary lies split, inside `shard_map`. Then a few
    numbers a row travel, and no logits; but filters rank all tokens, and so put the parts together.
    """
    if axis is not None and filters is not None:
        logits = jax.lax.all_gather(logits, axis, axis=1, tiled=True)
        axis = None
    # As few passes over [B, V] as there can be: with a large vocabulary each is as long as a layer.
    greedy = jnp.equal(temperature, 0)
    divisor = jnp.where(greedy, 1.0, temperature)
    highest, lowest = jnp.max(logits, axis=-1), jnp.min(logits, axis=-1)
    finite = jnp.isfinite(highest) & jnp.isfinite(lowest)
    if axis is not None:
        highest = jax.lax.pmax(highest, axis)
        # A maximum over devices may leave a NaN out.
        finite = jax.lax.pmin(finite.astype(jnp.int32), axis) > 0
    scaled, top = logits / divisor, highest / divisor
    weights = jnp.exp(scaled - top[:, None])
    total = jnp.sum(_masses(weights), axis=-1)
    allowed = weights if filters is None else keep(weights / total[:, None], filters)
    # The draw's lowest level is the first token that is allowed.
    allowed = jnp.where(greedy, logits == highest[:, None], allowed)
    uniform = jnp.where(greedy, 0.0, uniform)
    if axis is None:
        token = draw(allowed, uniform)
        chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    else:
        total = jax.lax.psum(total, axis)
        place, here = _draw_of_parts(allowed, uniform, axis)
        token = place + jax.lax.axis_index(axis) * logits.shape[1]
        chosen = jnp.take_along_axis(scaled, place[:, None], axis=-1)[:, 0]
        token, chosen = (jax.lax.psum(jnp.where(here, x, 0), axis) for x in (token, chosen))
    logprob = chosen - top - jnp.log(total)
    return Drawn(token, logprob, finite)


def _blocks(weights):
    rows, size = weights.shape
    return jnp.pad(weights, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)


def _masses(weights):
    return jnp.sum(_blocks(weights), axis=-1)


def draw(weights: Float[Array, "B V"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The token at which the cumulative distribution passes `uniform`: one random number a row.

    `weights` need not add up to one. A token of weight 0 is never drawn.
    """
    # First the block of tokens, then the token: a cumulative sum over all V is several passes
    # over them, a sum is one. At 64 x 32,000 on CPU 2 ms instead of 12.
    masses = _masses(weights)
    level = uniform * jnp.sum(masses, axis=-1)
    block = _passing(masses, level)
    earlier = jnp.arange(masses.shape[1]) < block[:, None]
    level = jnp.maximum(level - jnp.sum(jnp.where(earlier, masses, 0.0), axis=-1), 0.0)
    inside = jnp.take_along_axis(_blocks(weights), block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _passing(inside, level)


def _draw_of_parts(
    weights: Float[Array, "B v"], uniform: Float[Array, " B"], axis: str
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """`draw` from the parts of a vocabulary: each row's token, counted within this part, and
    whether it is in this part."""
    own = jnp.sum(_masses(weights), axis=-1)
    parts = jax.lax.all_gather(own, axis, axis=1)
    level = uniform * jnp.sum(parts, axis=-1)
    part = _passing(parts, level)
    earlier = jnp.arange(parts.shape[1]) < part[:, None]
    level = jnp.maximum(level - jnp.sum(jnp.where(earlier, parts, 0.0), axis=-1), 0.0)
    share = jnp.minimum(level / jnp.where(own > 0, own, 1.0), 1.0)
    return draw(weights, share), part == jax.lax.axis_index(axis)


def _passing(weights: Float[Array, "B n"], level: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first of positive weight at which the cumulative sum is above `level`."""
    # XLA adds in a tree, so that rounding lets the sum rise where a weight is 0, and at the end
    # above the last positive weight: such places must not count.
    cumulative = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0.0)
    level = jnp.minimum(level, jnp.nextafter(jnp.max(cumulative, axis=-1), 0.0))
    return jnp.argmax(cumulative > level[:, None], axis=-1)


def keep(probs: Float[Array, "B V"], filters: Filters) -> Float[Array, "B V"]:
    """Probabilities with 0 where a filter forbids the token. Ties go to the lower id."""
    size = probs.shape[-1]
    total = jnp.sum(probs, axis=-1, keepdims=True)

    def sort_all():
        return _least(*jax.lax.top_k(probs, size), total, filters)

    if size <= CANDIDATES:
        return _down_to(probs, *sort_all())
    top, ids = likeliest(probs, CANDIDATES)
    unranked = jnp.equal(filters.top_k, 0)
    by_rank = ~unranked & jnp.less_equal(filters.top_k, CANDIDATES)
    by_mass = unranked & (jnp.sum(top, axis=-1, keepdims=True) > filters.top_p * total)
    # A nucleus of more than the candidates needs their sum.
    by_share = (unranked | jnp.greater_equal(filters.top_p, 1.0)) & (
        top[:, -1:] < filters.min_p * top[:, :1]
    )
    decided = jnp.all(by_rank | by_mass & jnp.less(filters.top_p, 1.0) | by_share)
    least = jax.lax.cond(decided, lambda: _least(top, ids, total, filters), sort_all)
    return _down_to(probs, *least)


def likeliest(
    probs: Float[Array, "B V"], count: int
) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """The largest and their ids, in order; ties by the lower id: `jax.lax.top_k` of few tokens.

    Only the `count` parts of the largest maxima can hold them, and of equal maxima the first.
    """
    # On CPU `top_k` sorts whole rows. Parts in the order of ids leave ties in that order.
    padded = jnp.pad(probs, ((0, 0), (0, -probs.shape[-1] % PART)), constant_values=-1.0)
    parts = padded.reshape(len(probs), -1, PART)
    if parts.shape[1] <= count:
        return tuple(jax.lax.top_k(probs, count))
    chosen = jnp.sort(jax.lax.top_k(jnp.max(parts, axis=-1), count)[1], axis=-1)
    found = jnp.take_along_axis(parts, chosen[:, :, None], axis=1).reshape(len(probs), -1)
    ids = (chosen[:, :, None] * PART + jnp.arange(PART)).reshape(len(probs), -1)
    top, places = jax.lax.top_k(found, count)
    return top, jnp.take_along_axis(ids, places, axis=-1)


def _least(
    ranked: Float[Array, "B n"],
    ids: Int[Array, "B n"],
    total: Float[Array, "B 1"],
    filters: Filters,
) -> tuple[Float[Array, "B 1"], Int[Array, "B 1"]]:
    """Probability and id of the least likely token that all filters keep, of the n likeliest."""
    # Each filter keeps the likeliest, as many as it likes: so their number says which.
    rank = jnp.arange(ranked.shape[-1])
    kept = (rank < filters.top_k) | jnp.equal(filters.top_k, 0)
    ranked_mass = jnp.where(kept, ranked, 0.0)
    of_ranked = jnp.sum(ranked_mass, axis=-1, keepdims=True)
    mass = jnp.where(jnp.equal(filters.top_k, 0), total, of_ranked)
    before = jnp.cumsum(ranked_mass, axis=-1) - ranked_mass
    # At p = 1 rounding of the sum must not cost the tail.
    kept &= (before < filters.top_p * mass) | jnp.greater_equal(filters.top_p, 1.0)
    kept &= ranked >= filters.min_p * ranked[:, :1]
    last = jnp.maximum(jnp.sum(kept, axis=-1, keepdims=True) - 1, 0)
    return jnp.take_along_axis(ranked, last, axis=-1), jnp.take_along_axis(ids, last, axis=-1)


def _down_to(probs, least, last):
    allowed = (probs > least) | (probs == least) & (jnp.arange(probs.shape[-1]) <= last)
    return jnp.where(allowed, probs, 0.0)
