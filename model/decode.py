"""Decoding: the prompts' pass, the caches, and one new token a row.

    weights = prepare(params, dtype)
    prompts = prefill(config, weights, tokens, positions)
    caches = [room(prompt, rows, columns) for prompt in prompts]
    hidden, caches = decode(config, weights, tokens, positions, caches, visible)

Letters: as in model/attention.py; M prompts, B / M rows each; W columns of a row's own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from model.attention import MASKED, WholeRows, causal_mask
from model.config import ModelConfig
from model.qwen import Block, RMSNorm


class Prompt(NamedTuple):
    """One layer's keys and values of the prompts. Keys lie transposed, so that the scores are
    plain matrix products."""

    keys: Float[Array, "M K d P"]
    values: Float[Array, "M K P d"]


class Cache(NamedTuple):
    """One layer's keys and values while decoding: the prompt's once a prompt, the rest a row."""

    prompt: Prompt
    keys: Float[Array, "B K d W"]
    values: Float[Array, "B K W d"]


class Visible(NamedTuple):
    """What a step's tokens see, and where they are written: the same in all layers."""

    prompt: Bool[Array, "M P"]
    own: Bool[Array, "#B W"]
    """Columns of the row's own, the new token's among them."""
    column: Int[Array, ""]
    """The new token's."""


class Decoding(NamedTuple):
    """One new token a row, which sees its prompt, its own past and itself."""

    cache: Cache
    visible: Visible

    def attend(self, query, key, value):
        return attend_cached(query, key, value, self.cache, self.visible)


def attend_cached(
    query: Float[Array, "B 1 H d"],
    key: Float[Array, "B 1 K d"],
    value: Float[Array, "B 1 K d"],
    cache: Cache,
    visible: Visible,
) -> tuple[Float[Array, "B 1 H d"], Cache]:
    """Attention of one new token a row, and the cache with its key and value.

    Row b belongs to prompt b // (B / M). Scores and softmax are float32.
    """
    rows, _, heads, width = query.shape
    kv_heads = key.shape[2]
    prompts = cache.prompt.keys.shape[0]
    group, repeats = rows // prompts, heads // kv_heads

    def by_prompt(x):
        """The rows of a prompt as rows of one matrix, so that its keys are read once."""
        x = x.reshape(prompts, group, kv_heads, repeats, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(prompts, kv_heads, group * repeats, -1)

    def by_row(x):
        x = x.reshape(prompts, kv_heads, group, repeats, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(rows, kv_heads, repeats, -1)

    put = jax.lax.dynamic_update_slice
    keys = put(cache.keys, key.transpose(0, 2, 3, 1), (0, 0, 0, visible.column))
    values = put(cache.values, value.transpose(0, 2, 1, 3), (0, 0, visible.column, 0))

    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    query = query.reshape(rows, kv_heads, repeats, width)
    own = product("bkrd,bkdw->bkrw", query, keys) * width**-0.5
    own = jnp.where(visible.own[:, None, None], own, MASKED)
    shared = product("mkqd,mkdp->mkqp", by_prompt(query), cache.prompt.keys) * width**-0.5
    shared = jnp.where(visible.prompt[:, None, None], shared, MASKED)

    # One softmax over both parts, which are never put together: only their maxima and sums are.
    # It divides after the product with the values, as `attention.attend` does.
    highest = jnp.maximum(
        jnp.max(own, -1, keepdims=True), by_row(jnp.max(shared, -1, keepdims=True))
    )
    own = jnp.exp(own - highest)
    shared = jnp.exp(shared - by_prompt(highest))
    total = jnp.sum(own, -1, keepdims=True) + by_row(jnp.sum(shared, -1, keepdims=True))
    mixed = product("bkrw,bkwd->bkrd", own.astype(value.dtype), values) + by_row(
        product("mkqp,mkpd->mkqd", shared.astype(value.dtype), cache.prompt.values)
    )
    mixed = (mixed / total).astype(value.dtype).reshape(rows, 1, heads, width)
    return mixed, cache._replace(keys=keys, values=values)


def prepare(params: PyTree, dtype: DTypeLike, activations: DTypeLike | None = None) -> PyTree:
    """The parameters as decoding reads them: layers in a list, so that no step slices a stacked
    array, and each leaf in the type in which it is used, so that no step casts one.

    Scales of norms stay as they are: training multiplies with the unrounded ones, and in bfloat16
    a sampler that rounds them is a quarter further from the trainer's log-probabilities.
    """

    def in_use(path, leaf):
        kind = path[-1].key
        if kind == "scale":
            return leaf
        return leaf.astype(dtype if kind == "kernel" else activations or dtype)

    params = {name: params[name] for name in ("embed", "layers", "norm")}
    params = jax.tree_util.tree_map_with_path(in_use, params)
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(count)]
    return params | {"layers": layers}


def _unrolled(config, params, tokens, positions, contexts, dtype):
    x = params["embed"]["embedding"][tokens]
    kept = []
    for layer, context in zip(params["layers"], contexts, strict=True):
        x, new = Block(config, dtype).apply({"params": layer}, x, positions, context)
        kept.append(new)
    return RMSNorm(config.norm_epsilon, "embed").apply({"params": params["norm"]}, x), kept


def prefill(
    config: ModelConfig,
    params: PyTree,
    tokens: Int[Array, "M P"],
    positions: Int[Array, "M P"],
    dtype: DTypeLike = jnp.float32,
) -> list[Prompt]:
    """Keys and values of whole prompts, a layer each. `params` are prepared."""
    masks = [WholeRows(causal_mask(positions))] * config.num_layers
    _, kept = _unrolled(config, params, tokens, positions, masks, dtype)
    return [Prompt(key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)) for key, value in kept]


def room(prompt: Prompt, rows: int, columns: int) -> Cache:
    """A cache with room for `columns` tokens in each of `rows` rows."""
    _, kv_heads, width, _ = prompt.keys.shape
    dtype = prompt.keys.dtype
    return Cache(
        prompt,
        keys=jnp.zeros((rows, kv_heads, width, columns), dtype),
        values=jnp.zeros((rows, kv_heads, columns, width), dtype),
    )


def widened(cache: Cache, columns: int) -> Cache:
    """The same cache with room for `columns` tokens a row."""
    more = (0, columns - cache.keys.shape[-1])
    none = (0, 0)
    return cache._replace(
        keys=jnp.pad(cache.keys, (none, none, none, more)),
        values=jnp.pad(cache.values, (none, none, more, none)),
    )


def decode(
    config: ModelConfig,
    params: PyTree,
    tokens: Int[Array, "B 1"],
    positions: Int[Array, "B 1"],
    caches: list[Cache],
    visible: Visible,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "B 1 D"], list[Cache]]:
    """Hidden states of one new token a row, and the caches with it. `params` are prepared."""
    contexts = [Decoding(cache, visible) for cache in caches]
    return _unrolled(config, params, tokens, positions, contexts, dtype)
