"""Attention: rotary phases, the causal mask, whole rows, and one new token against its caches.

Letters: B rows, S columns, H query heads, K key-value heads, d width of a head, R = H / K.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30
"""Finite, so that a padding query, which sees no key, gives garbage and not NaN."""


def rotary_phases(
    positions: Int[Array, "B S"], head_dim: int, theta: float
) -> tuple[Float[Array, "B S 1 d"], Float[Array, "B S 1 d"]]:
    """Cosine and sine, in float32 whatever the model computes in: bf16 rounds position 257."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = jnp.maximum(positions, 0)[..., None].astype(jnp.float32) / theta**exponents
    angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B S heads d"],
    phases: tuple[Float[Array, "B S 1 d"], Float[Array, "B S 1 d"]],
) -> Float[Array, "B S heads d"]:
    """Rotary embedding with the halves paired (i, i + d/2), as Hugging Face stores them."""
    cosine, sine = phases
    wide = x.astype(jnp.float32)
    low, high = jnp.split(wide, 2, axis=-1)
    return (wide * cosine + jnp.concatenate([-high, low], axis=-1) * sine).astype(x.dtype)


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
    key: Float[Array, "B S K d"],
    value: Float[Array, "B S K d"],
    mask: Bool[Array, "B S S"],
) -> Float[Array, "B S H d"]:
    """Softmax attention of whole rows; scores and softmax in float32."""
    rows, columns, heads, width = query.shape
    kv_heads = key.shape[2]
    repeats = heads // kv_heads
    # The queries that share a key head become rows of one matrix.
    query = query.reshape(rows, columns, kv_heads, repeats, width).transpose(0, 2, 3, 1, 4)
    query = query.reshape(rows, kv_heads, repeats * columns, width)
    scores = jnp.einsum("bkqd,btkd->bkqt", query, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(rows, kv_heads, repeats, columns, columns) * width**-0.5
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    # A softmax whose division comes after the product with the values: one pass less over S x S.
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    weights = weights.reshape(rows, kv_heads, repeats * columns, columns)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = jnp.einsum(
        "bkqt,btkd->bkqd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    mixed = (mixed / total).astype(value.dtype)
    mixed = mixed.reshape(rows, kv_heads, repeats, columns, width).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(rows, columns, heads, width)


class Cache(NamedTuple):
    """One layer's keys and values while decoding: the prompt's once a prompt, the rest a row.

    Keys lie transposed, so that the scores are plain matrix products.
    """

    prompt_keys: Float[Array, "N K d P"]
    prompt_values: Float[Array, "N K P d"]
    prompt_mask: Bool[Array, "N P"]
    keys: Float[Array, "B K d T"]
    values: Float[Array, "B K T d"]
    length: Int[Array, ""]
    """Columns of `keys` that are filled, the same for all rows."""


def attend_cached(
    query: Float[Array, "B 1 H d"],
    key: Float[Array, "B 1 K d"],
    value: Float[Array, "B 1 K d"],
    cache: Cache,
) -> tuple[Float[Array, "B 1 H d"], Cache]:
    """Attention of one new token a row: to its prompt, to its own past and to itself.

    Row b belongs to prompt b // G. The new key and value are written at column `length`.
    """
    rows, _, heads, width = query.shape
    kv_heads = key.shape[2]
    prompts, _, _, prompt_width = cache.prompt_keys.shape
    repeats = heads // kv_heads
    group = rows // prompts

    at = cache.length
    keys = jax.lax.dynamic_update_slice(cache.keys, key.transpose(0, 2, 3, 1), (0, 0, 0, at))
    values = jax.lax.dynamic_update_slice(cache.values, value.transpose(0, 2, 1, 3), (0, 0, at, 0))

    own_query = query.reshape(rows, kv_heads, repeats, width)
    own = jnp.einsum("bkrd,bkdt->bkrt", own_query, keys, preferred_element_type=jnp.float32)
    own = jnp.where(jnp.arange(keys.shape[-1]) <= at, own, MASKED)

    # The G rows of a prompt become rows of one matrix, so its keys are read once.
    shared_query = query.reshape(prompts, group, kv_heads, repeats, width)
    shared_query = shared_query.transpose(0, 2, 1, 3, 4).reshape(prompts, kv_heads, -1, width)
    shared = jnp.einsum(
        "nkmd,nkdp->nkmp", shared_query, cache.prompt_keys, preferred_element_type=jnp.float32
    )
    shared = jnp.where(cache.prompt_mask[:, None, None], shared, MASKED)
    shared = shared.reshape(prompts, kv_heads, group, repeats, prompt_width)
    shared = shared.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, repeats, prompt_width)

    scores = jnp.concatenate([shared, own], axis=-1) * width**-0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    own_weights = weights[..., prompt_width:]
    shared_weights = weights[..., :prompt_width].reshape(
        prompts, group, kv_heads, repeats, prompt_width
    )
    shared_weights = shared_weights.transpose(0, 2, 1, 3, 4)
    shared_weights = shared_weights.reshape(prompts, kv_heads, group * repeats, prompt_width)
    from_prompt = jnp.einsum("nkmp,nkpd->nkmd", shared_weights, cache.prompt_values)
    from_prompt = from_prompt.reshape(prompts, kv_heads, group, repeats, width)
    from_prompt = from_prompt.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, repeats, width)
    mixed = from_prompt + jnp.einsum("bkrt,bktd->bkrd", own_weights, values)
    return mixed.reshape(rows, 1, heads, width), cache._replace(
        keys=keys, values=values, length=at + 1
    )
