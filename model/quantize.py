"""Numbers kept as int8, with a float32 scale that many of them share: x = values * scale.

Symmetric, so that a product takes the scale of what it does not sum over after its sum, and nothing
is ever dequantised in memory. Sampling only: training's weights are float32.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8, PyTree

Stored = Literal["auto", "int8"]
"""How weights or a cache lie in memory; auto: in the type of the products' factors."""

LARGEST = 127
"""-128 is left out: it has no opposite."""

FAINTEST = 1e-12
"""Where all numbers of a scale are smaller, it is as if the largest were this one. A scale of 0
would divide by it, and one too small would raise the logits of ids that are no token."""


class Quantized(NamedTuple):
    values: Int8[Array, "..."]
    scale: Float[Array, "..."]
    """float32, without the axes that share it."""


def quantize(x: Float[Array, "..."], axes: int | tuple[int, ...]) -> Quantized:
    """`x` in steps of max|x| / 127, the maximum over `axes`; off by half a step at most.

    What is not finite makes its scale so, and all that is multiplied with it.
    """
    wide = x.astype(jnp.float32)
    highest = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
    scale = jnp.maximum(highest, FAINTEST) / LARGEST
    return Quantized(jnp.round(wide / scale).astype(jnp.int8), jnp.squeeze(scale, axes))


def quantize_kernels(layers: PyTree, outer: tuple[str, ...] = ()) -> PyTree:
    """The stacked layers with int8 kernels, each with a `kernel_scale` [L, *outputs] beside it.

    Not the routers': a step of int8 would send tokens to other experts. `outer` are the names that
    lead to `layers`.
    """
    made = {}
    for name, part in layers.items():
        path = (*outer, name)
        if not isinstance(part, dict) or name == "router":
            made[name] = part
        elif "kernel" in part:
            kernel, scale = quantize(part["kernel"], kernel_inputs(*path))
            made[name] = part | {"kernel": kernel, "kernel_scale": scale}
        else:
            made[name] = quantize_kernels(part, path)
    return made


def kernel_inputs(*path: str) -> tuple[int, ...]:
    """The axes of a stacked kernel that its product sums over; the path leads to its module."""
    if "experts" in path:
        return (2,)
    # Heads and their width are both inputs of the product that ends attention.
    return (1, 2) if path[-1] == "o_proj" else (1,)


def unhoisted(lasting: PyTree, step: Int[Array, ""]) -> tuple[PyTree, Int[Array, ""]]:
    """Both as they are. What lasts is tied to the step, whose result must be used: XLA would cast
    the int8 once before the loop, and every step would read the wide copy."""
    return jax.lax.optimization_barrier((lasting, step))
