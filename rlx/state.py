"""The training state: how it begins, and what of it is counted in every step's metrics."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from model.sharding import mesh_sizes, split_parameters
from rlx import ops
from rlx.learner import Learner
from rlx.mesh import everywhere
from rlx.types import Cursor, Memory, Metrics, Mixture, Moments, Replay, TrainState


def start_memory(kl_beta: float = 0.0, solved: int = 0, replay: Replay | None = None) -> Memory:
    """`solved` is the size of the pool where prompts can be retired, else 0."""
    zero = jnp.float32(0)
    counts = jnp.zeros(solved, jnp.int32) if solved else None
    return Memory(jnp.float32(kl_beta), Moments(zero, zero, zero), counts, replay)


def initial_state(
    params: PyTree,
    learner: Learner,
    key: Key[Array, ""],
    *,
    critic: PyTree | None = None,
    memory: Memory | None = None,
    cursor: Cursor | int = 0,
) -> TrainState:
    """A state that owns every buffer of its own: a step donates it, and a reference that shares
    arrays with the policy must outlive that."""
    params, critic = jax.tree.map(jnp.copy, (params, critic or {}))
    step, updates = jnp.array(0, jnp.int32), jnp.array(0, jnp.int32)
    if isinstance(cursor, Mixture):
        cursor = jax.tree.map(jnp.copy, cursor)
    else:
        cursor = jnp.array(cursor, jnp.int32)
    memory = jax.tree.map(jnp.copy, memory or start_memory())
    rest = everywhere((memory, jnp.copy(key), step, cursor, updates))

    def begin(trained):
        # A new head has no place yet, and what is restored lies as the first state does.
        trained = split_parameters(learner.axes, trained)
        return trained, split_parameters(learner.axes, learner.optimizer.init(trained))

    # What is not there yet needs no more than its place on each device.
    trained = (params, critic)
    (params, critic), opt_state = jax.jit(begin)(trained) if mesh_sizes() else begin(trained)
    return TrainState(params, critic, opt_state, *rest)


def counters(state: TrainState) -> Metrics:
    """Optimizer updates made and prompts drawn since the beginning: three axes that a step, under
    refill or skipped updates, is not."""
    cursor = state.cursor
    drawn = jnp.sum(cursor.drawn) if isinstance(cursor, Mixture) else cursor
    return {
        "updates": ops.scalar_metric(state.updates),
        "prompts_drawn": ops.scalar_metric(drawn),
    }
