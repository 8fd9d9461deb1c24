"""Products of tokens with the experts that they were sent to.

    layout = lay_out(experts, count)                       # of each token's k experts
    rows = dispatch(x, layout)                             # [T, D] -> [R, D], an expert's together
    out = expert_product(rows, kernels, layout, dtype)     # [R, F], each row with its expert's
    pairs = collect(out, layout)                           # [T, k, F]

The rows of an expert begin a new block; what they leave of their last one is empty. So all rows of
a block have one kernel. No token is dropped, however many go to one expert.

Letters: T tokens, k experts of a token, E experts, D and F sides of a kernel, R rows, n blocks, b
rows of a block, C rows of an expert and round.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from model.sharding import round_up

NARROWEST_BLOCK, WIDEST_BLOCK = 8, 128
"""Rows. Wider ones are left emptier, narrower ones read each kernel more often."""

LEAST_ROUND = 256
"""Rows of an expert and round. Fewer take no less time: an H100 computes 295 FLOPs while it reads a
byte, and of a kernel in bfloat16 a row needs one a byte."""


@jax.tree_util.register_static
class Fixed(int):
    """A number that a program is compiled for, among arrays that it is given."""


class Layout(NamedTuple):
    source: Int[Array, " R"]
    """Which pair of a token and an expert lies in each row, k of them a token; T * k in empty rows.
    """
    place: Int[Array, "T k"]
    """The reverse: in which row each pair lies; R where its expert is on another device."""
    sizes: Int[Array, " E"]
    """Rows of each expert, empty ones included: whole blocks."""
    starts: Int[Array, " E"]
    """The first row of each expert."""
    owners: Int[Array, " n"]
    """The expert of each block. Blocks behind all experts' are empty, and count as the last's."""
    usual: Fixed
    """Rows of a busy expert where the router is even: its share of the pairs, and a block."""

    @property
    def block(self) -> int:
        return self.source.shape[0] // self.owners.shape[0]

    @property
    def largest(self) -> int:
        """Rows of an expert to which all tokens go."""
        return round_up(self.place.shape[0], self.block)

    @property
    def round(self) -> int:
        """C: one round suffices where the router is even, or all of an expert's rows are few."""
        return min(self.largest, round_up(max(self.usual, LEAST_ROUND), self.block))


def lay_out(experts: Int[Array, "T k"], count: int, parts: int = 1) -> Layout:
    """Where tokens lie that go to `experts`, a token's all different, of which those from 0 to
    `count` are here; there are `count * parts` on all devices together."""
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
        starts=starts[:count],
        owners=jnp.minimum(jnp.sum(passed, axis=1, dtype=jnp.int32), count - 1),
        usual=Fixed(-(-pairs // (count * parts)) + block),
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
