"""AdamW's moments in fewer bits: bfloat16, or 8 bits with a scale a block.

    rule = scale_by_adam(b1, b2, eps, "int8")      # in the place of optax.scale_by_adam

A moment is widened to float32, moved, and rounded again. Rounding to the nearest would lose it: at
b2 = 0.999 a second moment moves by a thousandth an update, and bfloat16 has no number that near.
It would stay where it is, however long the gradients are larger. So all that is rounded coarser
than its steps is rounded at random, up with the probability of the part that is lost: right on
average. The noise is drawn from the number of the update, so that a resumed run draws the same.

Sharding: each leaf of a moment has its parameter's shape (`codes`, or the array itself), or that
shape with the last axis shortened to its blocks (`scale`). A block lies within the last axis, so
that whatever shards the leading axes shards all three alike; see `block_width` for the last one.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Float, Int, Int8, PyTree, UInt8, UInt16

StateDtype = Literal["float32", "bfloat16", "int8"]

SMALLEST = 4096
"""Elements below which a leaf stays in float32: norms and biases, which save nothing."""
WIDEST, NARROWEST = 256, 32
"""Elements of a block: the paper's, and the fewest whose scale is still a small part of them."""
SPLITS = 16
"""Devices over which the last axis may be split between two blocks, where that can be had."""

FIRST_POWER, SECOND_POWER = 2, 4
"""A code stands for scale * (code / largest code) ** power, so that numbers far below the largest
of a block are told apart. The second moment is a square, and so is its power."""
FIRST_CODES, SECOND_CODES = 127, 255


class Blocks(NamedTuple):
    """A moment in 8 bits. Block-wise as in https://arxiv.org/abs/2110.02861 (sec. 2.1), with codes
    that are powers instead of a table, whose search an accelerator does badly.

    Scales are powers of two, so that they seldom change: under a scale that moved with the largest
    number, all others would be rounded anew at every update."""

    codes: Int8[Array, "*axes last"] | UInt8[Array, "*axes last"]
    """Signed for the first moment, unsigned for the second."""
    scale: BFloat16[Array, "*axes blocks"]
    """What the largest code stands for; 0 where the whole block is 0."""


class AdamState(NamedTuple):
    count: Int[Array, ""]
    mu: PyTree
    """First moments: arrays, or Blocks where they are in 8 bits."""
    nu: PyTree
    """Second moments, alike."""


def scale_by_adam(
    b1: float, b2: float, eps: float, state_dtype: StateDtype
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with the moments stored in `state_dtype`; computed in float32.

    https://arxiv.org/abs/1412.6980 (algorithm 1).
    """
    if state_dtype == "float32":
        return optax.scale_by_adam(b1, b2, eps)

    def init(params: PyTree) -> AdamState:
        return AdamState(
            jnp.zeros([], jnp.int32),
            jax.tree.map(lambda p: _zeros(p, state_dtype, jnp.int8), params),
            jax.tree.map(lambda p: _zeros(p, state_dtype, jnp.uint8), params),
        )

    def update(
        grads: PyTree, state: AdamState, params: PyTree | None = None
    ) -> tuple[PyTree, AdamState]:
        count = optax.safe_increment(state.count)
        leaves, structure = jax.tree.flatten(grads)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), count), len(leaves) or 1)
        moved = [
            _move(key, grad, *moments, b1, b2, eps, count)
            for key, grad, *moments in zip(
                keys[: len(leaves)],
                leaves,
                structure.flatten_up_to(state.mu),
                structure.flatten_up_to(state.nu),
                strict=True,
            )
        ]
        updates, mu, nu = (structure.unflatten([m[i] for m in moved]) for i in range(3))
        return updates, AdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def block_width(last: int) -> int | None:
    """Elements of a block of a leaf whose last axis has `last`; None where there is no good number.

    The widest that leaves a multiple of SPLITS blocks, so that a split of the axis over devices is
    one of whole blocks; else the widest that divides the axis.
    """
    widths = [w for w in range(min(last, WIDEST), NARROWEST - 1, -1) if last % w == 0]
    return next((w for w in widths if last // w % SPLITS == 0), widths[0] if widths else None)


def _zeros(param, state_dtype, codes):
    if state_dtype == "bfloat16":
        return jnp.zeros(param.shape, jnp.bfloat16)
    width = block_width(param.shape[-1]) if param.ndim else None
    if state_dtype == "float32" or param.size < SMALLEST or width is None:
        return jnp.zeros(param.shape, jnp.float32)
    blocks = (*param.shape[:-1], param.shape[-1] // width)
    return Blocks(jnp.zeros(param.shape, codes), jnp.zeros(blocks, jnp.bfloat16))


def _move(key, grad, mu, nu, b1, b2, eps, count):
    """One leaf's update and moments."""
    first = b1 * widened(mu, FIRST_POWER, FIRST_CODES) + (1 - b1) * grad
    second = b2 * widened(nu, SECOND_POWER, SECOND_CODES) + (1 - b2) * grad**2
    unbiased = first / (1 - b1**count)
    update = unbiased / (jnp.sqrt(second / (1 - b2**count)) + eps)
    noise_key, other_key = jax.random.split(key)
    if isinstance(mu, Blocks):
        noise = jax.random.bits(noise_key, grad.shape, jnp.uint16)
        other = jax.random.bits(other_key, grad.shape, jnp.uint16)
        mu = in_blocks(first, mu, noise, FIRST_POWER, FIRST_CODES)
        nu = in_blocks(second, nu, other, SECOND_POWER, SECOND_CODES)
    elif mu.dtype == jnp.bfloat16:
        # The first moment moves by a tenth of what it is off: to the nearest is near enough.
        mu = first.astype(jnp.bfloat16)
        nu = round_at_random(second, jax.random.bits(noise_key, grad.shape, jnp.uint16))
    else:
        mu, nu = first, second
    return update, mu, nu


def round_at_random(
    x: Float[Array, "*axes"], noise: UInt16[Array, "*axes"]
) -> BFloat16[Array, "*axes"]:
    """One of the two bfloat16 numbers beside each float32 number: it on average."""
    words = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise.astype(jnp.uint32)
    high = (words >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(high, jnp.bfloat16)


def widened(moment, power, largest):
    if not isinstance(moment, Blocks):
        return moment.astype(jnp.float32)
    share = moment.codes.astype(jnp.float32) / largest
    # Even powers lose the sign.
    parts = _cut(jnp.sign(share) * share**power, moment.scale)
    return (parts * moment.scale[..., None].astype(jnp.float32)).reshape(moment.codes.shape)


def in_blocks(
    x: Float[Array, "*axes last"],
    like: Blocks,
    noise: UInt16[Array, "*axes last"],
    power: int,
    largest: int,
) -> Blocks:
    """One of the two codes beside each number: it on average. Blocks and code type are `like`'s."""
    parts = _cut(x, like.scale)
    highest = jnp.max(jnp.abs(parts), -1)
    mantissa, exponent = jnp.frexp(highest)
    # The least power of two that is no less.
    exponent = jnp.clip(exponent - (mantissa == 0.5), -126, 127)
    scale = jnp.where(highest > 0, jnp.ldexp(jnp.float32(1), exponent), 0.0)
    share = parts / jnp.where(scale > 0, scale, 1.0)[..., None]
    root = jnp.sqrt(jnp.abs(share)) if power == 2 else jnp.sqrt(jnp.sqrt(jnp.abs(share)))
    below = jnp.clip(jnp.floor(root * largest), 0, largest - 1)
    low, high = (below / largest) ** power, ((below + 1) / largest) ** power
    chance = (jnp.abs(share) - low) / (high - low)
    drawn = _cut(noise.astype(jnp.float32) / 2**16, like.scale)
    codes = below + (drawn < chance)
    if like.codes.dtype == jnp.uint8:
        # A second moment of 0 beside a first one that is not would be a step without bound.
        codes = jnp.where(share > 0, jnp.maximum(codes, 1), 0)
    else:
        codes = jnp.where(share < 0, -codes, codes)
    return Blocks(codes.reshape(x.shape).astype(like.codes.dtype), scale.astype(jnp.bfloat16))


def _cut(x, scale):
    """The last axis in blocks."""
    return x.reshape(*scale.shape, x.shape[-1] // scale.shape[-1])
