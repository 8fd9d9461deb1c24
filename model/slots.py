"""Slots of the sampler: which row is decoded in which of them, and when.

    slot      a place in the batch that is decoded; it holds one row after another, or one for good
    age       tokens that a slot's row has
    step      one more token in each slot, written at the same column of every slot's cache

As a row's columns are its last `age` ones, wherever in the cache they lie, a slot can begin a new
row at any step: the cache is a ring.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model.decode import Cache, Prompt, emptied
from model.draw import Drawn


class Log(NamedTuple):
    """What was drawn, a line a step. Rows find theirs at the end: no step scatters."""

    drawn: Drawn
    row: Int[Array, "steps slots"]
    """Whose token it is; -1 if nobody's."""


class State(NamedTuple):
    step: Int[Array, ""]
    row: Int[Array, " slots"]
    age: Int[Array, " slots"]
    token: Int[Array, " slots"]
    """The last one, whose successor is drawn next."""
    live: Bool[Array, " slots"]
    """The row is not at its end."""
    clean: Bool[Array, " slots"]
    """The slot's cache holds finite numbers."""
    caches: list[Cache]
    log: Log
    taken: Int[Array, ""]
    """Rows that have got a slot."""
    begun: Int[Array, " B"]
    """At which step."""
    slot: Int[Array, " B"]
    """Which it was."""
    moved: Int[Array, ""]
    """The step at which the last rows were moved together."""
    slot_after: Int[Array, " B"]
    """Their slots from then on."""
    slot_steps: Int[Array, ""]


class Rows(NamedTuple):
    """What is known of each row before it is sampled."""

    prompt: Int[Array, " B"]
    token: Int[Array, " B"]
    """The prompt's last: left to the loop, so that there is one place that draws."""
    position: Int[Array, " B"]
    limit: Int[Array, " B"]
    uniforms: Float[Array, "B T"]


def begin(rows: Rows, slots: int, steps: int, caches: list[Cache]) -> State:
    """The first rows in the slots."""
    count = rows.limit.shape[0]
    lines = (steps, slots)
    drawn = Drawn(jnp.zeros(lines, jnp.int32), jnp.zeros(lines), jnp.ones(lines, bool))
    return State(
        step=jnp.int32(0),
        row=jnp.arange(slots),
        age=jnp.zeros(slots, jnp.int32),
        token=rows.token[:slots],
        live=rows.limit[:slots] > 0,
        clean=jnp.ones(slots, bool),
        caches=caches,
        log=Log(drawn, jnp.full(lines, -1)),
        taken=jnp.int32(slots),
        begun=jnp.zeros(count, jnp.int32),
        slot=jnp.arange(count),
        moved=jnp.int32(steps),
        slot_after=jnp.zeros(count, jnp.int32),
        slot_steps=jnp.int32(0),
    )


def refill(state: State, rows: Rows, prefilled: list[Prompt]) -> State:
    """The next rows in the slots whose row is at its end."""
    count = rows.limit.shape[0]
    following = state.taken + jnp.cumsum(~state.live) - 1
    fresh = ~state.live & (following < count)
    row = jnp.where(fresh, following, state.row)

    def choose(new, old):
        return jnp.where(fresh.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    def new_prompt(cache, prompt):
        own = jax.tree.map(
            lambda new, old: choose(new[rows.prompt[row]], old), prompt, cache.prompt
        )
        return cache._replace(prompt=own)

    caches = jax.lax.cond(
        jnp.any(fresh & ~state.clean),
        lambda caches: [emptied(cache, fresh) for cache in caches],
        lambda caches: caches,
        state.caches,
    )
    at = jnp.where(fresh, row, count)
    return state._replace(
        row=row,
        age=jnp.where(fresh, 0, state.age),
        token=jnp.where(fresh, rows.token[row], state.token),
        live=state.live | fresh & (rows.limit[row] > 0),
        clean=state.clean | fresh,
        caches=[new_prompt(*pair) for pair in zip(caches, prefilled, strict=True)],
        taken=state.taken + jnp.sum(fresh, dtype=jnp.int32),
        begun=state.begun.at[at].set(state.step, mode="drop"),
        slot=state.slot.at[at].set(jnp.arange(len(at)), mode="drop"),
    )


def move_together(state: State, few: int) -> State:
    """The last rows, `few` at most, in as few slots: with none to follow, the others are idle."""
    chosen = jnp.argsort(~state.live, stable=True)[:few]
    of_slots = ("row", "age", "token", "live", "clean", "caches")
    moved = {name: jax.tree.map(lambda x: x[chosen], getattr(state, name)) for name in of_slots}
    at = state.row[chosen]
    return state._replace(
        **moved, moved=state.step, slot_after=state.slot_after.at[at].set(jnp.arange(few))
    )


def gathered(state: State, width: int) -> tuple[Drawn, Bool[Array, "B {width}"]]:
    """What was drawn for each row, from the lines in which it had its slot, and how much of that is
    the row's."""
    steps = state.begun[:, None] + jnp.arange(width)
    slots = jnp.where(steps < state.moved, state.slot[:, None], state.slot_after[:, None])
    drawn, row = jax.tree.map(lambda log: log[steps, slots], state.log)
    return drawn, row == jnp.arange(len(steps))[:, None]
