"""Products of tokens with the experts that they were sent to.

    layout = lay_out(experts, count)                       # of each token's k experts
    rows = dispatch(x, layout)                             # [T, D] -> [R, D], an expert's together
    out = expert_product(rows, kernels, layout, dtype)     # [R, F], each row with its expert's
    pairs = collect(out, layout)                           # [T, k, F]

The rows of an expert begin a new block; what they leave of their last one is empty. So all rows of
a block have one kernel. No token is dropped, however many go to one expert.

Letters: T tokens, k experts of a token, E experts, D and F sides of a kernel, R rows, n blocks, b
rows of a block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

NARROWEST_BLOCK, WIDEST_BLOCK = 8, 128
"""Rows. Wider ones are left emptier, narrower ones read each kernel more often."""

SIDE_BY_SIDE = 16
"""Blocks of one product on a GPU, for each of which it copies a kernel: one alone would leave it
idle."""


class Layout(NamedTuple):
    source: Int[Array, " R"]
    """Which pair of a token and an expert lies in each row, k of them a token; T * k in empty rows.
    """
    place: Int[Array, "T k"]
    """The reverse: in which row each pair lies; R where its expert is on another device."""
    sizes: Int[Array, " E"]
    """Rows of each expert, empty ones included: whole blocks."""
    owners: Int[Array, " n"]
    """The expert of each block. Blocks behind all experts' are empty, and count as the last's."""


def lay_out(experts: Int[Array, "T k"], count: int, parts: int = 1) -> Layout:
    """Where tokens lie that go to `experts`, of which those from 0 to `count` are here; there are
    `count * parts` on all devices together."""
    flat = experts.reshape(-1)
    pairs = flat.shape[0]
    block = NARROWEST_BLOCK
    # Two blocks an expert if all get the same.
    while block < WIDEST_BLOCK and 4 * block * count * parts <= pairs:
        block *= 2
    # Each expert may leave one block unfilled, and none has a block without a row.
    blocks = min((pairs + count * (block - 1)) // block, pairs)
    rows = blocks * block

    # Comparisons and sums: for few experts `cumsum` and `searchsorted` take long to compile.
    numbers = jnp.arange(count + 1)
    number = jnp.where((flat >= 0) & (flat < count), flat, count)
    taken = jnp.sum(number[:, None] == numbers, axis=0, dtype=jnp.int32)
    sizes = -(-taken // block) * block
    before = numbers[:, None] < numbers
    starts, starts_of_taken = (
        jnp.sum(jnp.where(before, x[:, None], 0), axis=0) for x in (sizes, taken)
    )
    order = jnp.argsort(number, stable=True).astype(jnp.int32)
    ordered = number[order]
    places = (starts - starts_of_taken)[ordered] + jnp.arange(pairs)
    places = jnp.where(ordered < count, places, rows)
    ends = (starts + sizes)[:count]
    passed = ends <= block * jnp.arange(blocks)[:, None]
    return Layout(
        source=jnp.full(rows, pairs, jnp.int32).at[places].set(order, mode="drop"),
        place=jnp.zeros(pairs, jnp.int32).at[order].set(places).reshape(experts.shape),
        sizes=sizes[:count],
        owners=jnp.minimum(jnp.sum(passed, axis=1, dtype=jnp.int32), count - 1),
    )


# Each is the other's transpose: a gather both ways, where autodiff would scatter.


@jax.custom_vjp
def dispatch(x: Float[Array, "T D"], layout: Layout) -> Float[Array, "R D"]:
    """Each token in the rows of its experts; zeros in empty rows."""
    return x.at[layout.source // layout.place.shape[1]].get(mode="fill", fill_value=0)


@jax.custom_vjp
def collect(rows: Float[Array, "R D"], layout: Layout) -> Float[Array, "T k D"]:
    """What each token's experts made of it; zeros for experts on other devices."""
    return rows.at[layout.place].get(mode="fill", fill_value=0)


def _to_rows(slope, layout):
    flat = slope.reshape(-1, slope.shape[-1])
    return flat.at[layout.source].get(mode="fill", fill_value=0), None


dispatch.defvjp(
    lambda x, layout: (dispatch(x, layout), layout),
    lambda layout, slope: (jnp.sum(collect(slope, layout), axis=1), None),
)
collect.defvjp(
    lambda rows, layout: (collect(rows, layout), layout),
    lambda layout, slope: _to_rows(slope, layout),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def expert_product(
    rows: Float[Array, "R D"],
    kernels: Float[Array, "E D F"] | Int8[Array, "E D F"],
    layout: Layout,
    dtype: DTypeLike,
) -> Float[Array, "R F"]:
    """Each row times its expert's kernel in float32, of factors rounded to `dtype`; so are those of
    its gradients. Empty rows must be zeros."""
    return _product(rows, kernels, layout, dtype)


def _forward(rows, kernels, layout, dtype):
    return _product(rows, kernels, layout, dtype), (rows, kernels, layout)


def _backward(dtype, kept, slope):
    rows, kernels, layout = kept
    of_rows = _product(slope, jnp.swapaxes(kernels, 1, 2), layout, dtype)
    of_kernels = _outer_product(rows, slope, layout, kernels.shape[0], dtype)
    return of_rows.astype(rows.dtype), of_kernels.astype(kernels.dtype), None


expert_product.defvjp(_forward, _backward)

_total = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


def _product(rows, kernels, layout, dtype):
    """`jax.lax.ragged_dot` where XLA has a kernel for it. A CPU and a GPU would multiply all rows
    with all kernels, and keep that in memory: on CPU 3 to 10 times as long."""
    return jax.lax.platform_dependent(
        rows,
        kernels,
        layout,
        tpu=functools.partial(_ragged, dtype=dtype),
        cpu=functools.partial(_by_blocks, dtype=dtype, together=1),
        default=functools.partial(_by_blocks, dtype=dtype, together=SIDE_BY_SIDE),
    )


def _ragged(rows, kernels, layout, dtype):
    factors = rows.astype(dtype), kernels.astype(dtype)
    return jax.lax.ragged_dot(*factors, layout.sizes, preferred_element_type=jnp.float32)


def _by_blocks(rows, kernels, layout, dtype, together):
    """Empty blocks cost nothing: on a device with few of the experts they are most."""
    blocks, width = layout.owners.shape[0], kernels.shape[2]
    cut = rows.astype(dtype).reshape(blocks, -1, rows.shape[1])
    block = cut.shape[1]
    fill = -blocks % together
    used = jnp.arange(blocks) * block < jnp.sum(layout.sizes)
    turns = [
        jnp.pad(x, ((0, fill), *[(0, 0)] * (x.ndim - 1))).reshape(-1, together, *x.shape[1:])
        for x in (cut, layout.owners, used)
    ]

    def turn(_, part):
        cut, owners, used = part
        # An int8 kernel is cast here, where it is read: not all of them before the loop.
        product = jax.lax.cond(
            used[0],
            lambda: _total(cut, kernels[owners].astype(dtype)),
            lambda: jnp.zeros((together, block, width), jnp.float32),
        )
        return None, product

    with jax.named_scope("expert_blocks"):
        _, products = jax.lax.scan(turn, None, tuple(turns))
    return products.reshape(-1, width)[: rows.shape[0]]


def _outer_product(rows, slope, layout, count, dtype):
    """Of each expert's rows, which is the gradient of its kernel: block by block, added up where
    the kernel's gradient lies."""
    blocks = layout.owners.shape[0]
    left, right = (x.astype(dtype).reshape(blocks, -1, x.shape[1]) for x in (rows, slope))
    used = jnp.arange(blocks) * left.shape[1] < jnp.sum(layout.sizes)

    def turn(total, part):
        left, right, owner, used = part
        shape = (left.shape[1], right.shape[1])
        more = jax.lax.cond(
            used, lambda: _total(left.T, right), lambda: jnp.zeros(shape, jnp.float32)
        )
        return total.at[owner].add(more), None

    start = jnp.zeros((count, rows.shape[1], slope.shape[1]), jnp.float32)
    with jax.named_scope("expert_blocks"):
        return jax.lax.scan(turn, start, (left, right, layout.owners, used))[0]
