"""Decoding: the prompts' pass, the caches, and one new token a row.

    weights = side_by_side(unstacked(in_type(params, dtype)))
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
from jaxtyping import Array, Bool, Float, Int, Int8, PyTree

from model.attention import MASKED, WholeRows, causal_mask, rotary_phases
from model.config import ModelConfig
from model.device import this_device
from model.lora import merged
from model.parameters import joined
from model.quantize import Stored, quantize, quantize_kernels
from model.qwen import Block, RMSNorm
from model.sharding import shared_rows


class Prompt(NamedTuple):
    """One layer's keys and values of the prompts. Keys lie transposed, so that the scores are
    plain matrix products. In int8 each column of a head has a scale; else there is none."""

    keys: Float[Array, "M K d P"] | Int8[Array, "M K d P"]
    values: Float[Array, "M K P d"] | Int8[Array, "M K P d"]
    key_scale: Float[Array, "M K P"] | None = None
    value_scale: Float[Array, "M K P"] | None = None


class Cache(NamedTuple):
    """One layer's keys and values while decoding: the prompt's once a prompt, the rest a row."""

    prompt: Prompt
    keys: Float[Array, "B K d W"] | Int8[Array, "B K d W"]
    values: Float[Array, "B K W d"] | Int8[Array, "B K W d"]
    key_scale: Float[Array, "B K W"] | None = None
    value_scale: Float[Array, "B K W"] | None = None


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

    Row b belongs to prompt b // (B / M). Scores and softmax are float32. An int8 cache's scales
    enter the scores after the product with the keys, and the weights before that with the values.
    """
    rows, _, heads, width = query.shape
    dtype = value.dtype
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

    def scaled(x, scale):
        """Scores or weights, each times the scale of its column's key or value."""
        return x if scale is None else x * scale[:, :, None]

    cache = cache._replace(**_written(cache, key, value, visible.column))
    prompt = cache.prompt
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    query = query.reshape(rows, kv_heads, repeats, width)
    own = product("bkrd,bkdw->bkrw", query, cache.keys.astype(dtype)) * width**-0.5
    own = scaled(own, cache.key_scale)
    own = jnp.where(visible.own[:, None, None], own, MASKED)
    shared = product("mkqd,mkdp->mkqp", by_prompt(query), prompt.keys.astype(dtype))
    shared = scaled(shared * width**-0.5, prompt.key_scale)
    shared = jnp.where(visible.prompt[:, None, None], shared, MASKED)

    # One softmax over both parts, which are never put together: only their maxima and sums are.
    # It divides after the product with the values, as `attention.attend` does.
    highest = jnp.maximum(
        jnp.max(own, -1, keepdims=True), by_row(jnp.max(shared, -1, keepdims=True))
    )
    own = jnp.exp(own - highest)
    shared = jnp.exp(shared - by_prompt(highest))
    total = jnp.sum(own, -1, keepdims=True) + by_row(jnp.sum(shared, -1, keepdims=True))
    own = scaled(own, cache.value_scale).astype(dtype)
    shared = scaled(shared, prompt.value_scale).astype(dtype)
    mixed = product("bkrw,bkwd->bkrd", own, cache.values.astype(dtype)) + by_row(
        product("mkqp,mkpd->mkqd", shared, prompt.values.astype(dtype))
    )
    mixed = (mixed / total).astype(dtype).reshape(rows, 1, heads, width)
    return mixed, cache


def _lying(key, value, int8):
    """Keys and values [B, S, K, d] as a cache has them, by its names."""
    key, value = key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)
    if not int8:
        return {"keys": key, "values": value}
    keys, values = quantize(key, 2), quantize(value, 3)
    scales = {"key_scale": keys.scale, "value_scale": values.scale}
    return {"keys": keys.values, "values": values.values} | scales


def _written(cache, key, value, column):
    """The cache's arrays with a new token's key and value."""

    def put(name, new):
        old, axis = getattr(cache, name), 3 if name == "keys" else 2
        if new.dtype == jnp.bfloat16 and this_device().platform == "cpu":
            # XLA for CPU would write by way of a float32 copy of the cache, number by number.
            here = jax.lax.broadcasted_iota(jnp.int32, old.shape, axis) == column
            return jnp.where(here, new, old)
        return jax.lax.dynamic_update_slice_in_dim(old, new, column, axis)

    new = _lying(key, value, cache.key_scale is not None)
    return {name: put(name, part) for name, part in new.items()}


def in_type(
    params: PyTree,
    dtype: DTypeLike,
    activations: DTypeLike | None = None,
    weights: Stored = "auto",
) -> PyTree:
    """Each leaf in the type in which it is used, so that no step casts one. Adapters are added to
    their kernels. `weights` are the kernels; in int8 a channel of the output has a scale, and a
    step casts what it multiplies.

    Scales of norms stay as they are: training multiplies with the unrounded ones, and in bfloat16
    a sampler that rounds them is a quarter further from the trainer's log-probabilities.
    """

    def in_use(path, leaf):
        kind = path[-1].key
        if kind in ("scale", "kernel_scale") or leaf.dtype == jnp.int8:
            return leaf
        return leaf.astype(dtype if kind == "kernel" else activations or dtype)

    params = {name: params[name] for name in ("embed", "layers", "norm")}
    params["layers"] = merged(params["layers"])
    if weights == "int8":
        # Of the float32 ones: those of `dtype` are rounded once already.
        params["layers"] = quantize_kernels(params["layers"])
    return jax.tree_util.tree_map_with_path(in_use, params)


def unstacked(params: PyTree) -> PyTree:
    """Layers in a list, so that no step slices a stacked array."""
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(count)]
    return params | {"layers": layers}


def side_by_side(params: PyTree) -> PyTree:
    """Projections of one input in one kernel, in each layer of the list."""
    return params | {"layers": [joined(layer) for layer in params["layers"]]}


def _unrolled(config, params, tokens, positions, contexts, dtype, axis):
    embedding = params["embed"]["embedding"]
    x = embedding[tokens] if axis is None else shared_rows(embedding, tokens, axis)
    phases = rotary_phases(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    kept = []
    for layer, context in zip(params["layers"], contexts, strict=True):
        x, new = Block(config, dtype, axis).apply({"params": layer}, x, phases, context)
        kept.append(new)
    return RMSNorm(config.norm_epsilon, "embed").apply({"params": params["norm"]}, x), kept


def prefill(
    config: ModelConfig,
    params: PyTree,
    tokens: Int[Array, "M P"],
    positions: Int[Array, "M P"],
    dtype: DTypeLike = jnp.float32,
    cache: Stored = "auto",
    axis: str | None = None,
) -> list[Prompt]:
    """Keys and values of whole prompts, a layer each. `params` are prepared.

    `axis`, here and in `decode`: of the mesh over which heads, feed-forward width and vocabulary
    lie split, inside `shard_map`; `config` is then that of the part.

    Prompts see themselves unrounded; an int8 cache is what later tokens see.
    """
    masks = [WholeRows(causal_mask(positions))] * config.num_layers
    _, kept = _unrolled(config, params, tokens, positions, masks, dtype, axis)
    return [Prompt(**_lying(key, value, cache == "int8")) for key, value in kept]


def room(prompt: Prompt, rows: int, columns: int) -> Cache:
    """A cache with room for `columns` tokens in each of `rows` rows."""
    _, kv_heads, width, _ = prompt.keys.shape
    dtype = prompt.keys.dtype
    scale = None if prompt.key_scale is None else jnp.zeros((rows, kv_heads, columns))
    return Cache(
        prompt,
        keys=jnp.zeros((rows, kv_heads, width, columns), dtype),
        values=jnp.zeros((rows, kv_heads, columns, width), dtype),
        key_scale=scale,
        value_scale=scale,
    )


def widened(cache: Cache, columns: int) -> Cache:
    """The same cache with room for `columns` tokens a row."""
    more = (0, columns - cache.keys.shape[-1])
    none = (0, 0)

    def wider(x, *widths):
        return None if x is None else jnp.pad(x, (none, none, *widths))

    return cache._replace(
        keys=wider(cache.keys, none, more),
        values=wider(cache.values, more, none),
        key_scale=wider(cache.key_scale, more),
        value_scale=wider(cache.value_scale, more),
    )


def emptied(cache: Cache, rows: Bool[Array, " B"]) -> Cache:
    """The same cache without what these rows' values held: a weight of 0 does not hide the
    infinities that a broken row has left. In int8 those are the scale's."""
    name = "values" if cache.value_scale is None else "value_scale"
    old = getattr(cache, name)
    chosen = rows.reshape(-1, *[1] * (old.ndim - 1))
    return cache._replace(**{name: jnp.where(chosen, jnp.zeros_like(old), old)})


def decode(
    config: ModelConfig,
    params: PyTree,
    tokens: Int[Array, "B 1"],
    positions: Int[Array, "B 1"],
    caches: list[Cache],
    visible: Visible,
    dtype: DTypeLike = jnp.float32,
    axis: str | None = None,
) -> tuple[Float[Array, "B 1 D"], list[Cache]]:
    """Hidden states of one new token a row, and the caches with it. `params` are prepared."""
    contexts = [Decoding(cache, visible) for cache in caches]
    return _unrolled(config, params, tokens, positions, contexts, dtype, axis)
