"""Training on given text, nothing of which is sampled: a step, and the scan over it."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from rlx import ops
from rlx.frozen import on_device
from rlx.learner import Learner
from rlx.prompts import Prompts, next_rows
from rlx.scoring import score_rows
from rlx.state import counters
from rlx.types import Batch, Metrics, TrainState
from rlx.update import update


def offline_step(
    learner: Learner,
    state: TrainState,
    reference: PyTree | None,
    pool: Prompts,
    data: Batch,
    count: int,
    base: PyTree | None = None,
) -> tuple[TrainState, Metrics]:
    """One step on given text: the next `count` units of `data` (rows, or pairs of rows), in the
    order that `pool` gives, which has a prompt for each unit."""
    key, shuffle_key = jax.random.split(state.key)
    draw = next_rows(pool, state.cursor, count)
    units = draw.rows
    rows = (units[:, None] * learner.unit + jnp.arange(learner.unit)).reshape(-1)
    batch = jax.tree.map(lambda x: x[rows], data)
    if reference is not None:
        width = batch.mask.shape[1]
        reference = on_device(reference)
        scored = score_rows(learner, reference, {}, batch.tokens, batch.positions, width)
        batch = batch._replace(ref_logprobs=scored.logprobs)
    state = state._replace(key=key, cursor=draw.cursor)
    state, metrics = update(learner, state, batch, shuffle_key, base)
    metrics["tokens"] = ops.scalar_metric(jnp.sum(batch.mask))
    state = state._replace(step=state.step + 1)
    return state, metrics | counters(state)


def offline_run(learner: Learner, count: int) -> Callable:
    """(state, reference, pool, data, length, base of adapters) -> (state, metrics [length]); the
    state is donated."""

    @functools.partial(jax.jit, static_argnames="length", donate_argnums=0)
    def offline_steps(state, reference, pool, data, length, base=None):
        return jax.lax.scan(
            lambda s, _: offline_step(learner, s, reference, pool, data, count, base),
            state,
            length=length,
        )

    return offline_steps
