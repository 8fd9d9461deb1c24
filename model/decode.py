"""Decoding: the prompts' pass, the caches, and one new token a row.

    caches = prefill(config, unstack(cast(params, dtype)), tokens, positions, samples=G, columns=T)
    hidden, caches = decode(config, params, tokens, positions, caches)

Letters: as in model/attention.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from model.attention import MASKED, WholeRows, causal_mask
from model.config import ModelConfig
from model.qwen import Block, RMSNorm


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

    def attend(self, query, key, value):
        return attend_cached(query, key, value, self)


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


def unstack(params: PyTree) -> PyTree:
    """The same parameters with a list of layers: done once, before a decode loop, so that no
    step of it slices a stacked array."""
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(count)]
    return params | {"layers": layers}


def _unrolled(config, params, tokens, positions, contexts, dtype):
    x = params["embed"]["embedding"][tokens].astype(dtype)
    kept = []
    for layer, context in zip(params["layers"], contexts, strict=True):
        x, new = Block(config).apply({"params": layer}, x, positions, context)
        kept.append(new)
    return RMSNorm(config.norm_epsilon, "embed").apply({"params": params["norm"]}, x), kept


def prefill(
    config: ModelConfig,
    params: PyTree,
    tokens: Int[Array, "N P"],
    positions: Int[Array, "N P"],
    *,
    samples: int,
    columns: int,
    dtype: DTypeLike = jnp.float32,
) -> list[Cache]:
    """One cache a layer: the N prompts' keys and values, and room for `columns` tokens in each
    of the `samples` rows a prompt. `params` are unstacked."""
    masks = [WholeRows(causal_mask(positions))] * config.num_layers
    _, kept = _unrolled(config, params, tokens, positions, masks, dtype)
    rows = tokens.shape[0] * samples
    shape = (rows, config.num_kv_heads, config.head_dim, columns)
    return [
        Cache(
            prompt_keys=key.transpose(0, 2, 3, 1),
            prompt_values=value.transpose(0, 2, 1, 3),
            prompt_mask=positions >= 0,
            keys=jnp.zeros(shape, dtype),
            values=jnp.zeros((*shape[:2], columns, config.head_dim), dtype),
            length=jnp.int32(0),
        )
        for key, value in kept
    ]


def decode(
    config: ModelConfig,
    params: PyTree,
    tokens: Int[Array, "B 1"],
    positions: Int[Array, "B 1"],
    caches: list[Cache],
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "B 1 D"], list[Cache]]:
    """Hidden states of one new token a row, and the caches with it. `params` are unstacked."""
    return _unrolled(config, params, tokens, positions, caches, dtype)
