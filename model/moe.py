"""A feed-forward layer of experts, of which a router chooses some for each token: Qwen3-MoE's.

    weights, experts = top_k(softmax(x @ router), k)       # softmax over all experts, float32
    y = sum_k weights_k * SwiGLU_experts_k(x)

The router's logits are of factors in the compute type, added up in float32 and left there. Where
the model asks for it, a token's weights are divided by their sum.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int8

from model.config import ModelConfig
from model.expert_products import expert_product
from model.experts import collect, dispatch, lay_out
from model.product import product
from model.sharding import TENSOR, mesh_sizes, partition

INITIAL_SCALE = 0.02

JOINT = "gate_up_proj"
"""Gate and up side by side in one kernel, where `parameters.joined` has put them so."""

LOADS = "router"
"""The collection in which layers leave their Load, where it is mutable."""


class Routing(NamedTuple):
    probs: Float[Array, "T E"]
    """Of all experts."""
    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]


class Load(NamedTuple):
    """What a router did with tokens that are no padding: sums, which add up over micro-batches."""

    sent: Float[Array, "*layers E"]
    """Tokens to each expert; k times the tokens together."""
    probs: Float[Array, "*layers E"]
    """Of the softmax over experts."""
    tokens: Float[Array, "*layers"]


def route(logits: Float[Array, "T E"], count: int, renormalise: bool) -> Routing:
    """The `count` likeliest experts of each token, ties by the lower number."""
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(probs, count)
    if renormalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(probs, experts, weights)


def measure(routing: Routing, real: Bool[Array, " T"]) -> Load:
    experts = jnp.arange(routing.probs.shape[-1])
    chosen = jnp.any(routing.experts[:, :, None] == experts, axis=1)
    weights = real.astype(jnp.float32)
    return Load(
        sent=jnp.sum(jnp.where(chosen, weights[:, None], 0.0), axis=0),
        probs=jnp.sum(routing.probs * weights[:, None], axis=0),
        tokens=jnp.sum(weights),
    )


def balance_loss(load: Load) -> Float[Array, ""]:
    """E * sum_e f_e P_e, where f_e tokens of one go to expert e, and P_e is its mean probability:
    k where all get the same, E where all tokens go to the same k with certainty.

    The gradient is that of P alone. https://arxiv.org/abs/2101.03961 (eq. 4 to 6); f and P are
    those of all layers together, as in `transformers`' `load_balancing_loss_func`.
    """
    tokens = jnp.maximum(jnp.sum(load.tokens), 1.0)
    sent, probs = (jnp.sum(x, axis=0) / tokens for x in (load.sent, load.probs))
    return load.sent.shape[-1] * jnp.sum(jax.lax.stop_gradient(sent) * probs)


class Kernel(NamedTuple):
    """Of all experts that are here."""

    values: Float[Array, "E D F"] | Int8[Array, "E D F"]
    scale: Float[Array, "E F"] | None = None
    """In int8: see model/quantize.py."""


class Kernels(NamedTuple):
    inner: tuple[Kernel, ...]
    """Gate and up, or both side by side in one."""
    down: Kernel


def mixture(
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    kernels: Kernels,
    dtype: DTypeLike,
    axis: str | None = None,
) -> Float[Array, "T D"]:
    """The weighted sum of what each token's experts make of it. Factors of products are of `dtype`.

    `axis`: of the mesh over which the experts lie split, inside `shard_map`. Each device computes
    all tokens with those of their experts that it has, and they add up their results.
    """
    count = kernels.down.values.shape[0]
    if axis is None:
        layout = lay_out(experts, count)
    else:
        first = jax.lax.axis_index(axis) * count
        layout = lay_out(experts - first, count, jax.lax.axis_size(axis))
    rows = dispatch(x, layout)
    inner = [
        _scaled_product(rows, kernel, layout, dtype).astype(x.dtype) for kernel in kernels.inner
    ]
    gate, up = inner if len(inner) == 2 else jnp.split(inner[0], 2, axis=-1)
    out = _scaled_product(nn.silu(gate) * up, kernels.down, layout, dtype)
    mixed = jnp.sum(collect(out, layout) * weights[:, :, None], axis=1)
    return (mixed if axis is None else jax.lax.psum(mixed, axis)).astype(x.dtype)


def _scaled_product(rows, kernel, layout, dtype):
    out = expert_product(rows, kernel.values, layout, dtype)
    if kernel.scale is None:
        return out
    blocks = out.reshape(layout.owners.shape[0], -1, out.shape[1])
    return (blocks * kernel.scale[layout.owners][:, None]).reshape(out.shape)


class KernelOf(nn.Module):
    """One kernel's parameters, and its scale where there is one; `axes` names the kernel's axes."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]

    @nn.compact
    def __call__(self) -> Kernel:
        init = nn.with_logical_partitioning(nn.initializers.normal(INITIAL_SCALE), self.axes)
        values = self.param("kernel", init, self.shape, jnp.float32)
        scaled = self.has_variable("params", "kernel_scale")
        return Kernel(values, self.get_variable("params", "kernel_scale") if scaled else None)


class Experts(nn.Module):
    """The kernels of a layer's experts."""

    config: ModelConfig
    count: int
    """How many are here."""

    @nn.compact
    def __call__(self) -> Kernels:
        # The width of an expert has an axis of its own name: a device has whole experts.
        width, size = self.config.hidden_size, self.config.expert_size
        shape, axes = (self.count, width, size), ("experts", "embed", "expert_mlp")
        names = ("gate_proj", "up_proj")
        if self.has_variable("params", JOINT):
            shape, names = (self.count, width, 2 * size), (JOINT,)
        inner = tuple(KernelOf(shape, axes, name=name)() for name in names)
        shape, axes = (self.count, size, width), ("experts", "expert_mlp", "embed")
        return Kernels(inner, KernelOf(shape, axes, name="down_proj")())


class MixtureOfExperts(nn.Module):
    config: ModelConfig
    dtype: DTypeLike
    axis: str | None = None
    """As in `mixture`; the router is whole on every device."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B S D"], real: Bool[Array, "B S"] | None = None
    ) -> Float[Array, "B S D"]:
        """`real` says which tokens are no padding, for the Load that is left in LOADS."""
        c = self.config
        router = KernelOf((c.hidden_size, c.num_experts), ("embed", None), name="router")()
        parts = 1 if self.axis is None else jax.lax.axis_size(self.axis)
        kernels = Experts(c, c.num_experts // parts, name="experts")()
        if self.is_initializing():
            return x
        logits = product(x.reshape(-1, c.hidden_size), router.values, self.dtype)
        routing = route(logits, c.experts_per_token, c.renormalise_experts)
        if real is not None and self.is_mutable_collection(LOADS):
            load = measure(routing, real.reshape(-1))
            self.sow(LOADS, "load", load, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        experts, weights = (part.reshape(*x.shape[:2], -1) for part in routing[1:])
        if not (sizes := mesh_sizes()):
            return _of_rows(x, experts, weights, kernels, dtype=self.dtype, axis=self.axis)
        axis = TENSOR if sizes[TENSOR] > 1 else None
        rows = partition("batch")
        return jax.shard_map(
            functools.partial(_of_rows, dtype=self.dtype, axis=axis),
            in_specs=(rows, rows, rows, partition("experts")),
            out_specs=rows,
            check_vma=False,
        )(x, experts, weights, kernels)


def _of_rows(x, *routed, **how):
    experts, weights, kernels = routed
    flat = (part.reshape(-1, part.shape[-1]) for part in (x, experts, weights))
    return mixture(*flat, kernels, **how).reshape(x.shape)
