"""The policy network: Qwen2, Qwen3 (dense and MoE) and Llama as one pre-norm block.

    hidden = Qwen(config).apply({"params": params}, tokens, positions)

Parameters carry logical axis names (`nn.get_partition_spec` of an abstract `init` lists them);
the trees that the rest of the code handles are unboxed. Layers are stacked on their first axis.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from model.attention import Context, Phases, rotary_phases, rotate
from model.config import ModelConfig
from model.kernels import first_columns, roll_left, whole_rows
from model.lora import low_rank
from model.moe import JOINT as JOINT_MLP
from model.moe import LOADS, MixtureOfExperts
from model.product import product
from model.sharding import Embedding, constrain

INITIAL_SCALE = 0.02

JOINT_ATTENTION = "qkv_proj"
"""Projections of one input, in one kernel where `joined` (model/parameters.py) has put them so."""


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32. https://arxiv.org/abs/1910.07467 (eq. 4)"""

    epsilon: float
    axis: str

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        init = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
        scale = self.param("scale", init, (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale).astype(x.dtype)


class Projection(nn.Module):
    """A linear map from the last `inputs` axes to `shape[inputs:]`; `axes` names the kernel's axes
    for sharding."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: DTypeLike
    bias: bool = False
    inputs: int = 1
    summed_over: str | None = None
    """The axis of the mesh over which the inputs lie split, inside `shard_map`."""

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        normal = nn.initializers.normal(INITIAL_SCALE)
        init = nn.with_logical_partitioning(normal, self.axes)
        kernel = self.param("kernel", init, self.shape, jnp.float32)
        batch, out = x.shape[: -self.inputs], self.shape[self.inputs :]
        width = math.prod(self.shape[: self.inputs])
        # One plain matrix product: on CPU its backward pass is half as long again as an einsum.
        kernel = kernel.reshape(width, -1)
        in_int8 = self.has_variable("params", "kernel_scale")  # see model/quantize.py
        if in_int8:
            kernel = kernel.astype(self.dtype)
        y = product(x.reshape(-1, width), kernel, self.dtype)
        if in_int8:
            y = y * self.get_variable("params", "kernel_scale").reshape(-1)
        if self.has_variable("params", "lora_a"):
            leaves = (self.get_variable("params", f"lora_{name}") for name in ("a", "b", "scale"))
            y = y + low_rank(x.reshape(-1, width), *leaves, self.dtype)
        if self.summed_over is not None:
            y = jax.lax.psum(y, self.summed_over)
        y = y.astype(x.dtype).reshape(*batch, *out)
        if self.bias:
            axes = self.axes[self.inputs :]
            init = nn.with_logical_partitioning(nn.initializers.zeros, axes)
            y = y + self.param("bias", init, out, jnp.float32).astype(x.dtype)
        return y


class Attention(nn.Module):
    config: ModelConfig
    dtype: DTypeLike
    axis: str | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B S D"],
        phases: Phases,
        context: Context,
    ) -> tuple[Float[Array, "B S D"], PyTree]:
        """The output, and what the context leaves behind: keys and values, or a new cache."""
        c = self.config
        axes, kv_axes = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        shape = (c.hidden_size, c.num_heads, c.head_dim)
        kv_shape = (c.hidden_size, c.num_kv_heads, c.head_dim)
        if self.has_variable("params", JOINT_ATTENTION):
            width = c.num_heads + 2 * c.num_kv_heads
            joint = Projection(
                (c.hidden_size, width, c.head_dim),
                axes,
                self.dtype,
                c.qkv_bias,
                name=JOINT_ATTENTION,
            )(x)
            ends = (c.num_heads, c.num_heads + c.num_kv_heads)
            query, key, value = jnp.split(joint, ends, axis=-2)
        else:
            query = Projection(shape, axes, self.dtype, c.qkv_bias, name="q_proj")(x)
            key = Projection(kv_shape, kv_axes, self.dtype, c.qkv_bias, name="k_proj")(x)
            value = Projection(kv_shape, kv_axes, self.dtype, c.qkv_bias, name="v_proj")(x)
        if c.qk_norm:
            query = RMSNorm(c.norm_epsilon, "head_dim", name="q_norm")(query)
            key = RMSNorm(c.norm_epsilon, "head_dim", name="k_norm")(key)
        query, key = rotate(query, phases), rotate(key, phases)
        query = constrain(query, "batch", None, "heads")
        key, value = (constrain(part, "batch", None, "kv_heads") for part in (key, value))
        mixed, kept = context.attend(*(part.astype(self.dtype) for part in (query, key, value)))
        out = Projection(
            (c.num_heads, c.head_dim, c.hidden_size),
            ("heads", "head_dim", "embed"),
            self.dtype,
            c.output_bias,
            inputs=2,
            summed_over=self.axis,
            name="o_proj",
        )
        mixed = constrain(mixed.astype(x.dtype), "batch", None, "heads")
        return out(mixed), kept


class FeedForward(nn.Module):
    """SwiGLU. https://arxiv.org/abs/2002.05202 (eq. 6)"""

    config: ModelConfig
    dtype: DTypeLike
    axis: str | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        c = self.config
        shape, axes = (c.hidden_size, c.intermediate_size), ("embed", "mlp")
        if self.has_variable("params", JOINT_MLP):
            joint = (c.hidden_size, 2 * c.intermediate_size)
            gate, up = jnp.split(Projection(joint, axes, self.dtype, name=JOINT_MLP)(x), 2, axis=-1)
        else:
            gate = Projection(shape, axes, self.dtype, name="gate_proj")(x)
            up = Projection(shape, axes, self.dtype, name="up_proj")(x)
        down = Projection(
            shape[::-1], axes[::-1], self.dtype, summed_over=self.axis, name="down_proj"
        )
        return down(constrain(nn.silu(gate) * up, "batch", None, "mlp"))


class Block(nn.Module):
    config: ModelConfig
    dtype: DTypeLike = jnp.float32
    axis: str | None = None
    """Of the mesh over which heads and feed-forward width lie split, inside `shard_map`; `config`
    is then that of the part."""

    @nn.compact
    def __call__(self, x, phases, context, real=None):
        """`real` says which tokens are no padding; routers count them (model/moe.py)."""
        c = self.config
        norm = functools.partial(RMSNorm, c.norm_epsilon, "embed")
        attention = Attention(c, self.dtype, self.axis, name="attention")
        mixed, kept = attention(norm(name="attention_norm")(x), phases, context)
        x = constrain(x + mixed, "batch")
        if c.num_experts:
            experts = MixtureOfExperts(c, self.dtype, self.axis, name="mlp")
            feed_forward = functools.partial(experts, real=real)
        else:
            feed_forward = FeedForward(c, self.dtype, self.axis, name="mlp")
        x = x + feed_forward(norm(name="mlp_norm")(x))
        return constrain(x, "batch"), kept


REMAT = {
    "block": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What a block keeps for the way back: its input alone, or also what its projections gave."""


class Qwen(nn.Module):
    """Tokens to hidden states after the final norm: whole rows, or what `context` says."""

    config: ModelConfig
    dtype: DTypeLike = jnp.float32
    """Of the factors of matrix products, which add up in float32. Parameters keep theirs."""
    activations: DTypeLike | None = None
    """Of what lies between products (None: as `dtype`). On CPU float32, which is fast there; norms
    and softmax are float32 in any case."""
    remat: str = "none"
    """Or one of REMAT: what is computed again on the way back instead of being kept."""
    unroll: int = 1
    """Layers an iteration of the scan over layers. All of them where stacking their activations
    costs more than compiling each layer: a third of an update on CPU."""
    attention: str = "plain"
    """Of whole rows: or a fused kernel, `cudnn` or `tpu` (model/kernels.py)."""

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        context: Context | None = None,
    ) -> Float[Array, "B S D"]:
        c = self.config
        rolled = context is None and self.attention == "cudnn"
        if rolled:
            start = first_columns(positions)
            tokens, positions = roll_left(tokens, start), roll_left(positions, start)
        activations = self.activations or self.dtype
        embed = Embedding(c.vocab_size, c.hidden_size, activations, INITIAL_SCALE, name="embed")
        x = embed(tokens)
        block = Block
        if self.remat != "none":
            # Inside a scan XLA can't merge the recomputation with the first pass anyway.
            block = nn.remat(Block, prevent_cse=False, policy=REMAT[self.remat])
        layers = nn.scan(
            block,
            variable_axes={"params": 0, LOADS: 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast),
            length=c.num_layers,
            unroll=self.unroll,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        context = whole_rows(self.attention, positions) if context is None else context
        phases = rotary_phases(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        real = positions >= 0 if c.num_experts else None
        x, _ = layers(c, self.dtype, name="layers")(x, phases, context, real)
        if self.is_initializing() and not c.tie_embeddings:
            shape = (c.hidden_size, c.vocab_size)
            Projection(shape, ("embed", "vocab"), self.dtype, name="lm_head")(x)
        x = RMSNorm(c.norm_epsilon, "embed", name="norm")(x)
        return roll_left(x, -start) if rolled else x
