"""Products of rows with the kernels of the experts that they were sent to (model/experts.py), and
their gradients: by blocks on a CPU, by rounds on a GPU, by XLA's own kernel on a TPU.

Letters: E experts, D and F sides of a kernel, R rows, b rows of a block, C rows of an expert and
round.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from model.experts import Layout


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
    of_rows = _product(slope, kernels, layout, dtype, summed=2)
    of_kernels = _outer_product(rows, slope, layout, dtype)
    return of_rows.astype(rows.dtype), of_kernels.astype(kernels.dtype), None


expert_product.defvjp(_forward, _backward)

_total = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _product(rows, kernels, layout, dtype, summed=1):
    """Summed over that axis of the kernels.

    On TPU `jax.lax.ragged_dot`, for which XLA has a kernel. A CPU and a GPU would multiply all rows
    with all kernels, and keep that in memory: on CPU 3 to 10 times as long as by blocks. A GPU's
    many cores want many products at once: by rounds.
    """
    return jax.lax.platform_dependent(
        rows,
        kernels,
        layout,
        tpu=functools.partial(_ragged, dtype=dtype, summed=summed),
        cpu=functools.partial(_by_blocks, dtype=dtype, summed=summed),
        default=functools.partial(_by_rounds, dtype=dtype, summed=summed),
    )


def _outer_product(rows, slope, layout, dtype):
    """Of each expert's rows, which is the gradient of its kernel. For this `ragged_dot` has no
    kernel on a TPU either."""
    return jax.lax.platform_dependent(
        rows,
        slope,
        layout,
        cpu=functools.partial(_outer_by_blocks, dtype=dtype),
        default=functools.partial(_outer_by_rounds, dtype=dtype),
    )


def _ragged(rows, kernels, layout, dtype, summed):
    factors = rows.astype(dtype), jnp.swapaxes(kernels, 1, summed).astype(dtype)
    return jax.lax.ragged_dot(*factors, layout.sizes, preferred_element_type=jnp.float32)


# ---- by blocks: one at a time --------------------------------------------------------------


def _by_blocks(rows, kernels, layout, dtype, summed):
    """Empty blocks cost nothing: on a device with few of the experts they are most."""
    kernels = jnp.swapaxes(kernels, 1, summed)
    shape = layout.block, kernels.shape[2]

    def turn(_, part):
        used, owner, cut = part
        # An int8 kernel is cast here, where it is read: not all of them before the loop.
        return None, jax.lax.cond(
            used,
            lambda: _total("bd,df->bf", cut, kernels[owner].astype(dtype)),
            lambda: jnp.zeros(shape, jnp.float32),
        )

    return _scan_blocks(turn, None, layout, rows.astype(dtype))[1].reshape(-1, shape[1])


def _outer_by_blocks(rows, slope, layout, dtype):
    """Added up where the kernel's gradient lies."""
    shape = rows.shape[1], slope.shape[1]

    def turn(total, part):
        used, owner, left, right = part
        more = jax.lax.cond(
            used,
            lambda: _total("bd,bf->df", left, right),
            lambda: jnp.zeros(shape, jnp.float32),
        )
        return total.at[owner].add(more), None

    start = jnp.zeros((*layout.sizes.shape, *shape), jnp.float32)
    return _scan_blocks(turn, start, layout, rows.astype(dtype), slope.astype(dtype))[0]


def _scan_blocks(turn, start, layout, *rows):
    """`turn` takes whether a block is used, whose it is, and its part of each of `rows`."""
    blocks, block = layout.owners.shape[0], layout.block
    used = jnp.arange(blocks) * block < jnp.sum(layout.sizes)
    cut = (x.reshape(blocks, block, -1) for x in rows)
    usual = min(blocks, layout.sizes.shape[0] * (layout.usual // block))
    with jax.named_scope(usual_turns(usual)):
        return jax.lax.scan(turn, start, (used, layout.owners, *cut))


# ---- by rounds: all experts at once --------------------------------------------------------


def _by_rounds(rows, kernels, layout, dtype, summed):
    """Each round reads the kernels once, as they lie."""
    kernels = kernels.astype(dtype)
    width = kernels.shape[3 - summed]

    def products(places):
        return jax.lax.dot_general(
            _rows_at(rows, places, dtype),
            kernels,
            (((2,), (summed,)), ((0,), (0,))),
            preferred_element_type=jnp.float32,
        )

    def turn(number, total):
        places = _round(layout, number)
        return total.at[places].set(products(places), mode="drop", unique_indices=True)

    # Not set among zeros, which XLA shares between products, and so copies for each.
    first = products(_round(layout, 0)).reshape(-1, width)
    total = first.at[_places_in_first(layout)].get(mode="fill", fill_value=0)
    return _further_rounds(turn, total, layout)


def _outer_by_rounds(rows, slope, layout, dtype):
    def products(number):
        places = _round(layout, number)
        left, right = (_rows_at(x, places, dtype) for x in (rows, slope))
        return _total("ecd,ecf->edf", left, right)

    return _further_rounds(lambda number, total: total + products(number), products(0), layout)


def _further_rounds(turn: Callable, total: Float[Array, "..."], layout: Layout):
    """`turn(number, total)` of the rounds behind the first, while an expert has rows left."""
    if layout.largest == layout.round:
        return total
    rounds = -(-jnp.max(layout.sizes) // layout.round)
    # The first has room for an even router's.
    with jax.named_scope(usual_turns(0)):
        return jax.lax.fori_loop(1, rounds, turn, total)


def _round(layout: Layout, number: int | Int[Array, ""]) -> Int[Array, "E C"]:
    """Where each expert's rows of a round are, from 0 on; where it has none, numbers from R on, all
    different: so a scatter needs no order."""
    experts, rows = layout.sizes.shape[0], layout.source.shape[0]
    behind = number * layout.round + jnp.arange(layout.round)
    outside = rows + jnp.arange(experts * layout.round).reshape(experts, -1)
    filled = behind < layout.sizes[:, None]
    return jnp.where(filled, layout.starts[:, None] + behind, outside)


def _places_in_first(layout: Layout) -> Int[Array, " R"]:
    """Where each row is among those of the first round; E * C for one that isn't."""
    owners = jnp.repeat(layout.owners, layout.block)
    behind = jnp.arange(owners.shape[0]) - layout.starts[owners]
    filled = behind < jnp.minimum(layout.sizes, layout.round)[owners]
    place = owners * layout.round + behind
    return jnp.where(filled, place, layout.sizes.shape[0] * layout.round)


def _rows_at(rows, places, dtype):
    # Cast only here: most of all rows are empty on a device with few of the experts.
    return rows.at[places].get(mode="fill", fill_value=0).astype(dtype)


def usual_turns(count: int) -> str:
    """The name of a scope around a loop whose turns depend on data: how many are usual, for who
    reads the compiled program (rlx/cost.py)."""
    return f"usual_turns_{count}"
