"""Attention over whole rows by a fused kernel: cuDNN's on an NVIDIA GPU, Pallas' on a TPU.

A fused kernel never holds the S x S scores, and skips those that no token sees. Either gives on
every token that is no padding what `attend` gives; on padding it gives garbage, but no NaN. XLA
can't partition a kernel: on a mesh each device calls it for its own rows and heads.

Letters: B rows, S columns, H query heads, K key-value heads, d width of a head.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from model.attention import Context, WholeRows, causal_mask
from model.config import ModelConfig
from model.device import Device
from model.sharding import mesh_sizes, partition

KERNELS = {"cuda": "cudnn", "tpu": "tpu"}
"""The fused kernel of a platform."""
LANES = 128
"""The TPU kernel's blocks are multiples of it; it pads columns to one."""
BLOCKS = (512, 256, LANES)
"""Columns; larger ones reread less and skip less."""


def obstacle(
    kernel: str, config: ModelConfig, dtype: DTypeLike, packed: bool, device: Device
) -> str:
    """Why a kernel can't compute this model here; empty where it can.

    `packed`: a row may hold several texts, in whatever way they lie.
    """
    wanted = {name: platform for platform, name in KERNELS.items()}[kernel]
    width, dtype = config.head_dim, jnp.dtype(dtype)
    if device.platform != wanted:
        return f"the kernel is {wanted}'s and this machine computes on {device.platform}"
    if kernel == "tpu":
        return ""
    if device.capability < (8, 0):
        major, minor = device.capability
        return f"cuDNN's kernel needs compute capability 8.0, and this GPU has {major}.{minor}"
    if dtype != jnp.bfloat16:
        return f"cuDNN's kernel computes in bfloat16, and the model in {dtype.name}"
    widest = 256 if device.capability >= (9, 0) else 128
    if width % 8 or width > widest:
        return (
            f"cuDNN's kernel takes heads whose width is a multiple of 8 up to {widest} on this "
            f"GPU, and the model's is {width}"
        )
    if packed:
        return "cuDNN's kernel takes one text a row, and the rows are packed with several"
    return ""


def fitting(config: ModelConfig, dtype: DTypeLike, packed: bool, device: Device) -> str:
    """The fused kernel that can compute this model here, or `plain`."""
    kernel = KERNELS.get(device.platform)
    if kernel is None or obstacle(kernel, config, dtype, packed, device):
        return "plain"
    return kernel


def whole_rows(attention: str, positions: Int[Array, "B S"]) -> Context:
    """What the tokens of whole rows see. For `cudnn` each row begins at column 0 (`roll_left`)."""
    if attention == "cudnn":
        return LeftRows(jnp.sum(positions >= 0, axis=1, dtype=jnp.int32))
    if attention == "tpu":
        segments = jnp.cumsum(positions == 0, axis=1, dtype=jnp.int32)
        return SegmentRows(jnp.where(positions >= 0, segments, -1))
    return WholeRows(causal_mask(positions))


def first_columns(positions: Int[Array, "B S"]) -> Int[Array, " B"]:
    """Where each row begins; 0 for a row of padding alone."""
    return jnp.argmax(positions >= 0, axis=1)


def roll_left(x: Shaped[Array, "B S *rest"], by: Int[Array, " B"]) -> Shaped[Array, "B S *rest"]:
    """Each row rolled to the left by a number of its own; by its negative, back again."""
    columns = (jnp.arange(x.shape[1]) + by[:, None]) % x.shape[1]

    def of_row(row, columns):
        # So that the way back sets its slopes and need not add them up.
        return row.at[columns].get(unique_indices=True, mode="promise_in_bounds")

    return jax.vmap(of_row)(x, columns)


class LeftRows(NamedTuple):
    """Rows that hold one text each, from column 0 on, by cuDNN: a mask would become an S x S bias
    there, lengths don't."""

    lengths: Int[Array, " B"]

    def attend(self, query, key, value):
        return _each_part(_by_cudnn, query, key, value, self.lengths), None


def _by_cudnn(query, key, value, lengths):
    columns = query.shape[1]
    # On the way back the kernel takes an even number of columns only.
    even = ((0, 0), (0, columns % 2), (0, 0), (0, 0))
    query, key, value = (jnp.pad(part, even) for part in (query, key, value))
    inside = jnp.arange(query.shape[1]) < lengths[:, None]
    inside = inside[:, :, None, None]
    # The kernel may leave padding's outputs and slopes unwritten: `where` stops both.
    query, key, value = (jnp.where(inside, part, 0) for part in (query, key, value))
    # A row without any key would be a softmax of nothing.
    lengths = jnp.maximum(lengths, 1)
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return jnp.where(inside, mixed, 0)[:, :columns]


class SegmentRows(NamedTuple):
    """Rows of any number of texts and any padding, by the TPU kernel."""

    segments: Int[Array, "B S"]
    """Tokens of one text have one number; -1 marks padding, which sees itself alone."""

    def attend(self, query, key, value):
        return _each_part(segment_attention, query, key, value, self.segments), None


def segment_attention(
    query: Float[Array, "B S H d"],
    key: Float[Array, "B S K d"],
    value: Float[Array, "B S K d"],
    segments: Int[Array, "B S"],
    *,
    interpret: bool = False,
) -> Float[Array, "B S H d"]:
    """Causal attention within segments. `interpret` runs the TPU kernel on any device, slowly."""
    # Imported where it is used: other devices need no Pallas.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    columns, heads, width = query.shape[1:]
    padding = -columns % LANES
    total = columns + padding
    block = next(size for size in BLOCKS if total % size == 0)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([splash.CausalMask((total, total))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        interpret=interpret,
    )

    def by_head(x):
        return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    # The kernel scales nothing.
    query = (query.astype(jnp.float32) * np.float32(width**-0.5)).astype(query.dtype)
    ids = jnp.pad(segments, ((0, 0), (0, padding)), constant_values=-1)
    ids = splash.SegmentIds(ids, ids)
    mixed = jax.vmap(kernel)(by_head(query), by_head(key), by_head(value), ids)
    return mixed.transpose(0, 2, 1, 3)[:, :columns]


def _each_part(
    kernel: Callable,
    query: Float[Array, "B S H d"],
    key: Float[Array, "B S K d"],
    value: Float[Array, "B S K d"],
    rows: Int[Array, " B *rest"],
) -> Float[Array, "B S H d"]:
    """What the kernel gives for the rows and heads of each device."""
    if not mesh_sizes():
        return kernel(query, key, value, rows)
    queries = partition("batch", None, "heads")
    keys = partition("batch", None, "kv_heads")
    return jax.shard_map(
        kernel,
        in_specs=(queries, keys, keys, partition("batch")),
        out_specs=queries,
        # Kernels don't say over which axes their outputs vary.
        check_vma=False,
    )(query, key, value, rows)
