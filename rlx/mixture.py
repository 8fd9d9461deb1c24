"""Several tasks in one pool: which task the next prompt is of, and what is known of each.

    rows, epochs, cursor = next_rows(mix, key, cursor, count)
    cursor = counted(mix, cursor, rows, correct)

A task gets its share exactly: with w_k its weight, it has been drawn within one of sum w_k times
after any number of draws ("smooth weighted round-robin": each draw adds w_k to every task's credit,
takes the task with the most and 1 off its credit). Each task has epochs of its own.

Letters: K tasks, M prompts of the pool, which lie task by task.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rlx import ops
from rlx.types import Metrics, Mixture

Follow = Literal["weights", "schedule", "solve_rates"]

DECAY = 0.98
"""Of what is remembered of a task's solve rate, a group."""


class Mix(NamedTuple):
    """What is static of a mixture."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Prompts of each task in the pool."""
    weights: tuple[float, ...]
    final_weights: tuple[float, ...]
    """Reached after `steps` steps, where the weights follow a schedule."""
    follow: Follow
    floor: float
    """Least factor that a solve rate may put on a weight."""
    steps: int

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *self.sizes[:-1]])


def begin(mix: Mix) -> Mixture:
    """Nothing drawn; of each task half is taken to be solved."""
    count = len(mix.names)
    zeros = jnp.zeros(count)
    drawn, half = zeros.astype(jnp.int32), jnp.full(count, 0.5)
    return renewed(mix, Mixture(drawn, zeros, zeros, half, jnp.int32(0)))


def step_begun(mix: Mix, cursor: Mixture, first: Bool[Array, ""]) -> Mixture:
    """Before a round is drawn: the `first` of a step counts the step."""
    return renewed(mix, cursor._replace(steps=cursor.steps + first))


def renewed(mix: Mix, cursor: Mixture) -> Mixture:
    """The weights for the next draws, adding up to 1."""
    weights = jnp.asarray(mix.weights, jnp.float32)
    if mix.follow == "schedule":
        done = jnp.clip((cursor.steps - 1) / mix.steps, 0.0, 1.0)
        weights = weights + done * (jnp.asarray(mix.final_weights, jnp.float32) - weights)
    elif mix.follow == "solve_rates":
        # Groups that are all right or all wrong teach nothing: 4 p (1 - p) is 1 at a half.
        rate = cursor.solve_rate
        weights = weights * jnp.maximum(4 * rate * (1 - rate), mix.floor)
    return cursor._replace(weights=weights / jnp.sum(weights))


def next_tasks(cursor: Mixture, count: int) -> tuple[Int[Array, " count"], Mixture]:
    """The tasks of the next prompts, and the shares after them."""

    def one(cursor, _):
        credit = cursor.credit + cursor.weights
        task = jnp.argmax(credit)
        credit = credit.at[task].add(-1.0)
        return cursor._replace(credit=credit, drawn=cursor.drawn.at[task].add(1)), task

    cursor, tasks = jax.lax.scan(one, cursor, length=count)
    return tasks, cursor


def next_rows(
    mix: Mix, key: jax.Array, cursor: Mixture, count: int
) -> tuple[Int[Array, " count"], Int[Array, " count"], Mixture]:
    """Rows of the pool, the epoch of its task that each is drawn in, and the shares after them.

    Every epoch of a task is a new order of its prompts. A task with fewer prompts than its part of
    `count` gives some of them more than once, in different epochs.
    """
    tasks, after = next_tasks(cursor, count)
    rows, epochs = jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.int32)
    for k, (start, size) in enumerate(zip(mix.starts.tolist(), mix.sizes, strict=True)):
        task_key = jax.random.fold_in(key, k)
        place = cursor.drawn[k] + jnp.cumsum(tasks == k) - 1
        first, last = cursor.drawn[k] // size, (after.drawn[k] - 1) // size

        def order(epoch, task_key=task_key, size=size):
            return jax.random.permutation(jax.random.fold_in(task_key, epoch), size)

        of_first = order(first)
        orders = [of_first]
        for more in range(1, -(-count // size) + 1):
            # Sorting a large pool takes a share of a step; another order is seldom needed.
            beyond = first + more <= last
            orders.append(
                jax.lax.cond(
                    beyond,
                    lambda more=more, order=order, first=first: order(first + more),
                    lambda of_first=of_first: of_first,
                )
            )
        epoch = place // size
        chosen = jnp.stack(orders)[jnp.clip(epoch - first, 0, len(orders) - 1), place % size]
        rows = jnp.where(tasks == k, start + chosen, rows)
        epochs = jnp.where(tasks == k, epoch, epochs)
    return rows, epochs, after


def tasks_of(mix: Mix, rows: Int[Array, " N"]) -> Int[Array, " N"]:
    """Which task each row of the pool is of."""
    return jnp.searchsorted(jnp.asarray(mix.starts), rows, side="right") - 1


def counted(
    mix: Mix, cursor: Mixture, rows: Int[Array, " N"], correct: Float[Array, "N G"]
) -> Mixture:
    """With these groups' solve rates, the older ones fading, and the weights that follow.

    A row without a verdict is not counted, and a group without any changes nothing.
    """
    tasks = tasks_of(mix, rows)
    known = jnp.isfinite(correct)
    rates = jnp.sum(jnp.where(known, correct, 0.0), axis=1) / jnp.maximum(jnp.sum(known, 1), 1)
    some = jnp.any(known, axis=1)

    def of_task(k, rate):
        mine = some & (tasks == k)
        count = jnp.sum(mine)
        mean = jnp.sum(jnp.where(mine, rates, 0.0)) / jnp.maximum(count, 1)
        kept = DECAY**count
        return kept * rate + (1 - kept) * mean

    places = jnp.arange(len(mix.names))
    return renewed(mix, cursor._replace(solve_rate=jax.vmap(of_task)(places, cursor.solve_rate)))


def measure(
    mix: Mix,
    rows: Int[Array, " N"],
    rewards: Float[Array, "N G"],
    correct: Float[Array, "N G"],
    lengths: Float[Array, "N G"],
    truncated: Bool[Array, "N G"],
) -> Metrics:
    """Of each task alone: its share of the prompts, and what a run logs of all rows."""
    tasks = tasks_of(mix, rows)
    metrics: Metrics = {}
    for k, name in enumerate(mix.names):
        mine = jnp.broadcast_to((tasks == k)[:, None], rewards.shape)
        metrics |= {
            f"task/{name}/share": ops.mean(mine[:, :1], jnp.ones_like(mine[:, :1])),
            f"task/{name}/reward": ops.mean(rewards, mine & jnp.isfinite(rewards)),
            # A row that could not be scored is not solved, and stays in the denominator.
            f"task/{name}/solve_rate": ops.mean(correct == 1, mine),
            f"task/{name}/unscored": ops.mean(~jnp.isfinite(rewards), mine),
            f"task/{name}/length": ops.mean(lengths, mine),
            f"task/{name}/truncated": ops.mean(truncated, mine),
        }
    return metrics
