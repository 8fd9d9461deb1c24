"""Tokens sorted by the experts that they were sent to, and back.

    layout = lay_out(experts, count)                       # of each token's k experts
    rows = dispatch(x, layout)                             # [T, D] -> [R, D], an expert's together
    out = expert_product(rows, kernels, layout, dtype)     # [R, F] (model/expert_products.py)
    pairs = collect(out, layout)                           # [T, k, F]

The rows of an expert begin a new block; what they leave of their last one is empty. So all rows of
a block have one kernel. No token is dropped, however many go to one expert.

Letters: T tokens, k experts of a token, E experts, D and F sides of a kernel, R rows, n blocks, b
rows of a block, C rows of an expert and round.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
    sizes = round_up(taken, block)
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
