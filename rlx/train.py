"""The step, and the scan over it.

A step is one function in two ways to run it. `fused`: whole steps in a `lax.scan` under one jit,
the verifier behind a callback. `staged`: the same function called from Python, its stages jitted
one by one, the verifier called by the host in between.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from rlx import ops
from rlx.rollout import (
    Pending,
    Prompts,
    Sampling,
    Scores,
    absorb,
    begin,
    finish_metrics,
    next_rows,
    sample_round,
)
from rlx.types import Batch, Metrics, Rollout, TrainState
from rlx.update import Learner, recompute_logprobs, update


class Plan(NamedTuple):
    """All that is static in a step."""

    sampling: Sampling
    learner: Learner
    overlong_filter: bool
    """Leave truncated rows out of the loss (after the group's statistics)."""
    old_logprobs: str
    """`current` (one update a batch), `recompute` or `sampler`."""


class Preview(NamedTuple):
    """What a step shows of its text: its rollout and the advantages."""

    rollout: Rollout
    advantages: Float[Array, " B #T"]


class Stages(NamedTuple):
    """The parts of a step, bare or jitted."""

    sample: Callable
    verify: Callable
    absorb: Callable
    prepare: Callable
    update: Callable
    repeat: Callable
    """`while_loop`, of jax or of Python."""


def prepare(
    plan: Plan, params: PyTree, reference: PyTree | None, pending: Pending
) -> tuple[Batch, Preview, Metrics]:
    """Scores the collected rows with the training model and its reference, and sets advantages.

    Statistics of a group are taken before truncated rows are masked out of the loss. Masked
    wholly: rows that could not be scored, and the places of groups that were never found.
    """
    rollout, learner = pending.rollout, plan.learner
    width = rollout.mask.shape[1]
    if plan.old_logprobs == "recompute":
        old = recompute_logprobs(learner, params, rollout.tokens, rollout.positions, width)
        rollout = rollout._replace(old_logprobs=old)
    elif plan.old_logprobs == "sampler":
        rollout = rollout._replace(old_logprobs=rollout.sampler_logprobs)
    if reference is not None:
        ref = recompute_logprobs(learner, reference, rollout.tokens, rollout.positions, width)
        rollout = rollout._replace(ref_logprobs=ref)
    advantages, _ = learner.algorithm.advantages(rollout)
    samples = plan.sampling.samples
    use = jnp.isfinite(rollout.rewards).reshape(-1) & jnp.repeat(pending.kept, samples)
    if plan.overlong_filter:
        use &= ~rollout.truncated
    mask = rollout.mask & use[:, None]
    rows = use[:, None]
    metrics = finish_metrics(plan.sampling, pending) | {
        "advantage/mean": ops.mean(advantages, rows),
        "advantage/std": ops.deviation(advantages, rows),
        "trained_rows": ops.scalar_metric(jnp.sum(use)),
    }
    batch = Batch(
        rollout.tokens,
        rollout.positions,
        mask,
        rollout.sampler_logprobs,
        rollout.old_logprobs,
        rollout.ref_logprobs,
        advantages,
    )
    return batch, Preview(rollout, advantages), metrics


def step(
    plan: Plan, stages: Stages, state: TrainState, reference: PyTree | None, pool: Prompts
) -> tuple[TrainState, tuple[Metrics, Preview]]:
    """Sample, reward, advantages, update: one step of on-line learning."""
    key, sample_key, shuffle_key = jax.random.split(state.key, 3)
    sampling = plan.sampling

    def unfinished(pending: Pending):
        return ~jnp.all(pending.kept) & (pending.round < sampling.max_rounds)

    def draw(pending: Pending):
        samples, rows = stages.sample(
            sampling, state.params, pool, pending.cursor, sample_key, pending.round
        )
        lengths = jnp.sum(samples.mask, axis=1)
        scores = stages.verify(rows, samples.tokens, lengths)
        return stages.absorb(sampling, pool, pending, rows, samples, scores)

    pending = begin(sampling, pool.tokens.shape[1], state.cursor)
    pending = stages.repeat(unfinished, draw, pending)
    batch, preview, metrics = stages.prepare(plan, state.params, reference, pending)
    state = state._replace(key=key, cursor=pending.cursor)
    state, update_metrics = stages.update(plan.learner, state, batch, shuffle_key)
    state = state._replace(step=state.step + 1)
    return state, (metrics | update_metrics | counters(state), preview)


def offline_step(
    learner: Learner, state: TrainState, pool: Prompts, data: Batch, count: int
) -> tuple[TrainState, Metrics]:
    """One step on given text: the next `count` rows of `data`, in the order that `pool` gives."""
    key, shuffle_key = jax.random.split(state.key)
    rows, _ = next_rows(pool, state.cursor, count)
    batch = jax.tree.map(lambda x: x[rows], data)
    state = state._replace(key=key, cursor=state.cursor + count)
    state, metrics = update(learner, state, batch, shuffle_key)
    metrics["tokens"] = ops.scalar_metric(jnp.sum(batch.mask))
    state = state._replace(step=state.step + 1)
    return state, metrics | counters(state)


def counters(state: TrainState) -> Metrics:
    """Optimizer updates made and prompts drawn since the beginning: three axes that a step, under
    refill or skipped updates, is not."""
    return {
        "updates": ops.scalar_metric(state.updates),
        "prompts_drawn": ops.scalar_metric(state.cursor),
    }


def callback_verifier(sampling: Sampling, verifier: Callable) -> Callable:
    """The host's verifier as a part of a jitted program."""
    n, g = sampling.prompts, sampling.samples
    shapes = Scores(
        jax.ShapeDtypeStruct((n, g), np.float32),
        jax.ShapeDtypeStruct((n, g), np.float32),
        jax.ShapeDtypeStruct((n, g, len(sampling.components)), np.float32),
    )

    def on_host(rows, tokens, lengths):
        # No JAX in here: a callback that starts a computation can wait for itself.
        return Scores(*verifier(*host_arrays(n, g, rows, tokens, lengths)))

    return lambda *operands: jax.pure_callback(on_host, shapes, *operands)


def host_arrays(
    n: int, g: int, rows: Any, tokens: Any, lengths: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.asarray(rows), np.asarray(tokens).reshape(n, g, -1), np.asarray(lengths).reshape(n, g)


def fused(plan: Plan, verifier: Callable) -> Callable:
    """(state, reference, pool, length) -> (state, (metrics [length], last preview)), one program
    a length; the state is donated."""
    stages = Stages(
        sample=sample_round,
        verify=callback_verifier(plan.sampling, verifier),
        absorb=absorb,
        prepare=prepare,
        update=update,
        repeat=jax.lax.while_loop,
    )

    @functools.partial(jax.jit, static_argnames="length", donate_argnums=0)
    def run(state, reference, pool, length):
        def one(carry, _):
            state, _ = carry
            state, (metrics, preview) = step(plan, stages, state, reference, pool)
            return (state, preview), metrics

        shapes = jax.eval_shape(lambda s: step(plan, stages, s, reference, pool)[1][1], state)
        empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        (state, preview), metrics = jax.lax.scan(one, (state, empty), length=length)
        return state, (metrics, preview)

    return run


def staged(plan: Plan, verifier: Callable, watch: Callable[[str], Any]) -> Callable:
    """The same signature as `fused`, stage by stage; `watch(name)` is a context manager around
    each phase, for its time."""
    n, g = plan.sampling.prompts, plan.sampling.samples

    def timed(name, function, **jit_options):
        compiled = jax.jit(function, **jit_options)

        def call(*operands):
            with watch(name):
                return jax.block_until_ready(compiled(*operands))

        return call

    def verify(rows, tokens, lengths):
        with watch("verify"):
            return Scores(*map(jnp.asarray, verifier(*host_arrays(n, g, rows, tokens, lengths))))

    def repeat(condition, body, carry):
        while condition(carry):
            carry = body(carry)
        return carry

    stages = Stages(
        sample=timed("sample", sample_round, static_argnums=0),
        verify=verify,
        absorb=timed("absorb", absorb, static_argnums=0),
        prepare=timed("score", prepare, static_argnums=0),
        update=timed("update", update, static_argnums=0, donate_argnums=1),
        repeat=repeat,
    )

    def run(state, reference, pool, length):
        history = []
        for _ in range(length):
            state, (metrics, preview) = step(plan, stages, state, reference, pool)
            history.append(metrics)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *history)
        return state, (stacked, preview)

    return run


def offline_run(learner: Learner, count: int) -> Callable:
    """(state, pool, data, length) -> (state, metrics [length]); the state is donated."""

    @functools.partial(jax.jit, static_argnames="length", donate_argnums=0)
    def run(state, pool, data, length):
        return jax.lax.scan(
            lambda s, _: offline_step(learner, s, pool, data, count), state, length=length
        )

    return run


def initial_state(
    params: PyTree, learner: Learner, key: Key[Array, ""], cursor: Int[Array, ""] | int = 0
) -> TrainState:
    """A state that owns every buffer of its own: a step donates it, and a reference that shares
    arrays with the policy must outlive that."""
    params = jax.tree.map(jnp.copy, params)
    step, cursor, updates = (jnp.array(count, jnp.int32) for count in (0, cursor, 0))
    opt_state = learner.optimizer.init(params)
    return TrainState(params, opt_state, jnp.copy(key), step, cursor, updates)
