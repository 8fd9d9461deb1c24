"""Whole steps: fused equals staged, a scan equals single steps, and a toy run must learn."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import (
    batch,
    initial_params,
    learner,
    movement,
    plan,
    pool,
    quick_compilation,  # noqa: F401
    verifier,
)

from rlx import ops
from rlx.algorithms import ALGORITHMS
from rlx.train import fused, initial_state, offline_run, staged

STEPS = 3
# Two updates a step, and a KL term: every stage has something to do. The rate moves parameters
# far beyond rounding, and not so far that rounding decides which token is drawn.
PLAN = plan("grpo", rate=0.05, epochs=2, on_policy=False)


def start(made):
    return initial_state(initial_params(), made, jax.random.key(1))


@functools.cache
def scanned():
    run = fused(PLAN, verifier)
    return run(start(PLAN.learner), initial_params(), pool(), STEPS)


HOST = {"verifier": verifier}
"""What the staged steps ask now."""
PHASES = []


@functools.cache
def stages():
    """Compiled once for all tests."""

    def watch(name):
        PHASES.append(name)
        return contextlib.nullcontext()

    return staged(PLAN, lambda *operands: HOST["verifier"](*operands), watch)


@functools.cache
def step_by_step():
    """Each step's preview and the phases, beside the result."""
    previews, history = [], []
    run, state = stages(), start(PLAN.learner)
    PHASES.clear()
    for _ in range(STEPS):
        state, (metrics, preview) = run(state, initial_params(), pool(), 1)
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
    run, state, history = fused(PLAN, verifier), start(PLAN.learner), []
    for _ in range(STEPS):
        state, (metrics, preview) = run(state, initial_params(), pool(), 1)
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
    assert phases == ("sample", "verify", "absorb", "score", "update") * STEPS


def test_the_samplers_logprobs_are_the_trainers():
    _, (metrics, _) = scanned()
    assert float(jnp.max(metrics["sampler_gap/max"].value)) < 1e-4
    # The second epoch's ratio has left 1.
    assert float(jnp.max(metrics["ratio/max"].value)) > 1.001


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
        return nothing, nothing, nothing[..., None]

    monkeypatch.setitem(HOST, "verifier", fails)
    state, (metrics, preview) = stages()(start(PLAN.learner), initial_params(), pool(), 1)
    values = ops.values(jax.tree.map(lambda x: x[0], metrics))
    assert values["unscored"] == 1.0
    assert values["skipped"] == 1.0
    assert values["trained_rows"] == 0.0
    assert state.step == 1
    assert state.cursor == 2
    assert state.updates == 0
    assert movement(initial_params(), state.params) == 0.0
    assert jnp.isnan(preview.rollout.rewards).all()


def learning_plan(name):
    sample = {"prompts": 4, "samples": 8, "max_new_tokens": 2}
    if name == "dapo":
        sample |= {"dynamic": True, "max_rounds": 3}
    hyper = {"beta": 0.0} if "beta" in ALGORITHMS[name].hyper_parameters() else {}
    return plan(
        name,
        sample,
        micro=32,
        algorithm=ALGORITHMS[name].bind(**hyper),
        optimizer=optax.adam(0.03),
    )


@pytest.mark.parametrize("name", [n for n, row in ALGORITHMS.items() if row.advantages])
def test_a_toy_run_learns_from_rewards(name):
    """One token in sixteen is paid for. Advantages of the wrong sign, or of other rows, leave the
    solve rate at a sixteenth or below."""
    made = learning_plan(name)
    _, (metrics, _) = fused(made, verifier)(start(made.learner), None, pool(), 30)
    rate = np.asarray(metrics["solve_rate"].total / metrics["solve_rate"].count)
    assert rate[:3].mean() < 0.3
    assert rate[-5:].mean() > 0.8


@pytest.mark.parametrize("name", [n for n, row in ALGORITHMS.items() if not row.advantages])
def test_a_toy_run_learns_from_text(name):
    made = learner(name, micro=4, optimizer=optax.adam(0.03))
    data = batch(6)
    state, metrics = offline_run(made, 4)(start(made), pool(), data, 30)
    nll = np.asarray(metrics["nll"].total)
    assert nll[0] > 2.0
    assert nll[-3:].mean() < 0.5 * nll[0]
    assert state.cursor == 120
    assert state.step == state.updates == 30
    # Every epoch of the six rows is seen once: 4 and 2, then 2 and 4 and so on.
    lengths = float(jnp.sum(data.mask))
    np.testing.assert_allclose(jnp.sum(metrics["tokens"].total), 20 * lengths)
