"""Whole steps: fused equals staged, a scan equals single steps."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from toy import (
    initial_params,
    movement,
    plan,
    pool,
    verifier,
)

from rlx import ops
from rlx.prepare import Frozen
from rlx.scoring import score_rows
from rlx.state import initial_state
from rlx.train import fused, staged
from rlx.verify import callback_verifier, host_verifier

STEPS = 3
# Two updates a step, and a KL term: every stage has something to do. The rate moves parameters
# far beyond rounding, and not so far that rounding decides which token is drawn.
TEMPERATURE = 0.6
PLAN = plan(
    "grpo",
    {"temperature": TEMPERATURE},
    rate=0.05,
    epochs=2,
    on_policy=False,
    temperature=TEMPERATURE,
)
frozen = functools.cache(lambda: Frozen(reference=initial_params()))


def start(made):
    return initial_state(initial_params(), made, jax.random.key(1))


@functools.cache
def scanned():
    run = fused(PLAN, callback_verifier(PLAN.sampling, verifier))
    return run(start(PLAN.learner), frozen(), pool(), STEPS)


HOST = {"verifier": verifier}
"""What the staged steps ask now."""
PHASES = []


@functools.cache
def stages():
    """Compiled once for all tests."""

    def watch(name):
        PHASES.append(name)
        return contextlib.nullcontext()

    return staged(PLAN, host_verifier(lambda *operands: HOST["verifier"](*operands)), watch)


@functools.cache
def step_by_step():
    """Each step's preview and the phases, beside the result."""
    previews, history = [], []
    run, state = stages(), start(PLAN.learner)
    PHASES.clear()
    for _ in range(STEPS):
        state, (metrics, preview) = run(state, frozen(), pool(), 1)
        history.append(metrics)
        previews.append(preview)
    stacked = jax.tree.map(lambda *x: jnp.concatenate(x), *history)
    return state, (stacked, previews), tuple(PHASES)


def assert_same_run(one, other):
    """Tokens the same, parameters to 1e-3 of their movement."""
    (state, (metrics, preview)), (state_0, (metrics_0, preview_0)) = one, other
    np.testing.assert_array_equal(preview.rollout.tokens, preview_0.rollout.tokens)
    np.testing.assert_array_equal(preview.rollout.rows, preview_0.rollout.rows)
    np.testing.assert_array_equal(preview.rollout.rewards, preview_0.rollout.rewards)
    np.testing.assert_allclose(preview.advantages, preview_0.advantages, atol=1e-5)
    moved = movement(initial_params(), state_0.params)
    assert moved > 1e-2
    assert movement(state.params, state_0.params) <= 1e-3 * moved
    for clock in ("step", "cursor", "updates"):
        assert getattr(state, clock) == getattr(state_0, clock)
    np.testing.assert_array_equal(jax.random.key_data(state.key), jax.random.key_data(state_0.key))
    assert metrics.keys() == metrics_0.keys()
    for name in ("loss", "solve_rate", "length/mean", "kl", "entropy", "gradient_norm"):
        np.testing.assert_allclose(
            metrics[name].total, metrics_0[name].total, rtol=2e-3, atol=1e-5, err_msg=name
        )


def test_fused_equals_staged():
    state, (metrics, previews), _ = step_by_step()
    assert_same_run(scanned(), (state, (metrics, previews[-1])))


def test_a_scan_of_steps_equals_single_steps():
    """Each step alone through the same program's maker, with the state handed on by Python."""
    run = fused(PLAN, callback_verifier(PLAN.sampling, verifier))
    state, history = start(PLAN.learner), []
    for _ in range(STEPS):
        state, (metrics, preview) = run(state, frozen(), pool(), 1)
        history.append(metrics)
    stacked = jax.tree.map(lambda *x: jnp.concatenate(x), *history)
    assert_same_run(scanned(), (state, (stacked, preview)))


def test_clocks_count_steps_updates_and_prompts_apart():
    state, (metrics, _) = scanned()
    assert state.step == STEPS
    assert state.updates == 2 * STEPS
    assert state.cursor == 2 * STEPS
    assert metrics["loss"].total.shape == (STEPS,)


def test_two_steps_never_say_the_same():
    """The pool of 6 is seen once in three steps; a prompt's siblings differ too."""
    _, (_, previews), _ = step_by_step()
    rows = np.concatenate([p.rollout.rows for p in previews])
    assert sorted(rows.tolist()) == list(range(6))
    for preview in previews:
        texts = np.asarray(preview.rollout.tokens)[:, 8:].reshape(2, 4, -1)
        assert all(len(np.unique(group, axis=0)) > 1 for group in texts)


def test_the_host_sees_every_phase():
    *_, phases = step_by_step()
    order = ("sample", "score", "verify", "score", "absorb", "score", "update")
    assert phases == order * STEPS


def test_the_samplers_logprobs_are_the_trainers():
    _, (metrics, _) = scanned()
    assert float(jnp.max(metrics["sampler_gap/max"].value)) < 1e-4
    # The second epoch's ratio has left 1.
    assert float(jnp.max(metrics["ratio/max"].value)) > 1.001


def test_sampler_and_trainer_have_the_temperature():
    """Without it in both, they would agree all the same."""
    _, (_, previews), _ = step_by_step()
    text = previews[0].rollout

    def gap(temperature):
        made = PLAN.learner._replace(temperature=temperature)
        scored = score_rows(
            made, initial_params(), {}, text.tokens, text.positions, text.mask.shape[1]
        )
        gaps = jnp.abs(scored.logprobs - text.sampler_logprobs)
        return float(jnp.max(jnp.where(text.mask, gaps, 0)))

    assert gap(TEMPERATURE) < 1e-4
    assert gap(1.0) > 0.05


def test_a_reference_outlives_the_policy_that_is_given_away():
    """At the start both are one tree of arrays: donated without a copy, the second step would
    read deleted buffers."""
    scanned()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(initial_params()))
    assert jnp.isfinite(initial_params()["embed"]["embedding"]).all()


def test_a_verifier_that_fails_everywhere_changes_nothing(monkeypatch):
    """Rows without a score: a step is taken and counted, an update is not."""

    def fails(rows, tokens, lengths):
        nothing = np.full(lengths.shape, np.nan, np.float32)
        return nothing, nothing, nothing[..., None], np.zeros(tokens.shape, np.float32)

    monkeypatch.setitem(HOST, "verifier", fails)
    state, (metrics, preview) = stages()(start(PLAN.learner), frozen(), pool(), 1)
    values = ops.values(jax.tree.map(lambda x: x[0], metrics))
    assert values["unscored"] == 1.0
    assert values["skipped"] == 1.0
    assert values["trained_rows"] == 0.0
    assert state.step == 1
    assert state.cursor == 2
    assert state.updates == 0
    assert movement(initial_params(), state.params) == 0.0
    assert jnp.isnan(preview.rollout.rewards).all()
