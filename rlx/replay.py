"""Groups kept from earlier steps, to take the place of those that teach nothing.

A group whose rewards are all equal has no advantage, yet its rows cost as much as others. Its place
in the batch is taken by a group with differences from an earlier step, which its own old
log-probabilities correct for: the ratio of the loss is of the policy now to the policy then.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from rlx import ops
from rlx.types import Metrics, Replay, Rollout


def empty_replay(rollout: Rollout, groups: int) -> Replay:
    """Room for `groups` groups of the shapes in `rollout`."""
    n = rollout.rewards.shape[0]

    def room(x):
        return jnp.zeros((groups * (x.shape[0] // n), *x.shape[1:]), x.dtype)

    nothing = jnp.full(groups, -1, jnp.int32)
    return Replay(jax.tree.map(room, rollout), nothing, jnp.zeros(groups, jnp.int32))


def exchange(
    replay: Replay,
    rollout: Rollout,
    useful: Bool[Array, " N"],
    step: Int[Array, ""],
    max_age: int,
) -> tuple[Rollout, Replay, Metrics]:
    """The rollout with kept groups in the place of those that are not `useful`, and the replay with
    this step's useful groups in it.

    The kept ones that were used least come first, of those the newest. Beyond its room the replay
    forgets the oldest.
    """
    n = rollout.rewards.shape[0]
    size = replay.born.shape[0]
    live = (replay.born >= 0) & (step - replay.born <= max_age)
    # Places that want a group, in order, and groups that may be used, in order.
    turn = jnp.lexsort((-replay.born, replay.uses, ~live))
    rank = jnp.cumsum(~useful) - 1
    count = jnp.sum(live)
    filled = ~useful & (rank < count)
    source = turn[jnp.clip(rank, 0, size - 1)]
    taken = jnp.zeros(size, jnp.int32).at[source].add(filled.astype(jnp.int32))
    merged = _choose(rollout, replay.rollout, jnp.where(filled, n + source, jnp.arange(n)), n, size)
    # The newest that still live stay; what this step sampled is the newest.
    born = jnp.concatenate([jnp.where(useful, step, -1), jnp.where(live, replay.born, -1)])
    uses = jnp.concatenate([jnp.zeros(n, jnp.int32), replay.uses + taken])
    stay = jnp.argsort(-born, stable=True)[:size]
    kept = Replay(_choose(rollout, replay.rollout, stay, n, size), born[stay], uses[stay])
    age = (step - replay.born[source]).astype(jnp.float32)
    metrics = {
        "replay/filled": ops.mean(filled[:, None], jnp.ones((n, 1), bool)),
        "replay/age": ops.mean(age[:, None], filled[:, None]),
        "replay/held": ops.scalar_metric(jnp.sum(kept.born >= 0)),
    }
    return merged, kept, metrics


def _choose(
    first: Rollout, second: Rollout, chosen: Int[Array, " groups"], n: int, size: int
) -> Rollout:
    """Groups of both, counted through."""

    def leaf(a, b):
        groups = [x.reshape(k, x.shape[0] // k, *x.shape[1:]) for x, k in ((a, n), (b, size))]
        picked = jnp.concatenate(groups)[chosen]
        return picked.reshape(-1, *a.shape[1:])

    return jax.tree.map(leaf, first, second)
