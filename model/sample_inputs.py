"""What the sampler is given, made ready for its loop, and how it lies split on a mesh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Int8, Key, PyTree

from model.config import ModelConfig
from model.draw import Filters
from model.parameters import parameter_axes
from model.quantize import kernel_inputs
from model.sharding import BATCH, RULES, TENSOR, constrain


class Given(NamedTuple):
    """All that sampling needs, on whatever devices."""

    params: PyTree
    """Of their types, with layers in a list."""
    kernel: Float[Array, "D V"] | Int8[Array, "D V"]
    """The head's."""
    kernel_scale: Float[Array, " V"] | None
    tokens: Int[Array, "N P"]
    positions: Int[Array, "N P"]
    uniforms: Float[Array, "N G T"]
    limits: Int[Array, "N G"]
    stop_ids: Int[Array, " stops"]
    temperature: float | Float[Array, ""]
    filters: Filters | None


def input_partition(config: ModelConfig, given: Given) -> Given:
    """How it is split. A step reads all parameters: so each device keeps those of its part of the
    tensor axis, gathered over fsdp once a rollout."""
    axes = parameter_axes(config)

    def of_leaf(path, leaf):
        *outer, kind = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        names = axes[*outer, "kernel" if kind == "kernel_scale" else kind]
        if kind == "kernel_scale":
            inputs = kernel_inputs(*outer)
            names = tuple(name for i, name in enumerate(names) if i not in inputs)
        if outer[0] == "layers":
            names = names[1:]
        return PartitionSpec(*(of_tensor(name) for name in names))

    def of_tensor(name):
        return TENSOR if RULES.get(name) == TENSOR else None

    rows, whole = PartitionSpec(BATCH), PartitionSpec()
    return Given(
        params=jax.tree_util.tree_map_with_path(of_leaf, given.params),
        kernel=PartitionSpec(None, TENSOR),
        kernel_scale=PartitionSpec(TENSOR),
        tokens=rows,
        positions=rows,
        uniforms=rows,
        limits=rows,
        stop_ids=whole,
        temperature=whole,
        filters=whole,
    )


def row_uniforms(keys: Key[Array, "N G"], width: int) -> Float[Array, "N G {width}"]:
    """The number that draws each of a row's tokens, of its key and the token's place alone."""

    def of_row(key):
        return jax.vmap(lambda t: jax.random.uniform(jax.random.fold_in(key, t)))(jnp.arange(width))

    return constrain(jax.vmap(jax.vmap(of_row))(keys), "batch")
