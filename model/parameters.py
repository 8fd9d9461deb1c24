"""The tree of the policy network's parameters: made at random, its axes named, cast and joined.

It is unboxed, and its layers are stacked on their first axis.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from model.config import ModelConfig
from model.lora import axes as adapter_axes
from model.moe import JOINT as JOINT_MLP
from model.qwen import JOINT_ATTENTION, Qwen
from model.sharding import ParameterAxes, mesh_sizes, shardings, without_mesh


def initialise(config: ModelConfig, key: jax.Array) -> PyTree:
    """A random model's parameters, float32 and unboxed. On a mesh each device makes its own part,
    with the numbers that it would have without one."""

    def init(key):
        tokens = jnp.zeros((1, 1), jnp.int32)
        return nn.meta.unbox(Qwen(config).init(key, tokens, tokens))["params"]

    if not mesh_sizes():
        return jax.jit(init)(key)
    with without_mesh():
        shapes = jax.eval_shape(init, key)
    placed = shardings(jax.sharding.get_mesh(), parameter_axes(config), shapes)

    def without(key):
        with without_mesh():
            return init(key)

    return jax.jit(without, out_shardings=placed)(key)


@functools.cache
def parameter_axes(config: ModelConfig) -> ParameterAxes:
    """The names of the axes of each parameter, and of adapters beside it, by its path."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    with without_mesh():
        boxed = jax.eval_shape(Qwen(config).init, key, tokens, tokens)["params"]
    specs = nn.get_partition_spec(boxed)
    specs = jax.tree_util.tree_leaves_with_path((specs, adapter_axes(specs)))
    return {tuple(key.key for key in path[1:]): tuple(spec) for path, spec in specs}


def head_kernel(config: ModelConfig, params: PyTree) -> Float[Array, "D V"]:
    """The matrix from hidden states to logits, the embedding's transpose where they are tied."""
    if config.tie_embeddings:
        return params["embed"]["embedding"].T
    return params["lm_head"]["kernel"]


def joined(layers: PyTree) -> PyTree:
    """A layer, or all of them stacked, with the projections of one input in one kernel: fewer and
    larger products. Each number of the output is the same sum."""

    def beside(module, names, axis):
        parts = [module[name] for name in names]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *parts)

    attention, mlp = layers["attention"], layers["mlp"]
    of_attention, of_mlp = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    rest = {name: part for name, part in attention.items() if name not in of_attention}

    def gated(mlp):
        return {JOINT_MLP: beside(mlp, of_mlp, -1), "down_proj": mlp["down_proj"]}

    experts = "experts" in mlp
    return layers | {
        "attention": rest | {JOINT_ATTENTION: beside(attention, of_attention, -2)},
        "mlp": mlp | {"experts": gated(mlp["experts"])} if experts else gated(mlp),
    }


def cast(params: PyTree, dtype: DTypeLike, activations: DTypeLike | None = None) -> PyTree:
    """Kernels in `dtype`, embeddings and biases in that of activations (None: the same): the type
    in which each is used, so that what the model computes stays the same to the bit.

    The scales of norms stay as they are: training multiplies with the unrounded ones, and in
    bfloat16 a sampler that rounds them is a quarter further from the trainer's log-probabilities.
    So does a value head, whose product is float32 in any case.
    """

    def leaf(path, value):
        kept = path[-1].key in ("scale", "lora_scale") or path[0].key == "value_head"
        used = dtype if path[-1].key == "kernel" else activations or dtype
        return value if kept else value.astype(used)

    return jax.tree_util.tree_map_with_path(leaf, params)


def parameter_count(config: ModelConfig) -> int:
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(lambda k: initialise(config, k), key)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))
