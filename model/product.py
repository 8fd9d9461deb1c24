"""The matrix product of all layers: factors of a chosen type, sums in float32, both ways."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from model.device import this_device


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(
    left: Float[Array, "*batch n i"], right: Float[Array, "*batch i o"], dtype: DTypeLike
) -> Float[Array, "*batch n o"]:
    """left @ right in float32, of factors rounded to `dtype`; so are those of its gradients.

    Autodiff would multiply a float32 slope with a bfloat16 factor, at the speed of float32.
    """
    return _total(left.astype(dtype), right.astype(dtype))


def _forward(left, right, dtype):
    return product(left, right, dtype), (left, right)


def _backward(dtype, factors, slope):
    left, right = factors
    slope = slope.astype(dtype)
    of_left = _total(slope, transposed(right.astype(dtype)))
    of_right = _total(transposed(left.astype(dtype)), slope)
    return of_left.astype(left.dtype), of_right.astype(right.dtype)


product.defvjp(_forward, _backward)

_total = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


def transposed(factor: Float[Array, "*batch n i"]) -> Float[Array, "*batch i n"]:
    """A product's factor with its last two axes swapped, in the way that multiplies fast."""
    return written_out(jnp.swapaxes(factor, -1, -2))


def written_out(factor: Float[Array, "*batch n i"]) -> Float[Array, "*batch n i"]:
    """A factor whose axes were permuted, so that it lies in memory as it is read.

    Else XLA for CPU reads the factor where it lies, and to do so multiplies bfloat16 as float32, at
    half the speed. The axis of length 1 orders the array anew, and the barrier keeps that order.
    """
    if factor.dtype != jnp.bfloat16 or this_device().platform != "cpu":
        return factor
    apart = jnp.expand_dims(factor, -2)
    return jax.lax.optimization_barrier(apart).reshape(factor.shape)


def activations(dtype: DTypeLike) -> jnp.dtype:
    """The type of what lies between products whose factors are of `dtype`. A CPU multiplies
    bfloat16 fast and does nothing else with it fast."""
    return jnp.dtype(jnp.float32 if this_device().platform == "cpu" else dtype)
