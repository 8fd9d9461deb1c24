"""Where arrays lie on many devices: the axes of a mesh, and what is split over each of them.

    with jax.set_mesh(mesh):        # axes data, fsdp, tensor; without one nothing is split
        state, metrics = step(state, ...)

Code names what an axis of an array is ("batch", "embed", "heads"); RULES says which axes of the
mesh it is split over. Rows of a batch lie split over data x fsdp, parameters over fsdp x tensor. So
each device gathers a layer's parameters just before it computes its own rows with them (fully
sharded data parallelism, https://arxiv.org/abs/1910.02054), and heads, feed-forward width,
vocabulary and experts are each computed in parts (https://arxiv.org/abs/1909.08053).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, Shaped

from model.config import ModelConfig

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")
"""The axes of the mesh that rows are split over, in this order."""
TENSOR = "tensor"

RULES = {
    "batch": BATCH,
    "embed": "fsdp",
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "vocab": TENSOR,
    "experts": TENSOR,
}
"""What each logical axis is split over; those that are not named here are never split."""


ParameterAxes = dict[tuple[str, ...], tuple[str | None, ...]]
"""The names of the axes of parameters, by their paths."""


def mesh_sizes() -> dict[str, int]:
    """The sizes of the mesh's axes where arrays are handled whole; empty without a mesh, and inside
    `shard_map`, where each device handles its own part."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty or mesh.manual_axes else dict(mesh.shape)


def round_up(count: int | Int[Array, "..."], multiple: int) -> int | Int[Array, "..."]:
    return -(-count // multiple) * multiple


def without_mesh() -> AbstractContextManager:
    """Code in here sees no mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def batch_shards() -> int:
    """In how many parts the rows of a batch lie."""
    sizes = mesh_sizes()
    return math.prod(sizes[axis] for axis in BATCH) if sizes else 1


def partition(*names: str | None) -> PartitionSpec:
    """The axes of the mesh for an array whose axes are called so."""
    return PartitionSpec(*(RULES.get(name) for name in names))


def constrain(x: Shaped[Array, "..."], *names: str | None) -> Shaped[Array, "..."]:
    """The same array, split as the names of its axes say; further axes are not."""
    if not mesh_sizes():
        return x
    return jax.lax.with_sharding_constraint(x, partition(*names))


def parameter_partition(
    axes: ParameterAxes, path: tuple, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> PartitionSpec:
    """How a parameter lies, or what belongs to one: its moment, its gradient, the scale of its
    rounded form. Its path ends with the parameter's.

    An axis whose size is no multiple stays whole, and so do vectors, but for those of heads.
    """
    keys = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    ends = (keys[start:] for start in range(len(keys)))
    names = next((axes[end] for end in ends if end in axes), ())[: len(shape)]
    matrix = len([name for name in names if name != "layers"]) > 1
    split = [RULES.get(name) for name in names]
    return PartitionSpec(
        *(
            axis if axis and size % sizes[axis] == 0 and (matrix or axis == TENSOR) else None
            for axis, size in zip(split, shape[: len(split)], strict=True)
        )
    )


def shardings(mesh: Mesh, axes: ParameterAxes, tree: PyTree) -> PyTree:
    """Where the leaves of a tree of parameters, or of a state that holds some, lie. Leaves that
    belong to no parameter are whole on every device."""

    def of_leaf(path, leaf):
        return NamedSharding(mesh, parameter_partition(axes, path, leaf.shape, mesh.shape))

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def split_parameters(axes: ParameterAxes, tree: PyTree) -> PyTree:
    """The same arrays, lying so."""
    sizes = mesh_sizes()
    if not sizes:
        return tree

    def of_leaf(path, leaf):
        spec = parameter_partition(axes, path, leaf.shape, sizes)
        return jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def split_rows(tree: PyTree) -> PyTree:
    """The same arrays, whose first axis is that of a batch's rows."""
    return jax.tree.map(lambda x: constrain(x, "batch"), tree)


def whole(tree: PyTree) -> PyTree:
    """The same arrays, all of each on every device."""
    return jax.tree.map(constrain, tree)


def each_shard(function: Callable, *operands: PyTree) -> PyTree:
    """`function` of each part of a batch by itself: operands and results have the parts as their
    first axis."""
    if jax.tree.leaves(operands)[0].shape[0] > 1:
        return jax.vmap(function)(*operands)
    # What XLA makes of one part under `vmap` is slower than the part alone.
    operands = jax.tree.map(lambda x: x[0], operands)
    return jax.tree.map(lambda x: x[None], function(*operands))


def apart(x: Shaped[Array, " B *rest"], shards: int) -> Shaped[Array, "shards b *rest"]:
    """The parts of a batch, by themselves."""
    return x.reshape(shards, x.shape[0] // shards, *x.shape[1:])


def together(x: Shaped[Array, "shards b *rest"]) -> Shaped[Array, " B *rest"]:
    """The reverse of `apart`."""
    return x.reshape(-1, *x.shape[2:])


def micro_batches(x: Shaped[Array, " B *rest"], micro: int) -> Shaped[Array, "n {micro} *rest"]:
    """The rows of a batch in pieces, in each as many of every part of the mesh: none changes its
    device."""
    cut = x.reshape(batch_shards(), -1, micro // batch_shards(), *x.shape[1:]).swapaxes(0, 1)
    return constrain(cut.reshape(-1, micro, *x.shape[1:]), None, "batch")


def in_row_order(x: Shaped[Array, "n micro *rest"]) -> Shaped[Array, " B *rest"]:
    """The reverse of `micro_batches`."""
    cut = x.reshape(x.shape[0], batch_shards(), -1, *x.shape[2:]).swapaxes(0, 1)
    return constrain(cut.reshape(-1, *x.shape[2:]), "batch")


def part_of(config: ModelConfig, parts: int) -> ModelConfig:
    """The shape of the model that each part of the tensor axis computes by itself."""
    return dataclasses.replace(
        config,
        vocab_size=config.vocab_size // parts,
        intermediate_size=config.intermediate_size // parts,
        num_heads=config.num_heads // parts,
        num_kv_heads=config.num_kv_heads // parts,
    )


class Embedding(nn.Module):
    """A vector for each token."""

    vocab_size: int
    width: int
    dtype: DTypeLike
    scale: float
    """Standard deviation of the initial vectors."""

    @nn.compact
    def __call__(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        init = nn.with_logical_partitioning(nn.initializers.normal(self.scale), ("vocab", "embed"))
        table = self.param("embedding", init, (self.vocab_size, self.width), jnp.float32)
        if not mesh_sizes():
            return jnp.take(table.astype(self.dtype), tokens, axis=0)
        return jax.shard_map(
            lambda table, tokens: _looked_up(table, tokens, self.dtype),
            in_specs=(partition("vocab", "embed"), partition("batch")),
            out_specs=partition("batch"),
        )(table, tokens)


def _looked_up(table, tokens, dtype):
    """Of a part of the table: each device looks up its columns for all rows of its fsdp group,
    which then change places. So no table is ever gathered."""
    tokens = jax.lax.all_gather(tokens, "fsdp", axis=0, tiled=True)
    found = shared_rows(table, tokens, TENSOR, dtype)
    return jax.lax.all_to_all(found, "fsdp", split_axis=0, concat_axis=2, tiled=True)


def shared_rows(
    table: Float[Array, "v D"],
    ids: Int[Array, "*batch"],
    axis: str,
    dtype: DTypeLike | None = None,
) -> Float[Array, "*batch D"]:
    """Rows of a table whose parts lie along an axis of the mesh, inside `shard_map`."""
    count = table.shape[0]
    place = ids - jax.lax.axis_index(axis) * count
    inside = (place >= 0) & (place < count)
    own = jnp.where(inside[..., None], table[jnp.clip(place, 0, count - 1)], 0)
    return jax.lax.psum(own.astype(dtype or table.dtype), axis)
