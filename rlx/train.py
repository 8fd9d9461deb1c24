"""The step of on-line learning, and the scan over it.

A step is one function in two ways to run it. `fused`: whole steps in a `lax.scan` under one jit,
the verifier behind a callback. `staged`: the same function called from Python, its stages jitted
one by one, the verifier called by the host in between.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from model.lora import beside
from rlx.prepare import Frozen, Plan, Preview, Scored, make_batch, prepare, score_samples
from rlx.probe import choose_probed, complete_probed, rest, wide
from rlx.prompts import Prompts
from rlx.rollout import Sampling, sample_round, sample_rows
from rlx.rounds import Pending, absorb, begin
from rlx.state import counters
from rlx.types import Metrics, TrainState
from rlx.update import update


class Stages(NamedTuple):
    """The parts of a step, bare or jitted."""

    sample: Callable
    complete: Callable
    """Samples the rest of probed groups."""
    verify: Callable
    absorb: Callable
    choose: Callable
    """Of the probed prompts."""
    join: Callable
    """Probed groups and their rest."""
    prepare: Callable
    """Scores of the training model and the batch, where verdicts decide which rows are kept."""
    score: Callable
    """The former alone, where all are: of samples that are not verified yet. It is only begun."""
    wait: Callable
    """Until scoring is done."""
    make_batch: Callable
    update: Callable
    repeat: Callable
    """`while_loop`, of jax or of Python."""


class Program(NamedTuple):
    """A stage that is jitted by itself."""

    phase: str
    """Whose time it is counted to."""
    function: Callable
    donated: tuple[int, ...] = ()
    """Operands that the program may write its results over. The first operand is static."""

    def jitted(self) -> Callable:
        return jax.jit(self.function, static_argnums=0, donate_argnums=self.donated)


PROGRAMS = {
    "sample": Program("sample", sample_round),
    "complete": Program("sample", sample_rows),
    "absorb": Program("absorb", absorb),
    "choose": Program("absorb", choose_probed),
    "join": Program("absorb", complete_probed),
    "prepare": Program("score", prepare),
    "score": Program("score", score_samples),
    "make_batch": Program("score", make_batch),
    "update": Program("update", update, donated=(1,)),
}
"""What a staged step runs on the devices, by the name in `Stages`."""


def step(
    plan: Plan, stages: Stages, state: TrainState, frozen: Frozen, pool: Prompts
) -> tuple[TrainState, tuple[Metrics, Preview]]:
    """Sample, reward, advantages, update: one step of on-line learning."""
    key, sample_key, shuffle_key = jax.random.split(state.key, 3)
    acting = state._replace(params=beside(frozen.base, state.params))
    if plan.sampling.probe or plan.sampling.dynamic:
        collect = collect_probed if plan.sampling.probe else collect_rounds
        pending = collect(plan.sampling, stages, acting, frozen, pool, sample_key)
        prepared = stages.prepare(plan, acting, frozen, pending)
    else:
        pending, scored = collect_all(plan, stages, acting, frozen, pool, sample_key)
        prepared = stages.make_batch(plan, acting, pending, scored)
    batch, preview, memory, metrics = prepared
    state = state._replace(key=key, cursor=pending.cursor, memory=memory)
    state, update_metrics = stages.update(plan.learner, state, batch, shuffle_key, frozen.base)
    state = state._replace(step=state.step + 1)
    return state, (metrics | update_metrics | counters(state), preview)


def collect_all(
    plan: Plan,
    stages: Stages,
    state: TrainState,
    frozen: Frozen,
    pool: Prompts,
    key: Key[Array, ""],
) -> tuple[Pending, Scored]:
    """The next N groups, whatever their rewards: so the training model scores them while the host
    verifies them."""
    sampling, memory = plan.sampling, state.memory
    samples, draw = stages.sample(
        sampling, state.params, pool, state.cursor, memory.solved, key, jnp.int32(0)
    )
    scored = stages.score(plan, state, frozen, pool, draw.rows, samples)
    scores = stages.verify(frozen, pool, draw.rows, samples)
    scored = stages.wait(scored)
    pending = begin(sampling, pool.tokens.shape[1], state.cursor, memory.solved)
    return stages.absorb(sampling, pool, pending, draw, samples, scores), scored


def collect_rounds(
    sampling: Sampling,
    stages: Stages,
    state: TrainState,
    frozen: Frozen,
    pool: Prompts,
    key: Key[Array, ""],
) -> Pending:
    """N informative groups, in rounds of N prompts; fewer where the rounds end first."""

    def unfinished(pending: Pending):
        return ~jnp.all(pending.kept) & (pending.round < sampling.max_rounds)

    def one_round(pending: Pending):
        samples, draw = stages.sample(
            sampling, state.params, pool, pending.cursor, pending.solved, key, pending.round
        )
        scores = stages.verify(frozen, pool, draw.rows, samples)
        return stages.absorb(sampling, pool, pending, draw, samples, scores)

    pending = begin(sampling, pool.tokens.shape[1], state.cursor, state.memory.solved)
    return stages.repeat(unfinished, one_round, pending)


def collect_probed(
    sampling: Sampling,
    stages: Stages,
    state: TrainState,
    frozen: Frozen,
    pool: Prompts,
    key: Key[Array, ""],
) -> Pending:
    """N groups: a few samples of many prompts, then the rest for the most promising."""
    samples, draw = stages.sample(
        wide(sampling), state.params, pool, state.cursor, state.memory.solved, key, jnp.int32(0)
    )
    scores = stages.verify(frozen, pool, draw.rows, samples)
    probed = stages.choose(sampling, pool, state.memory.solved, draw, samples, scores)
    chosen = probed.draw
    samples = stages.complete(
        rest(sampling),
        state.params,
        pool,
        chosen.rows,
        chosen.epochs,
        jax.random.fold_in(key, 0),
        jnp.int32(sampling.probe),
    )
    scores = stages.verify(frozen, pool, chosen.rows, samples)
    return stages.join(sampling, pool, probed, samples, scores)


def fused(plan: Plan, verify: Callable) -> Callable:
    """(state, frozen, pool, length) -> (state, (metrics [length], last preview)), one program a
    length; the state is donated. `verify` is what `callback_verifier` or `model_verifier` gives."""
    stages = Stages(
        sample=sample_round,
        complete=sample_rows,
        verify=verify,
        absorb=absorb,
        choose=choose_probed,
        join=complete_probed,
        prepare=prepare,
        score=score_samples,
        wait=_as_it_is,
        make_batch=make_batch,
        update=update,
        repeat=jax.lax.while_loop,
    )

    @functools.partial(jax.jit, static_argnames="length", donate_argnums=0)
    def fused_steps(state, frozen, pool, length):
        def one(carry, _):
            state, _ = carry
            state, (metrics, preview) = step(plan, stages, state, frozen, pool)
            return (state, preview), metrics

        shapes = jax.eval_shape(lambda s: step(plan, stages, s, frozen, pool)[1][1], state)
        empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        (state, preview), metrics = jax.lax.scan(one, (state, empty), length=length)
        return state, (metrics, preview)

    return fused_steps


def _as_it_is(results: PyTree) -> PyTree:
    return results


def staged(
    plan: Plan,
    verify: Callable,
    watch: Callable[[str], Any],
    guard: Callable[[str, Callable], Callable] = lambda name, program: program,
) -> Callable:
    """The same signature as `fused`, stage by stage; `watch(name)` is a context manager around
    each phase, for its time. `verify` is what `host_verifier` or `model_verifier` gives. `guard`
    gets each program by its name in `Stages`, and gives what is called in its place.

    A phase lasts until its results are there, so that the phases add up to the step; but scoring,
    where it runs while the host verifies, is only waited for afterwards. `verify` is then all that
    verifying takes, and `score` what scoring adds to it.
    """

    def timed(name, until=jax.block_until_ready):
        program = PROGRAMS[name]
        compiled = guard(name, program.jitted())

        def call(*operands):
            with watch(program.phase):
                return until(compiled(*operands))

        return call

    def wait(scored):
        with watch("score"):
            return jax.block_until_ready(scored)

    def verify_timed(*operands):
        with watch("verify"):
            return jax.block_until_ready(verify(*operands))

    def repeat(condition, body, carry):
        while condition(carry):
            carry = body(carry)
        return carry

    stages = Stages(
        **{name: timed(name) for name in PROGRAMS if name != "score"},
        score=timed("score", until=_as_it_is),
        verify=verify_timed,
        wait=wait,
        repeat=repeat,
    )

    def run(state, frozen, pool, length):
        history = []
        for _ in range(length):
            state, (metrics, preview) = step(plan, stages, state, frozen, pool)
            history.append(metrics)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *history)
        return state, (stacked, preview)

    return run
