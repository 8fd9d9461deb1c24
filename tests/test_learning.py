"""Toy runs that must learn, for every row of the table: from rewards, from pairs, from text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import (
    LUCKY,
    batch_of,
    headed_params,
    plan,
    pool,
    together,
    verifier,
)

from rlx.algorithms import ALGORITHMS, TERMS
from rlx.offline import offline_run
from rlx.prepare import Frozen
from rlx.state import initial_state
from rlx.train import fused
from rlx.verify import callback_verifier

STEPS = 30
# All rows share a program, in which the weights of the terms are an input: 1 for the row in
# question. What is no policy's algorithm learns beside one (`value`) or from pairs.
ONLINE = (*ALGORITHMS, "value")
OFFLINE = tuple(n for n, row in (ALGORITHMS | TERMS).items() if row.source != "rollouts")


def only(name, names):
    weights = np.zeros(len(names), np.float32)
    weights[names.index(name)] = 1.0
    if "value" in names and ALGORITHMS[name].critic:
        weights[names.index("value")] = 0.1
    return jnp.asarray(weights)


def made(names, weights, **changes):
    without_kl = {"grpo": {"beta": 0.0}}
    return together(names, weights, optimizer=optax.adam(0.03), hyper=without_kl, **changes)


@functools.cache
def online():
    """The real step, scanned."""
    base = plan("ppo", {"prompts": 4, "samples": 8, "max_new_tokens": 2})
    verify = callback_verifier(base.sampling, verifier)

    def run(weights, state, frozen, pool):
        learner = made(ONLINE, weights, micro=32, on_policy=True)
        return fused(base._replace(learner=learner), verify)(state, frozen, pool, STEPS)

    return jax.jit(run)


def start(names):
    return initial_state(headed_params(), made(names, None), jax.random.key(1))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_toy_run_learns_from_rewards(name):
    """One token in sixteen is paid for. Advantages of the wrong sign, or of other rows, leave the
    solve rate at a sixteenth or below. Rows that learn from pairs or text take a group's best and
    worst, or its right ones."""
    frozen = Frozen(reference=headed_params())
    _, (metrics, _) = online()(only(name, ONLINE), start(ONLINE), frozen, pool())
    rate = np.asarray(metrics["solve_rate"].total / metrics["solve_rate"].count)
    assert rate[:3].mean() < 0.3
    assert rate[-5:].mean() > 0.8


@functools.cache
def given():
    """Six pairs; the preferred text begins with the lucky token and no other holds it. As text to
    imitate, all twelve."""
    rows = batch_of(OFFLINE, 12)
    width = rows.mask.shape[1]
    chosen = np.ravel(rows.signals[OFFLINE.index("dpo")].advantages) > 0
    tokens = np.array(rows.tokens)
    tokens[:, -width:][tokens[:, -width:] == LUCKY] = LUCKY + 1
    tokens[chosen, -width] = LUCKY
    return rows._replace(tokens=jnp.asarray(tokens), margins=jnp.zeros_like(rows.margins))


@functools.cache
def offline():
    def run(weights, state, reference, pool, data):
        learner = made(OFFLINE, weights, micro=8)
        return offline_run(learner, 4)(state, reference, pool, data, STEPS)

    return jax.jit(run)


@functools.cache
def learnt(name):
    return offline()(only(name, OFFLINE), start(OFFLINE), headed_params(), pool(), given())


@pytest.mark.parametrize("name", [n for n in OFFLINE if n != "sft"])
def test_a_toy_run_learns_from_pairs(name):
    _, metrics = learnt(name)
    prefix = "" if name == OFFLINE[0] else f"{name}/"
    accuracy = metrics[f"{prefix}accuracy"].total
    margin = metrics[f"{prefix}margin"].total
    loss = metrics[f"loss/{name}"].total
    np.testing.assert_array_equal(accuracy[-5:], 1.0)
    assert margin[-1] > 5 * abs(float(margin[0])) + 0.01
    assert loss[-1] < loss[0]
    if name == "dpo":
        # The policy is the reference: nothing is preferred yet, and all pairs tie.
        assert loss[0] == pytest.approx(np.log(2), abs=1e-5)
        assert accuracy[0] == 0.5


def test_a_toy_run_learns_from_text():
    state, metrics = learnt("sft")
    nll = np.asarray(metrics["sft/nll"].total)
    assert nll[0] > 2.0
    assert nll[-3:].mean() < 0.5 * nll[0]
    assert state.cursor == 4 * STEPS
    assert state.step == state.updates == STEPS
    # Every epoch of the six units is seen once: 4 and 2, then 2 and 4 and so on.
    lengths = float(jnp.sum(given().mask))
    np.testing.assert_allclose(jnp.sum(metrics["tokens"].total), 20 * lengths)
